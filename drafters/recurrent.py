"""Drafters that are models with keys and values of their own and go on from their own guesses: a second causal model,
the target's first layers, EAGLE, MTP. Knows rows and trees; what a row computes is the head's affair.

R rows, L logits rows, D width of the features, V vocabulary of the head.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.batch import Rows
from specdec.drafters.grow import Growing, Growth, grow
from specdec.drafters.memory import News
from specdec.drafters.survival import Draws, Survival
from specdec.protocols import Attend, LayerShape
from specdec.tree import EMPTY, DraftTree, root

if TYPE_CHECKING:
    from specdec.batch import Batch
    from specdec.sequence import Grant, Sequence, Span


class Head(Protocol):
    """A drafter's model. The row in slot s holds token s, and where `takes_features` the feature of position s - 1; it
    predicts token s + 1."""

    @property
    def name(self) -> str:
        """What a request may call it by."""
        ...

    @property
    def layers(self) -> Seq[LayerShape]:
        """Its own attention layers."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """What it reads of the target (see `Model.forward`); nothing for one that looks only at tokens."""
        ...

    @property
    def targets(self) -> Tensor | None:
        """int64 `[V]`: the target's id of each of its own; None where they are the same."""
        ...

    def features(self, taps: Seq[Tensor]) -> Tensor:
        """`[R, D]`, from the target's taps of R rows: what is kept of each position."""
        ...

    def forward(self, tokens_R: Tensor, features_RD: Tensor | None, positions_R: Tensor, attend: Attend) -> Tensor:
        """Hidden states `[R, D]`: also the features of the rows that go on from these."""
        ...

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """fp32 `[L, V]`, from what `forward` returned."""
        ...


class Context(Protocol):
    """Where a head's rows lie: `Memory`, or the target's own cache (`layer_skip.Borrowed`)."""

    def observe(self, news: Seq[News]) -> None:
        """Take in what a step of the target computed."""
        ...

    def catch_up(self, seqs: Seq[Sequence]) -> list[Tensor | None]:
        """What the head makes of the last known token of each sequence, `[D]`; None where it cannot."""
        ...

    def run(self, parts: Seq[Rows], features_RD: Tensor | None) -> Tensor:
        """Hidden states `[R, D]` of guessed rows."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Release what is kept for a sequence."""
        ...

    @property
    def num_kept(self) -> int:
        """Sequences for which something is kept."""
        ...


@dataclass(slots=True)
class _Branches:
    """The rows of one growing tree: for each grown node its hidden state, and its path as a bitset of rows."""

    root: int  # index in the sequence, and slot
    hidden: dict[int, Tensor]
    ancestors: dict[int, int] = field(default_factory=lambda: {0: 1})


