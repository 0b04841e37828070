"""Drawing all rows of a step at once gives what drawing them one by one gives: tokens, log-probabilities, errors; by
the references, and by Triton's kernels in the interpreter, where rounding cannot change a draw."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specdec.drawing import Drawing, Drawn, enqueue
from specdec.errors import ConstraintError, DeadEnd, NumericalError, SpecdecError
from specdec.free import FREE_TEXT
from specdec.kernels.device import interpreted
from specdec.kernels.draws import Draws
from specdec.kernels.rounding import certain
from specdec.mask import TokenMask
from specdec.request import Request, Sampling, Stopping
from specdec.sampling import Picks, scores
from specdec.sequence import Logprob, Sequence, Span
from specdec.staging import Staging
from specdec.text import Detokenizer
from specdec.tree import EMPTY, DraftTree, chain
from tests.kernels.cover import pairwise
from tests.masks import allow
from tests.no_sync import no_sync

VOCAB_SIZE = 45
ENDS = (0, 44)
STOPS = (7, 8)
Outcome = tuple[int, Logprob | None] | tuple[type[SpecdecError], str]

DIMENSIONS: dict[str, list[Any]] = {
    "temperature": [0.0, 1e-5, 0.7, 2.0],
    "filters": [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.02}],
    "penalties": [
        {},
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.1, "frequency_penalty": -0.4},
        {"repetition_penalty": 0.6, "presence_penalty": -2.0, "frequency_penalty": 0.3},
    ],
    "bias": [{}, {3: 4.0, 11: -100.0}, {0: 100.0, 7: 100.0, 20: 1.5}],
    "stopping": [
        Stopping(),
        Stopping(min_tokens=4, stop_token_ids=STOPS),
        Stopping(ignore_eos=True),
        Stopping(min_tokens=99, stop_token_ids=STOPS, ignore_eos=True),
    ],
    "mask": ["free", "wide", "narrow", "ends", "stops", "nothing", "fails"],
    "logprobs": [None, 0, 3, 20],
    "tree": ["root", "chain", "branches", "none"],
    "output": [0, 3],
}
CASES = {
    "references": pairwise(DIMENSIONS),
    # The interpreter takes a tenth of a second for a row, and several for filters.
    "kernels": pairwise(
        DIMENSIONS
        | {
            "filters": [{}, DIMENSIONS["filters"][1], DIMENSIONS["filters"][-1]],
            "mask": ["free", "wide", "stops", "nothing"],
            "tree": ["root", "pair"],
        }
    ),
}


def filling(kind: str, rng: random.Random) -> NDArray[np.int32]:
    """A row of a mask, worked out late. Raises `ConstraintError` where it `fails`."""
    if kind == "fails":
        raise ConstraintError("no row here")
    words_W = np.zeros((VOCAB_SIZE + 31) // 32, np.int32)
    tokens = {
        "wide": rng.sample(range(VOCAB_SIZE), 30),
        "narrow": rng.sample(range(VOCAB_SIZE), 3),
        "ends": ENDS,
        "stops": (*ENDS, *STOPS),
        "nothing": (),
    }[kind]
    allow(words_W, tokens)
    return words_W


def grown(kind: str, last: int, rng: random.Random) -> DraftTree:
    """A tree under the token `last`; "none" is that of a span that stops short of the frontier."""
    if kind == "none":
        return EMPTY
    drafts = [rng.randrange(VOCAB_SIZE) for _ in range(3)]
    if kind == "branches":
        return DraftTree((last, 5, 6, drafts[0]), (-1, 0, 0, 2), (1.0, 0.5, 0.4, 0.3), ("", "x", "x", "x"))
    return chain(last, drafts[: {"root": 0, "pair": 1, "chain": 3}[kind]], "x")


@dataclass(frozen=True)
class Step:
    """A step to be drawn. Masks are filled once, so each way of drawing gets its own."""

    logits_LV: torch.Tensor
    spans: list[Span]
    new_mask: Callable[[], TokenMask]

    def nodes(self) -> list[tuple[Span, int, list[int]]]:
        """Each node with the drafts that lead to it."""
        return [
            (span, node, [span.tree.tokens[place] for place in span.tree.path(node)])
            for span in self.spans
            for node in range(len(span.tree))
        ]


def step(cases: list[dict[str, Any]], seed: int) -> Step:
    """One span a case, with a row of nobody's before the first, all kinds of masks and seeds."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    spans: list[Span] = []
    kinds: dict[int, str] = {}
    row = 1
    for case in cases:
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
        tokens = [*prompt, *(rng.randrange(VOCAB_SIZE) for _ in range(case["output"]))]
        sampling = Sampling(
            temperature=case["temperature"],
            logit_bias=case["bias"],
            logprobs=case["logprobs"],
            **case["filters"],
            **case["penalties"],
        )
        seq = Sequence(
            "r",
            0,
            Request(tuple(prompt), sampling, case["stopping"]),
            rng.choice([rng.randrange(2**64), -1, 2**63, 2**64 - 1]),
            tokens,
            FREE_TEXT,
            Detokenizer(lambda token: b""),
            100,
            frozenset(ENDS),
        )
        spans.append(Span(seq, 1, grown(case["tree"], tokens[-1], rng), 0, row, len(tokens) - 1))
        for place in range(row, row + len(spans[-1].tree)):
            if case["mask"] != "free":
                kinds[place] = case["mask"]
        row += len(spans[-1].tree)

    def new_mask() -> TokenMask:
        mask = TokenMask(row, VOCAB_SIZE)
        for place, kind in kinds.items():
            mask.fill_later(place, lambda place=place, kind=kind: filling(kind, random.Random(place)))  # type: ignore[misc]
        return mask

    logits = np.random.default_rng(seed).normal(0, 3, (row, VOCAB_SIZE)).astype(np.float32)
    return Step(torch.from_numpy(logits), spans, new_mask)


