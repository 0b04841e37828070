"""A drafter that is a model: when it is asked, what it learns, how its trees grow. How logits come about is the affair
of its `Voice`: one that goes on from its own guesses, or one that guesses several tokens ahead at once.

R rows, D width of the features, V vocabulary of the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.drafters.grow import Ahead, Growing, Growth, grow, look_ahead
from specdec.drafters.guessing import Guessing
from specdec.drafters.levels import Follow, grow_unheard
from specdec.drafters.memory import News
from specdec.drafters.survival import Draws, Survival
from specdec.staging import Staging
from specdec.tree import EMPTY, DraftTree, root

if TYPE_CHECKING:
    from specdec.batch import Batch
    from specdec.sequence import Grant, Sequence, Span


class Voice(Protocol):
    """What a drafter's model says."""

    @property
    def name(self) -> str:
        """What a request may call it by."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """What it reads of the target (see `Model.forward`); nothing for one that looks only at tokens."""
        ...

    @property
    def targets(self) -> Tensor | None:
        """int64 `[V]`: the target's id of each of its own; None where they are the same."""
        ...

    @property
    def levels(self) -> int | None:
        """How many tokens ahead it can guess; None: any number."""
        ...

    @property
    def ahead(self) -> Ahead | None:
        """fp32 logits `[L, V]` at depths of texts, for one to whom the guesses before do not matter; None for others.
        It may be asked for a depth below `levels`, and below the slots that were granted."""
        ...

    @property
    def follow(self) -> Follow | None:
        """How trees grow without the host hearing of each level, for one who goes on from its own guesses; None for
        others."""
        ...

    def features(self, taps: Seq[Tensor]) -> Tensor:
        """`[R, D]`, from the target's taps of R rows: what is kept of each position."""
        ...

    def observe(self, news: Seq[News]) -> None:
        """Take in what a step of the target computed."""
        ...

    def begin(self, grants: Seq[Grant]) -> list[bool]:
        """Whether it can guess what follows the last known token of each text. One known token is pending in each."""
        ...

    def expand(self, front: Seq[tuple[Growing, int]]) -> Tensor:
        """fp32 logits behind nodes of growing trees, `[len(front), V]`, on the model's device. The nodes of a tree are
        in the order in which they are grown; first come the roots."""
        ...

    def end(self) -> None:
        """Let go of what the guesses of this draft left."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Release what is kept for a sequence."""
        ...

    @property
    def num_kept(self) -> int:
        """Sequences for which something is kept."""
        ...


@dataclass(slots=True)
class RankCounts:
    """How often the guess of each rank was what the target picked: `hits[d][c]` of `draws[d]` at depth d, rank c."""

    draws: list[int] = field(default_factory=list)
    hits: list[list[int]] = field(default_factory=list)

    def count(self, depth: int, rank: int | None) -> None:
        """Take in one pick; a rank of None is a token that was not guessed."""
        while len(self.draws) <= depth:
            self.draws.append(0)
            self.hits.append([])
        self.draws[depth] += 1
        if rank is not None:
            self.hits[depth].extend([0] * (rank + 1 - len(self.hits[depth])))
            self.hits[depth][rank] += 1

    def accuracy(self) -> list[list[float]]:
        """Shares `[depth][rank]`."""
        return [[hit / draws for hit in hits] for draws, hits in zip(self.draws, self.hits, strict=True)]


