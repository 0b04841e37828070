"""The numbers of an acceptance report, against a trace counted by hand; and a whole report on a tiny model."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence as Seq

import pytest
from rich.console import Console

from specdec.build import Options
from specdec.errors import InvalidRequest
from specdec.evals.acceptance import Outcome, loops, measure, report, summary
from specdec.evals.exactness import Difference
from specdec.evals.prompts import EvalPrompt
from specdec.evals.report import acceptance_tables
from specdec.evals.runs import Pair, Run
from specdec.free import FREE_TEXT
from specdec.grammar.spec import Choice, Regex
from specdec.llm import LLM
from specdec.metrics import Acceptance
from specdec.request import Request, Sampling, Stopping
from specdec.sequence import Sequence
from tests.fakes import letters
from tests.server.conftest import write_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    options = Options(device="cpu", dtype="float32", max_model_len=256, kv_cache_tokens=512, policy="fixed")
    return LLM(str(write_model(tmp_path_factory.mktemp("models") / "tiny")), options)


def finished(trace: Seq[tuple[int, int]], seconds: float) -> Run:
    """A run whose draws verified so many drafts and accepted so many: (drafts, accepted) each."""
    acceptance = Acceptance()
    for drafts, accepted in trace:
        acceptance.count(["x"] * drafts, ["x"] * accepted)
    tokens = sum(1 + accepted for _, accepted in trace)
    seq = Sequence(
        "r", 0, Request((1, 2)), 0, [1, 2, *range(tokens)], FREE_TEXT, letters(Stopping()), tokens, frozenset()
    )
    seq.acceptance, seq.finish_reason = acceptance, "length"
    return Run(seq, "", seconds, tokens - 1 - trace[0][1], cost=1.5 * len(trace), plain_cost=1.0 * tokens)


def outcome(name: str, trace: Seq[tuple[int, int]], seconds: float, *, parted: Difference | None = None) -> Outcome:
    tokens = sum(1 + accepted for _, accepted in trace)
    plain = finished([(0, 0)] * tokens, float(tokens))
    pair = Pair(plain, finished(trace, seconds), float(tokens), seconds)
    return Outcome(EvalPrompt(name, name[0], ({"role": "user", "content": "x"},)), pair, parted, name.endswith("loop"))


def test_pooled_numbers_are_those_counted_by_hand() -> None:
    one = outcome("a1", [(0, 0), (3, 2), (3, 0), (2, 2)], 4.0)  # 1 + 3 + 1 + 3 tokens
    two = outcome("a2", [(4, 1), (0, 0)], 1.0)  # 2 + 1 tokens
    assert summary([one, two]) == {
        "requests": 2,
        "equal_texts": 2,
        "tokens": 11,
        "tokens_per_forward": 11 / 6,
        "acceptance_length": 1 + 5 / 4,  # 4 draws with drafts
        "acceptance_rate": 5 / 12,
        "accepted_per_position": [3 / 4, 2 / 4],
        "tokens_per_second": (7 + 1) / 5.0,
        "plain_tokens_per_second": (7 + 2) / 11.0,
        "speedup": pytest.approx((8 / 5) / (9 / 11)),
        "cost_ratio": 1.5 * 6 / 11,
    }


def test_ratios_of_nothing_are_none() -> None:
    empty = summary([])
    assert empty["tokens_per_forward"] is None
    assert empty["speedup"] is None
    assert empty["accepted_per_position"] == []


def test_loops_and_differences_are_told_apart() -> None:
    outcomes = [
        outcome("a1", [(0, 0), (3, 2)], 1.0),
        outcome("b loop", [(0, 0), (3, 3)], 1.0),
        outcome("c1", [(0, 0), (3, 0)], 1.0, parted=Difference(1, 0.25)),
        outcome("c2", [(0, 0), (3, 0)], 1.0, parted=Difference(0, float("inf"), filtered=True)),
    ]
    found = report(outcomes)
    assert found["looping"] == ["b loop"]
    assert found["without_looping"]["requests"] == 3
    assert found["equal_texts"] == 2
    assert found["first_differences"] == [
        {"id": "c1", "index": 1, "gap": 0.25, "filtered": False},
        {"id": "c2", "index": 0, "gap": None, "filtered": True},
    ]
    assert {name: part["requests"] for name, part in found["categories"].items()} == {"a": 1, "b": 1, "c": 2}
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], False),
        (list(range(200)), False),
        ([7] * 33, True),
        ([7] * 32, False),
        ([*range(50), *[1, 2, 3] * 12], True),
        ([*list(range(40)) * 3, 99], True),  # a long cycle: three times
        (list(range(40)) * 2, False),  # said twice is not a circle
        ([*range(100), *[5, 6] * 10, *range(100)], False),
    ],
)
def test_a_text_loops_when_a_cycle_comes_three_times_and_is_long(tokens: list[int], expected: bool) -> None:
    assert loops(tokens) is expected


def test_a_prompt_that_does_not_fit_is_named(llm: LLM) -> None:
    long = EvalPrompt("too long", "chat", ({"role": "user", "content": "x" * 300},))
    with pytest.raises(InvalidRequest, match="too long: prompt: is 3"):
        measure(llm, [long], Sampling(seed=1), Stopping())


def test_a_tiny_model_gives_a_whole_report_with_equal_texts(llm: LLM) -> None:
    ask = ({"role": "user", "content": "abcabcabc"},)
    prompts = [
        EvalPrompt("free", "chat", ask),
        EvalPrompt("pattern", "json", ask, Regex(r'\{"answer":"[a-d]{8}","certain":(true|false)\}')),
        EvalPrompt("one of two", "json", ask, Choice(("certainly not", "certainly so"))),
    ]
    counted: list[tuple[int, int]] = []
    outcomes = measure(
        llm,
        prompts,
        Sampling(temperature=1.0, seed=5),
        Stopping(max_tokens=48),
        progress=lambda done, total: counted.append((done, total)),
    )
    found = report(outcomes)
    assert counted == [(1, 3), (2, 3), (3, 3)]
    assert found["equal_texts"] == found["requests"] == 3
    assert found["first_differences"] == []
    assert found["categories"]["json"]["tokens_per_forward"] > 2.0  # the grammar forces most of it
    assert found["accepted_per_position"][0] > 0.0
    assert found["prompts"][1]["text"].startswith('{"answer":"')
    assert found["prompts"][2]["finish_reason"] == "stop"
    json.dumps(found, allow_nan=False)
    console = Console(width=200, record=True, file=io.StringIO())
    for table in acceptance_tables(found):
        console.print(table)
    printed = console.export_text()
    assert "one of two" in printed
    assert "3 of 3" in printed