def outcome(picks: Picks | Drawn, span: Span, node: int, path: list[int]) -> Outcome:
    """What the walk is told at a node."""
    try:
        return picks.at(span, node, path)
    except SpecdecError as error:
        return type(error), str(error)


def is_sure(logits_V: NDArray[np.float32], seq: Sequence, path: list[int], allowed: NDArray[np.bool_] | None) -> bool:
    """Whether rounding cannot change the draw of a row that can be drawn from."""
    sampling = seq.request.sampling
    draws = Draws(
        torch.tensor([sampling.temperature]),
        torch.tensor([sampling.top_k], dtype=torch.int32),
        torch.tensor([sampling.top_p], dtype=torch.float64),
        torch.tensor([sampling.min_p], dtype=torch.float64),
        torch.from_numpy(np.array([seq.seed % 2**64], np.uint64).view(np.int64)),
        torch.tensor([len(seq.tokens) + len(path)]),
    )
    return certain(torch.from_numpy(scores(logits_V, seq, path, allowed)), draws, 0)


def check_alike(found: Outcome, expected: Outcome) -> None:
    """Equal tokens, errors and lists of tokens; log-probabilities to 1e-5."""
    assert found[0] == expected[0]
    if not isinstance(found[1], Logprob):
        assert found == expected
        return
    assert isinstance(expected[1], Logprob)
    assert found[1].token == expected[1].token
    assert found[1].logprob == pytest.approx(expected[1].logprob, abs=1e-5)
    assert [token for token, _ in found[1].top] == [token for token, _ in expected[1].top]
    assert [value for _, value in found[1].top] == pytest.approx([value for _, value in expected[1].top], abs=1e-5)


@pytest.mark.parametrize("where", ["references", "kernels"])
def test_rows_drawn_at_once_are_the_rows_drawn_one_by_one(where: str) -> None:
    if where == "kernels":
        pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")
    told = step(CASES[where], random.randrange(2**32))
    before_LV = told.logits_LV.clone()
    picks = Picks(told.logits_LV, told.new_mask())
    with interpreted() if where == "kernels" else nullcontext():
        drawn = Drawing().drawn(told.logits_LV, told.new_mask(), told.spans)
    assert torch.equal(told.logits_LV, before_LV)
    unsure = 0
    kinds = set()
    for span, node, path in told.nodes():
        expected, found = outcome(picks, span, node, path), outcome(drawn, span, node, path)
        kinds.add(expected[0] if isinstance(expected[0], type) else int)
        if isinstance(expected[0], int) and where == "kernels":
            row = span.first_logit + node
            allowed = told.new_mask().allowed(row)
            if not is_sure(told.logits_LV[row].numpy(), span.seq, path, allowed):
                unsure += 1
                continue
        check_alike(found, expected)
    print(f"{unsure} of {len(told.nodes())} draws are near ties")
    assert unsure <= 2
    assert kinds == {int, DeadEnd, *([ConstraintError] if where == "references" else [])}


