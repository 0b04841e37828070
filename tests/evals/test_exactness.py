"""Where two runs part, and how near the tie was: against scores computed from the definition."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.config import EngineConfig
from specdec.drafters.none import NoDrafter
from specdec.engine import Engine
from specdec.evals.exactness import Difference, difference, first_difference
from specdec.evals.runs import watch
from specdec.kernels.sample import gumbel, noise_words
from specdec.mask import TokenMask
from specdec.request import Request, Sampling, Stopping
from specdec.tree import DraftTree
from tests.fakes import hash_engine
from tests.masks import allow, blank

VOCAB = 24
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)


@dataclass(slots=True)
class Alternating:
    """Even tokens at even places of the output, odd ones at odd places. Grammar and constraint in one."""

    place: int = 0
    end: frozenset[int] = field(default_factory=frozenset)

    def start(self) -> Alternating:
        return Alternating()

    def prune(self, tree: DraftTree) -> DraftTree:
        return tree.keep([])

    def mask(self, tree: DraftTree, first_row: int, mask: TokenMask) -> None:
        assert len(tree) == 1
        allow(blank(mask, first_row), list(range(self.place % 2, VOCAB, 2)))

    def row(self, path: tuple[int, ...]) -> NDArray[np.int32]:
        words = np.zeros((VOCAB + 31) // 32, np.int32)
        allow(words, list(range((self.place + len(path)) % 2, VOCAB, 2)))
        return words

    def forced(self, path: tuple[int, ...] = ()) -> tuple[int, ...]:
        return ()

    def advance(self, tokens: Seq[int]) -> None:
        self.place += len(tokens)

    def finish(self) -> None:
        """Any text that ends where it may is right."""


def engine(max_rows: int = 512) -> Engine:
    config = EngineConfig(max_model_len=96, num_slots=256, block_size=4, max_rows=max_rows)
    return hash_engine(config, NoDrafter(), vocab_size=VOCAB)


def logits(tokens: Seq[int]) -> np.ndarray:
    """What the hash runner says after `tokens`."""
    key = hash(tuple(tokens)) & (2**64 - 1)
    return (np.random.Generator(np.random.PCG64(key)).standard_normal(VOCAB) * 2.0).astype(np.float32)


@pytest.mark.parametrize(
    ("first", "second", "index"),
    [((), (), None), ((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (2,), 0), ((1, 2), (1,), 1), ((), (4,), 0)],
)
def test_the_first_difference_is_found(first: Seq[int], second: Seq[int], index: int | None) -> None:
    assert first_difference(first, second) == index
    assert first_difference(second, first) == index


@pytest.mark.parametrize("max_rows", [512, 4])
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_gap_is_that_of_the_two_best_perturbed_scores(temperature: float, constrained: bool, max_rows: int) -> None:
    seed, target = 2**63 + 5, engine(max_rows)
    request = Request(
        PROMPT,
        Sampling(temperature=temperature, seed=seed),
        Stopping(max_tokens=20, ignore_eos=True),
        grammar=Alternating() if constrained else None,
    )
    run = watch(target, request)
    for index in (0, 1, 7, 19):
        other = list(run.tokens)
        other[index] = (other[index] + 2) % VOCAB
        length = len(PROMPT) + index
        values = logits(run.seq.tokens[:length]).astype(np.float64)
        if temperature:
            values = values.astype(np.float32) / np.float32(temperature) + gumbel(noise_words(seed, length, VOCAB))
        if constrained:
            values[0] = -np.inf  # the end token: ignore_eos bans it under a grammar
            values[1 - index % 2 :: 2] = -np.inf
        second, first = np.sort(values)[-2:]
        found = difference(target, run.seq, other)
        assert found is not None
        assert (found.index, found.filtered) == (index, False)
        assert found.gap == pytest.approx(first - second)
        assert int(values.argmax()) == run.tokens[index]
    target.scheduler.pool.check(target.scheduler.tables())


def test_a_token_that_did_not_pass_the_filters_is_told_by_its_distance_to_those_that_did() -> None:
    target = engine()
    request = Request(PROMPT, Sampling(temperature=0.5, top_k=1, seed=1), Stopping(max_tokens=4, ignore_eos=True))
    run = watch(target, request)
    scaled = logits(PROMPT) / np.float32(0.5)
    token = (run.tokens[0] + 1) % VOCAB
    found = difference(target, run.seq, (token, *run.tokens[1:]))
    assert found is not None
    assert (found.index, found.filtered) == (0, True)
    assert found.gap == pytest.approx(float(scaled.max() - scaled[token]))


def test_equal_outputs_have_no_difference() -> None:
    target = engine()
    run = watch(target, Request(PROMPT, Sampling(seed=1), Stopping(max_tokens=9)))
    assert difference(target, run.seq, run.tokens) is None


def test_a_place_with_one_choice_only_has_an_infinite_gap() -> None:
    target = engine()
    request = Request(PROMPT, Sampling(temperature=0.5, top_k=1, seed=1), Stopping(max_tokens=4, ignore_eos=True))
    run = watch(target, request)
    assert difference(target, run.seq, run.tokens[:3]) == Difference(3, float("inf"))