class RecurrentDrafter:
    """Trees that a head grows by going on from its own hidden states. `vocab_size` is the target's; texts of more than
    `max_length` tokens are not drafted for: the drafter's own context ends there."""

    def __init__(
        self, head: Head, context: Context, vocab_size: int, growth: Growth | None = None, max_length: int | None = None
    ) -> None:
        self.names: tuple[str, ...] = (head.name,)
        self.taps = head.taps
        self._head = head
        self._context = context
        self._vocab_size = vocab_size
        self._growth = growth or Growth()
        self._max_length = max_length
        self._survival = Survival()
        self._targets_V = None if head.targets is None else head.targets.cpu().numpy()
        self._asked: set[Sequence] = set()
        self._grown: dict[Sequence, Growing] = {}

    @property
    def num_kept(self) -> int:
        """Sequences for which something is kept."""
        return self._context.num_kept + len(self._grown)

    @torch.inference_mode()
    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """See `Drafter.draft`. While more than one known token is pending there is only the root."""
        self._asked.update(grant.seq for grant in grants)
        ready = [grant for grant in grants if self._room(grant)]
        hidden = self._context.catch_up([grant.seq for grant in ready])
        growing: list[Growing] = []
        branches: list[_Branches] = []
        for grant, hidden_D in zip(ready, hidden, strict=True):
            if hidden_D is not None:
                draws = Draws(grant.seq, self._survival, self._vocab_size)
                depth = min(grant.depth, self._room(grant))
                growing.append(Growing(grant.seq, grant.drafts, depth, grant.slots, draws))
                branches.append(_Branches(len(grant.seq.tokens) - 1, {0: hidden_D}))
        grow(growing, lambda front: self._expand(growing, branches, front), self._growth, self._targets_V)
        self._grown = {one.seq: one for one in growing}
        source = self.names[0]
        return [
            self._grown[grant.seq].tree(source)
            if grant.seq in self._grown
            else (root(grant.seq.tokens[-1]) if grant.at_frontier else EMPTY)
            for grant in grants
        ]

    @torch.inference_mode()
    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """See `Drafter.observe`. Where this drafter was not asked for a text at its frontier it computes nothing: what
        it takes of the target waits, until a draft is wanted again or too much of it waits."""
        rows: list[int] = []
        ends: list[tuple[Span, int, int]] = []
        for span, path in zip(spans, paths, strict=True):
            seq, first = span.seq, span.first_row
            if seq.finish_reason == "error" or not self._serves(seq):
                continue
            num_known = span.known
            start = span.root_slot + 1 - num_known
            last = first + num_known - 1
            computed = [*range(first, first + num_known), *(last + node for node in path)]
            rows += computed[: seq.num_computed - start]
            ends.append((span, start, seq.num_computed))
            grown = self._grown.get(seq)
            if grown is not None:
                grown.learn(seq.tokens[span.root_slot + 1 :], self._survival)
        features_RD = None
        if taps and rows:
            rows_R = torch.tensor(rows, device=taps[0].device)
            features_RD = self._head.features([tap.index_select(0, rows_R) for tap in taps])
        news, row = [], 0
        for span, start, end in ends:
            features = None if features_RD is None else features_RD[row : row + end - start]
            row += end - start
            wanted = not len(span.tree) or span.seq in self._asked
            news.append(News(span.seq, start, end, features, wanted))
        self._context.observe(news)
        self._asked.clear()
        self._grown.clear()

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`."""
        self._context.forget(seq)
        self._grown.pop(seq, None)
        self._asked.discard(seq)

    def _serves(self, seq: Sequence) -> bool:
        guesses = seq.request.sampling.guesses
        return guesses.limit > 0 and (not guesses.methods or self.names[0] in guesses.methods)

    def _room(self, grant: Grant) -> int:
        """How many levels may be drafted; none while more than one known token is pending."""
        if not grant.at_frontier or grant.known > 1 or grant.drafts <= 0:
            return 0
        longest = grant.depth if self._max_length is None else self._max_length - len(grant.seq.tokens)
        return max(0, min(grant.depth, longest))

    def _expand(
        self, growing: Seq[Growing], branches: Seq[_Branches], front: Seq[tuple[int, int]]
    ) -> NDArray[np.float32]:
        fresh = [(place, node) for place, node in front if node not in branches[place].hidden]
        if fresh:
            self._run(growing, branches, fresh)
        hidden_LD = torch.stack([branches[place].hidden[node] for place, node in front])
        return self._head.logits(hidden_LD).cpu().numpy()

    def _run(self, growing: Seq[Growing], branches: Seq[_Branches], front: Seq[tuple[int, int]]) -> None:
        """Compute the rows of nodes, which stand tree by tree."""
        parts = []
        for place in dict.fromkeys(place for place, _ in front):
            one, mine = growing[place], branches[place]
            nodes = [node for other, node in front if other == place]
            first = one.num_grown
            for index, node in enumerate(nodes, first):
                mine.ancestors[node] = mine.ancestors[one.parents[node]] | 1 << index
            parts.append(
                Rows(
                    one.seq.blocks,
                    [one.tokens[node] for node in nodes],
                    [mine.root + len(one.paths[node]) for node in nodes],
                    range(mine.root + first, mine.root + first + len(nodes)),
                    [mine.root] * len(nodes),
                    [mine.ancestors[node] for node in nodes],
                )
            )
        features = None
        if self._head.taps:
            features = torch.stack([branches[place].hidden[growing[place].parents[node]] for place, node in front])
        hidden_RD = self._context.run(parts, features)
        for (place, node), hidden_D in zip(front, hidden_RD, strict=True):
            branches[place].hidden[node] = hidden_D