FREE = {
    "temperature": 1.0,
    "filters": {},
    "penalties": {},
    "bias": {},
    "stopping": Stopping(),
    "mask": "free",
    "logprobs": None,
    "tree": "root",
    "output": 0,
}


@pytest.mark.parametrize("where", ["references", "kernels"])
def test_rows_that_are_no_numbers_fail_alone_as_they_do_one_by_one(where: str) -> None:
    if where == "kernels":
        pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")
    tiny = {"penalties": {"repetition_penalty": 2e-38}, "temperature": 0.0, "output": 3}
    cases = [FREE, FREE, FREE, FREE | {"mask": "ends"}, FREE | tiny, FREE | {"bias": {0: 9.0}}, FREE]
    told = step(cases, 4)
    told.logits_LV[2, 9] = torch.nan
    told.logits_LV[3, 9] = torch.inf
    told.logits_LV[4] = -torch.inf  # where a mask forbids all the rest as well
    told.logits_LV[5, told.spans[4].seq.tokens[0]] = 30.0
    told.logits_LV[7, 1:] = -torch.inf
    picks = Picks(told.logits_LV, told.new_mask())
    with interpreted() if where == "kernels" else nullcontext(), np.errstate(over="ignore"):
        drawn = Drawing().drawn(told.logits_LV, told.new_mask(), told.spans)
    found = [outcome(drawn, span, node, path) for span, node, path in told.nodes()]
    assert found == [outcome(picks, span, node, path) for span, node, path in told.nodes()]
    assert [one[0] if isinstance(one[0], type) else int for one in found] == [
        *(int, NumericalError, NumericalError, NumericalError, NumericalError, int, int)
    ]
    assert found[1][1] == f"the model's logits at position {len(told.spans[1].seq.tokens)} are not numbers"
    assert "are not numbers once penalties are applied" in str(found[4][1])
    assert found[6] == (0, None)


def test_scores_are_the_logits_themselves_where_nothing_changes_them() -> None:
    """No row is copied for nothing: the copy, had there been one, would be seen."""
    told = step([FREE, FREE | {"logprobs": 2}], 0)
    seen = 0

    class Clones(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal seen
            seen += func.__name__ == "clone"
            return func(*args, **(kwargs or {}))

    with Clones():
        enqueue(told.logits_LV, told.new_mask(), told.spans, Staging("cpu"))
        assert seen == 0
        for change in ({"bias": {1: 1.0}}, {"mask": "wide"}, {"penalties": {"presence_penalty": 1.0}}):
            changed = step([FREE, FREE | change], 0)
            enqueue(changed.logits_LV, changed.new_mask(), changed.spans, Staging("cpu"))
    assert seen == 3


def test_between_the_logits_and_the_one_answer_nothing_waits_for_the_device() -> None:
    pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")
    everything = {"filters": {"min_p": 0.1}, "penalties": {"presence_penalty": 1.0}, "bias": {1: 2.0}, "logprobs": 3}
    told = step([FREE, FREE | everything | {"mask": "wide", "tree": "pair"}], 2)
    staging, mask = Staging("cpu"), told.new_mask()
    with interpreted():
        with no_sync():
            answer_LN = enqueue(told.logits_LV, mask, told.spans, staging)
        assert answer_LN.dtype == torch.int32
    drawn, picks = Drawn(staging.fetch(answer_LN), mask), Picks(told.logits_LV, mask)
    for span, node, path in told.nodes():
        check_alike(outcome(drawn, span, node, path), outcome(picks, span, node, path))


@pytest.mark.parametrize("inside", [True, False])
def test_rows_are_drawn_at_once_where_the_kernels_run_and_one_by_one_elsewhere(inside: bool) -> None:
    told = step([FREE | {"mask": "fails"}], 0)
    with interpreted() if inside else nullcontext():
        picks = Drawing().picks(told.logits_LV, told.new_mask(), told.spans)
        assert type(picks) is (Drawn if inside else Picks)
        nothing = Drawing().picks(torch.empty(0, VOCAB_SIZE), TokenMask(0, VOCAB_SIZE), [])
        assert type(nothing) is Picks
    with pytest.raises(ConstraintError, match="no row here"):
        picks.at(told.spans[0], 0, [])
