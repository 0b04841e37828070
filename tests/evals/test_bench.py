"""The bench on a tiny model: what it measures has the rows and the context that it says, and no draft is accepted."""

from __future__ import annotations

import pytest

from specdec.build import Options
from specdec.errors import ConfigError
from specdec.evals.bench import Step, WrongChain, bench_decode, unlikely_token
from specdec.evals.report import bench_tables
from specdec.llm import LLM
from specdec.sequence import Emission
from tests.server.conftest import write_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny")
    return LLM(str(folder), Options(device="cpu", dtype="float32", max_model_len=512, max_drafts=7))


class Watching:
    """Measures a step as the rows of its sequence, and keeps where in the KV it was."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def __call__(self, step: Step) -> tuple[list[Emission], float]:
        emissions = step()
        (emission,) = emissions
        self.slots.append(len(emission.seq.tokens))
        return emissions, float(1 + emission.num_drafts)


def test_steps_have_the_rows_asked_for_around_the_context(llm: LLM) -> None:
    watching = Watching()
    found = bench_decode(llm, [1, 4, 8], context=128, rounds=2, samples=3, measure=watching)
    for kind in ("rows_ms", "rows_ms_sampled", "rows_ms_schema"):
        assert found[kind] == {"1": 1000.0, "4": 4000.0, "8": 8000.0}
    decoding = [length for length in watching.slots if length < 300]
    assert len(decoding) >= 3 * 2 * 9
    assert all(abs(length - 128) <= 24 for length in decoding)
    assert found["prefill_tokens"] == 510
    assert found["prefill_tokens_per_s"] == 510.0
    assert llm.loaded.engine.metrics.acceptance.accepted_tokens == 0
    assert not llm.loaded.engine.has_work


def test_a_profile_has_the_areas_of_a_step(llm: LLM) -> None:
    found = bench_decode(llm, [1, 2], context=128, rounds=1, samples=2, profile=True)
    by_row = found["profile"]["rows_ms_schema"]["2"]
    assert {"linears", "attention", "norm and rotary", "sampling", "grammar", "drafting"} <= set(by_row)
    assert all(milliseconds > 0 for milliseconds in by_row.values())
    tables = bench_tables(found)
    assert len(tables) == 5
    assert tables[0].row_count == 3


def test_the_guess_is_a_token_that_a_json_string_may_hold(llm: LLM) -> None:
    token = unlikely_token(llm.loaded.tokenizer, llm.loaded.engine.runner.vocab_size)
    assert llm.loaded.tokenizer.token_bytes(token).isalpha()
    assert WrongChain(token).draft([]) == []


@pytest.mark.parametrize(
    ("rows", "context", "complaint"),
    [([1, 9], 128, r"max_drafts \+ 1 = 8, got 9"), ([1], 20, "context must be above 24"), ([1], 500, "at most")],
)
def test_what_the_engine_cannot_hold_is_refused(llm: LLM, rows: list[int], context: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        bench_decode(llm, rows, context=context, samples=12)
