"""The Python face on a tiny model: defaults, streams, choices, and what stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.build import Options
from specdec.errors import ModelError
from specdec.llm import LLM
from specdec.request import Sampling, Stopping
from tests.server.conftest import write_model

OPTIONS = Options(device="cpu", dtype="float32", max_model_len=128)
SHORT = Stopping(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(write_model(tmp_path_factory.mktemp("models") / "tiny")), OPTIONS)


def test_a_model_s_own_sampling_holds_where_none_is_given(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "top_k": -1, "eos_token_id": 258}')
    greedy = LLM(str(folder), OPTIONS).generate("abc", Sampling(temperature=0.0), SHORT).choices[0].tokens
    assert LLM(str(folder), OPTIONS).generate("abc", stopping=SHORT).choices[0].tokens == greedy
    (folder / "generation_config.json").write_text('{"temperature": 7.0, "eos_token_id": 258}')
    with pytest.raises(ModelError, match=r"generation_config.json: temperature: must be at least 0.0 and at most 2.0"):
        LLM(str(folder), OPTIONS)


def test_a_stream_shows_what_generate_returns_choice_by_choice(llm: LLM) -> None:
    sampling = Sampling(seed=3)
    whole = llm.generate("abc", sampling, SHORT, n=3)
    streamed = dict.fromkeys(range(3), "")
    for emission in llm.stream("abc", sampling, SHORT, n=3):
        streamed[emission.seq.index] += emission.text
    assert [choice.text for choice in whole.choices] == list(streamed.values())
    assert len({choice.text for choice in whole.choices}) == 3
    assert all(len(choice.tokens) == 12 and choice.finish_reason == "length" for choice in whole.choices)


def test_a_stream_that_is_closed_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.stream("abc", Sampling(seed=3), SHORT)
    next(stream)
    assert llm.loaded.engine.scheduler.pool.usage > 0.0
    stream.close()  # type: ignore[attr-defined]
    assert not llm.loaded.engine.has_work
    assert llm.loaded.engine.scheduler.pool.usage == 0.0
