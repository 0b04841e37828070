"""A voice that goes on from its own guesses, level by level: a second causal model, the target's first layers, EAGLE,
MTP. Knows rows; what a row computes is the head's affair.

R rows, L logits rows, D width of the features.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.batch import Rows, placed
from specdec.blocks import SCRAP
from specdec.drafters.forwards import Follow
from specdec.drafters.grow import Growing
from specdec.drafters.heads import Head
from specdec.drafters.levels import Following
from specdec.drafters.memory import News
from specdec.kernels.trees import Level

if TYPE_CHECKING:
    from specdec.sequence import Grant, Sequence


class Context(Protocol):
    """Where a head's rows lie: `Memory`, or the target's own cache (`draft_model.Borrowed`)."""

    def observe(self, news: Seq[News]) -> None:
        """Take in what a step of the target computed."""
        ...

    def catch_up(self, seqs: Seq[Sequence]) -> list[Tensor | None]:
        """What the head makes of the last known token of each sequence, `[D]`; None where it cannot."""
        ...

    def run(self, parts: Seq[Rows], features_RD: Tensor | None) -> Tensor:
        """Hidden states `[R, D]` of guessed rows."""
        ...

    def follow(self, parts: Seq[Rows]) -> Follow | None:
        """What runs guessed rows of texts time and again without waiting: where each lies, which token it holds and
        what it sees is given each time, on the device. `parts` say how many there are of each text and the last slot
        that they may take. None where it would wait."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Release what is kept for a sequence."""
        ...

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        ...

    @property
    def num_kept(self) -> int:
        """Sequences for which something is kept."""
        ...


@dataclass(slots=True)
class _Branches:
    """The rows of one growing tree: for each grown node its hidden state `[D]`, and its path as a bitset of rows."""

    hidden: dict[int, Tensor]
    ancestors: dict[int, int] = field(default_factory=lambda: {0: 1})


class _Unseen:
    """Satisfies `levels.Following`, by `run`. What the head made of the roots is `roots_SD`; what it makes of up to
    `num_rows` rows of each text, the root's among them, is kept where a head reads it as the features of the next."""

    def __init__(self, head: Head, run: Follow, slots_SM: NDArray[np.int64], roots_SD: Tensor, num_rows: int) -> None:
        self.slots_SM = slots_SM
        self._head, self._run, self._roots_SD, self._num_rows = head, run, roots_SD, 1
        self._hidden_SHD: Tensor | None = None
        if head.taps:
            self._hidden_SHD = roots_SD[:, None].repeat(1, num_rows, 1)

    def roots(self) -> Tensor:
        """See `levels.Following`."""
        return self._head.logits(self._roots_SD)

    def rows(self, level: Level) -> Tensor:
        """See `levels.Following`."""
        num_texts, width = level.nodes.shape
        inputs = {name: getattr(level, name).flatten() for name in ("tokens", "positions", "slots", "ancestors")}
        if self._hidden_SHD is not None:
            above_SW1 = level.above[..., None].expand(-1, -1, self._hidden_SHD.shape[2])
            inputs["features"] = self._hidden_SHD.gather(1, above_SW1).flatten(0, 1)
        hidden_RD = self._run(inputs)
        if self._hidden_SHD is not None:
            rows = slice(self._num_rows, self._num_rows + width)
            self._hidden_SHD[:, rows] = hidden_RD.view(num_texts, width, -1)
            self._num_rows = rows.stop
        return self._head.logits(hidden_RD)


class Recurrent:
    """Satisfies `Voice`."""

    levels = None
    ahead = None

    def __init__(self, head: Head, context: Context) -> None:
        self.name, self.taps, self.targets = head.name, head.taps, head.targets
        self._head = head
        self._context = context
        self._branches: dict[Sequence, _Branches] = {}

    @property
    def num_kept(self) -> int:
        """See `Voice`."""
        return self._context.num_kept + len(self._branches)

    def features(self, taps: Seq[Tensor]) -> Tensor:
        """See `Voice`."""
        return self._head.features(taps)

    def observe(self, news: Seq[News]) -> None:
        """See `Voice`."""
        self._context.observe(news)

    def begin(self, grants: Seq[Grant]) -> list[bool]:
        """See `Voice`."""
        hidden = self._context.catch_up([grant.seq for grant in grants])
        self._branches = {
            grant.seq: _Branches({0: hidden_D})
            for grant, hidden_D in zip(grants, hidden, strict=True)
            if hidden_D is not None
        }
        return [hidden_D is not None for hidden_D in hidden]

    def expand(self, front: Seq[tuple[Growing, int]]) -> Tensor:
        """See `Voice`."""
        fresh = [(one, node) for one, node in front if node not in self._branches[one.seq].hidden]
        if fresh:
            self._run(fresh)
        hidden_LD = torch.stack([self._branches[one.seq].hidden[node] for one, node in front])
        return self._head.logits(hidden_LD)

    def follow(self, growing: Seq[Growing], width: int, num_rows: int) -> Following | None:
        """See `Voice`."""
        parts = []
        slots_SM = np.full((len(growing), max(one.rows for one in growing)), SCRAP, np.int64)
        for slots_M, one in zip(slots_SM, growing, strict=True):
            blocks, root = one.seq.blocks, len(one.seq.tokens) - 1
            end = root + one.rows
            slots_M[: one.rows] = placed(blocks, range(root, end), self._context.block_size)
            # What each may see at most, and the last slot that one may take.
            places, seen = [root] * width, [(1 << one.rows) - 1] * width
            parts.append(Rows(blocks, [0] * width, places, [end - 1] * width, places, seen))
        run = self._context.follow(parts)
        if run is None:
            return None
        roots_SD = torch.stack([self._branches[one.seq].hidden[0] for one in growing])
        return _Unseen(self._head, run, slots_SM, roots_SD, num_rows)

    def end(self) -> None:
        """See `Voice`."""
        self._branches = {}

    def forget(self, seq: Sequence) -> None:
        """See `Voice`."""
        self._context.forget(seq)

    def _run(self, front: Seq[tuple[Growing, int]]) -> None:
        """Compute the rows of nodes, which stand tree by tree."""
        nodes_of: dict[Sequence, list[int]] = {}
        trees = {one.seq: one for one, _ in front}
        for one, node in front:
            nodes_of.setdefault(one.seq, []).append(node)
        parts = []
        for seq, nodes in nodes_of.items():
            one, ancestors = trees[seq], self._branches[seq].ancestors
            for index, node in enumerate(nodes, one.num_grown):
                ancestors[node] = ancestors[one.parents[node]] | 1 << index
            root = len(seq.tokens) - 1
            first = root + one.num_grown
            parts.append(
                Rows(
                    seq.blocks,
                    [one.tokens[node] for node in nodes],
                    [root + len(one.paths[node]) for node in nodes],
                    range(first, first + len(nodes)),
                    [root] * len(nodes),
                    [ancestors[node] for node in nodes],
                )
            )
        features_RD = None
        if self.taps:
            features_RD = torch.stack([self._branches[one.seq].hidden[one.parents[node]] for one, node in front])
        for (one, node), hidden_D in zip(front, self._context.run(parts, features_RD), strict=True):
            self._branches[one.seq].hidden[node] = hidden_D