class ModelDrafter:
    """Satisfies `Drafter`. `vocab_size` is the target's; texts of more than `max_length` tokens are not drafted for:
    the drafter's own context ends there."""

    def __init__(
        self, voice: Voice, vocab_size: int, growth: Growth | None = None, max_length: int | None = None
    ) -> None:
        self.names: tuple[str, ...] = (voice.name,)
        self.taps = voice.taps
        self.ranks = RankCounts()
        self._voice = voice
        self._vocab_size = vocab_size
        self._growth = growth or Growth()
        self._max_length = max_length
        self._survival = Survival()
        self._guessing = Guessing(vocab_size, voice.targets)
        self._staging: Staging | None = None
        self._asked: set[Sequence] = set()
        self._grown: dict[Sequence, Growing] = {}

    @property
    def num_kept(self) -> int:
        """Sequences for which something is kept."""
        return self._voice.num_kept + len(self._grown)

    @torch.inference_mode()
    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """See `Drafter.draft`. While more than one known token is pending there is only the root."""
        self._asked.update(grant.seq for grant in grants)
        ready = [(grant, depth) for grant in grants if (depth := self._depth(grant)) > 0]
        can = self._voice.begin([grant for grant, _ in ready]) if ready else []
        self._grown = {
            grant.seq: Growing(
                grant.seq, grant.drafts, depth, grant.slots, Draws(grant.seq, self._survival, self._vocab_size)
            )
            for (grant, depth), able in zip(ready, can, strict=True)
            if able
        }
        growing = list(self._grown.values())
        try:
            if self._voice.ahead is not None:
                look_ahead(growing, self._voice.ahead, self._growth, self._guessing)
            if self._voice.follow is not None:
                growing = grow_unheard(growing, self._voice.follow, self._growth, self._guessing)
            grow(growing, self._voice.expand, self._growth, self._guessing)
        finally:
            self._voice.end()
        return [self._tree(grant) for grant in grants]

    @torch.inference_mode()
    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """See `Drafter.observe`. Where this drafter was not asked for a text at its frontier it computes nothing: what
        it takes of the target waits, until a draft is wanted again or too much of it waits."""
        rows: list[int] = []
        served: list[tuple[Span, int]] = []
        for span, path in zip(spans, paths, strict=True):
            seq, first = span.seq, span.first_row
            grown = self._grown.get(seq)
            if grown is not None:
                grown.learn(seq.tokens[span.root_slot + 1 :], self._survival, self.ranks.count)
            if seq.finish_reason == "error" or not self._serves(seq):
                continue
            last, start = first + span.known - 1, span.root_slot + 1 - span.known
            computed = [*range(first, last + 1), *(last + node for node in path)]
            rows += computed[: seq.num_computed - start]
            served.append((span, start))
        features_RD = None
        if taps and rows:
            self._staging = self._staging or Staging(taps[0].device)
            rows_R = self._staging.move({"rows": np.array(rows, np.int64)})["rows"]
            features_RD = self._voice.features([tap.index_select(0, rows_R) for tap in taps])
        news, row = [], 0
        for span, start in served:
            end = span.seq.num_computed
            features = None if features_RD is None else features_RD[row : row + end - start]
            row += end - start
            news.append(News(span.seq, start, end, features, not len(span.tree) or span.seq in self._asked))
        self._asked.clear()
        self._grown.clear()
        self._voice.observe(news)

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`."""
        self._voice.forget(seq)
        self._grown.pop(seq, None)
        self._asked.discard(seq)

    def _serves(self, seq: Sequence) -> bool:
        guesses = seq.request.sampling.guesses
        if self._max_length is not None and len(seq.tokens) >= self._max_length:
            return False
        return guesses.limit > 0 and (not guesses.methods or self.names[0] in guesses.methods)

    def _depth(self, grant: Grant) -> int:
        """How many levels may be drafted."""
        if not grant.at_frontier or grant.known > 1 or grant.drafts <= 0:
            return 0
        limits = [grant.depth, self._growth.depth]
        if self._voice.levels is not None:
            limits.append(self._voice.levels)
        if self._max_length is not None:
            limits.append(self._max_length - len(grant.seq.tokens))
        return min(limits)

    def _tree(self, grant: Grant) -> DraftTree:
        if grant.seq in self._grown:
            return self._grown[grant.seq].tree(self.names[0])
        return root(grant.seq.tokens[-1]) if grant.at_frontier else EMPTY
