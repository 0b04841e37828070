"""What compiles kernels before the first request comes: a few tokens for every kind of request."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specdec.blocks import SCRAP
from specdec.engine import Engine
from specdec.mask import TokenMask
from specdec.request import MAX_LOGPROBS, Request, Sampling
from specdec.text import Detokenizer
from specdec.tree import DraftTree

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.batch import Batch
    from specdec.protocols import Drafter
    from specdec.sequence import Grant, Sequence, Span

PROMPT = 256  # tokens, which take larger tiles of attention than those that are drawn
TOKENS = 2  # behind the first of them there are guesses
LEVELS = 2  # of guesses, at least: the second is chosen among the first


def warm_up(engine: Engine) -> None:
    """Write a few tokens for every kind of request, with guesses of every drafter, so that none waits for what is
    compiled on first use. The engine must be idle; nothing is left behind."""
    config, vocab_size = engine.config, engine.runner.vocab_size
    alone = Engine(
        engine.runner,
        [_Unlearning(drafter) for drafter in engine.drafting.drafters],
        replace(config, prefix_caching=False),
        new_text=lambda _: Detokenizer(lambda token: b""),
        end_tokens=(),
    )
    prompt = (0,) * min(PROMPT, max(1, config.max_model_len - TOKENS - LEVELS))
    filtered = Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, logprobs=5)
    penalized = Sampling(repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=MAX_LOGPROBS)
    for name, request in {
        "free": Request(prompt, filtered),  # trees may grow without a word to the host
        "filtered": Request(prompt, filtered, grammar=_Everything(vocab_size)),
        "penalized": Request(prompt, penalized, grammar=_Everything(vocab_size)),
    }.items():
        # One after the other: of lists of likeliest tokens a step makes the longest.
        (seq,) = alone.add(request, name)
        while alone.has_work and seq.num_output < TOKENS:
            alone.step()
        alone.abort(name)  # no text comes to its end: drafters may keep those that do
    engine.runner.move([SCRAP], [SCRAP])  # the first slot of the block that nobody reads


class _Unlearning:
    """A `Drafter` that guesses as another does, but never hears what became of its guesses: it has nothing to learn
    from a text that nobody wrote."""

    def __init__(self, drafter: Drafter) -> None:
        self.names, self.taps = drafter.names, drafter.taps
        self._drafter = drafter
        self._guessed = False

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        trees = self._drafter.draft(grants)
        self._guessed = self._guessed or any(tree.num_drafts for tree in trees)
        return trees

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        if not self._guessed:
            self._drafter.observe(spans, batch, taps, paths)

    def forget(self, seq: Sequence) -> None:
        self._guessed = False
        self._drafter.forget(seq)


class _Everything:
    """A `Grammar`, and its `Constraint`, that masks each row and allows all."""

    def __init__(self, vocab_size: int) -> None:
        self._all = np.full((vocab_size + 31) // 32, -1, np.int32)

    def start(self) -> _Everything:
        return self

    def prune(self, tree: DraftTree) -> DraftTree:
        return tree

    def mask(self, tree: DraftTree, first_row: int, mask: TokenMask) -> None:
        for row in range(first_row, first_row + len(tree)):
            mask.put(row, self._all)

    def row(self, path: tuple[int, ...]) -> NDArray[np.int32]:
        return self._all

    def forced(self, path: tuple[int, ...] = ()) -> tuple[int, ...]:
        return ()

    def advance(self, tokens: Seq[int]) -> None:
        pass

    def finish(self) -> None:
        pass
