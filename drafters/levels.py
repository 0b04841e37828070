"""Trees that grow where their chances are: a device chooses what is grown next, as `Growing.front` does, level after
level, and the host hears of all levels at once and repeats them. Knows no model.

S texts, D levels, W rows of a text on each but the first, which has the root's, H rows of a text on all of them, M rows
that a text has slots for, C guesses behind a row, N = H C nodes (node n is guess n mod C behind row n // C), G tempers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.blocks import SCRAP
from specdec.drafters.grow import Growing, Growth
from specdec.drafters.guessing import Guessing, answered, guessed
from specdec.kernels.guess import TEMPERS
from specdec.mask import TokenMask
from specdec.scoring import RowsOf, rows_of, told
from specdec.tree import MAX_DRAFTS

NONE = -1  # as a node, and as the survival of one: there is none
OWN = ("limits", "ending", "slots", "by depth")  # of what a draft is told, all that is not of its draws


@dataclass(frozen=True, slots=True)
class Level:
    """What is grown on one level, `[S, W]` each: `nodes`, `NONE` where there are fewer, with their survival in fp64. As
    rows of a forward those without a node lie in the scrap block and see their text up to the root. `above` is where
    the row of a node's parent stands among the H of its text."""

    nodes: Tensor
    survival: Tensor
    depths: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    ancestors: Tensor
    above: Tensor


class Following(Protocol):
    """A drafter's model that goes on from rows which the host has not seen."""

    slots_SM: NDArray[np.int64]
    """Where the rows of each text lie in the cache, from the root's on."""

    def roots(self) -> Tensor:
        """fp32 logits `[S, V]` behind the roots."""
        ...

    def rows(self, level: Level) -> Tensor:
        """fp32 logits `[S W, V]` behind the rows of the next level."""
        ...


# (trees, W, H) -> None where it would wait for the device
Follow = Callable[[Seq[Growing], int, int], Following | None]


def grow_unheard(growing: Seq[Growing], follow: Follow, growth: Growth, guessing: Guessing) -> list[Growing]:
    """Grow all levels of trees with one wait for the device, where `follow` can and nothing of a path but its length
    matters to its guesses. Returns the other trees, untouched."""
    free = [one for one in growing if one.draws.ignores_path]
    if not free:
        return list(growing)
    num_levels = max(one.num_levels for one in free)
    width = min(growth.width, max(one.rows for one in free))
    following = follow(free, width, 1 + width * (num_levels - 1))
    if following is None:
        return list(growing)
    logits_LV = following.roots()
    staging = guessing.staging(logits_LV.device)
    there = staging.move(_told(free, following.slots_SM, num_levels, growth, guessing.vocab_size))
    levels = Levels(there, growth, guessing, width, num_levels)
    level = levels.roots()
    levels.take(level, logits_LV)
    for _ in range(1, num_levels):
        level = levels.choose()
        levels.take(level, following.rows(level))
    _repeat(free, staging.fetch(levels.answer_SHN), growth)
    return [one for one in growing if one not in free]


class Levels:
    """The trees of one draft, by what `_told` says, now on its device. Waits for nothing, and asks the device
    nothing."""

    def __init__(
        self, there: Mapping[str, Tensor], growth: Growth, guessing: Guessing, width: int, num_levels: int
    ) -> None:
        self._growth, self._guessing = growth, guessing
        self._width, self._num_levels = width, num_levels
        self._branch = branch = min(growth.branch, guessing.vocab_size)
        self._root_S1, self._depth_S1, self._room_S1, self._rows_S1 = there["limits"][..., None].unbind(1)
        self._ending_SE, self._slots_SM, self._by_depth_D = (there[name] for name in OWN[1:])
        self._draws = {name: array for name, array in there.items() if name not in OWN}
        num_texts, self._num_rows = len(there["limits"]), 0
        num_rows = 1 + width * (num_levels - 1)

        def filled(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_texts, *shape), value, dtype=dtype, device=there["limits"].device)

        self._tokens_SN = filled((num_rows * branch,), 0, torch.int64)
        self._survival_SN = filled((num_rows * branch,), NONE, torch.float64)
        self._open_SN = filled((num_rows * branch,), False, torch.bool)
        self._depths_SH = filled((num_rows,), 0, torch.int64)
        self._ancestors_SH = filled((num_rows,), 1, torch.int64)
        self._num_grown_S1 = filled((1,), 1, torch.int64)
        # Of each row its node, and what `answered` says of the guesses behind it.
        self.answer_SHN = filled((num_rows, 1 + branch * (1 + len(TEMPERS))), NONE, torch.int32)

    def roots(self) -> Level:
        """The first level."""
        zero_S1 = torch.zeros_like(self._num_grown_S1)
        survival_S1 = torch.ones_like(zero_S1, dtype=torch.float64)
        return Level(zero_S1, survival_S1, zero_S1, zero_S1, self._root_S1, zero_S1, zero_S1 + 1, zero_S1)

    def choose(self) -> Level:
        """The next level, from the guesses behind all rows so far; see `Growing.front`."""
        filled, width = self._num_rows * self._branch, self._width
        order_SN = self._survival_SN[:, :filled].argsort(dim=1, descending=True, stable=True)
        place_N, row_W = (torch.arange(count, device=order_SN.device) for count in (filled, width))
        open_SN = self._open_SN[:, :filled].gather(1, order_SN) & (place_N < self._room_S1)
        number_SN = open_SN.cumsum(1)
        level = (self._num_rows - 1) // width + 1
        places_S1 = (self._rows_S1 - self._num_grown_S1).clamp(max=width) * (level < self._depth_S1)
        taken_SN = open_SN & (number_SN <= places_S1)
        self._open_SN[:, :filled].logical_and_(~torch.zeros_like(taken_SN).scatter_(1, order_SN, taken_SN))
        # What is not taken meets in a place behind the others.
        nodes_SW = torch.full((len(order_SN), width + 1), NONE, device=order_SN.device)
        nodes_SW = nodes_SW.scatter_(1, (number_SN - 1).masked_fill_(~taken_SN, width), order_SN)[:, :width]

        none_SW, some_SW = nodes_SW < 0, nodes_SW.clamp(min=0)
        above_SW, rows_SW = some_SW // self._branch, self._num_grown_S1 + row_W
        bits_SW = torch.ones_like(rows_SW) << rows_SW.clamp(max=MAX_DRAFTS)
        slots_SW = self._slots_SM.gather(1, rows_SW.clamp(max=self._slots_SM.shape[1] - 1))
        depths_SW = (self._depths_SH.gather(1, above_SW) + 1).masked_fill_(none_SW, 0)
        self._num_grown_S1 += (~none_SW).sum(1, keepdim=True)
        return Level(
            nodes_SW,
            self._survival_SN.gather(1, some_SW),
            depths_SW,
            self._tokens_SN.gather(1, some_SW).masked_fill_(none_SW, 0),
            self._root_S1 + depths_SW,
            slots_SW.masked_fill_(none_SW, SCRAP),
            (self._ancestors_SH.gather(1, above_SW) | bits_SW).masked_fill_(none_SW, 1),
            above_SW,
        )

    def take(self, level: Level, logits_LV: Tensor) -> None:
        """Hang guesses behind the rows of a level; see `Growing.grow`."""
        (num_texts, width), branch = level.nodes.shape, self._branch
        none_SW = level.nodes < 0
        # The last of the rows that `_told` knows is nobody's.
        text_S1 = torch.arange(num_texts, device=logits_LV.device)[:, None]
        place_SW = (text_S1 * self._num_levels + level.depths).masked_fill_(none_SW, num_texts * self._num_levels)
        there = rows_of(self._draws, place_SW.flatten())
        found = self._guessing.at_once(logits_LV, there, self._growth.branch)
        tokens_SWC = found[0].view(num_texts, width, branch).long()
        chances_SWC = self._chances(level.depths, found[1].view(num_texts, width, branch, len(TEMPERS)))

        there_SWC = ~none_SW[..., None] & (tokens_SWC >= 0) & (chances_SWC >= 0)
        survival_SWC = (level.survival[..., None] * chances_SWC).masked_fill_(~there_SWC, NONE)
        ends_SWC = (tokens_SWC[..., None] == self._ending_SE[:, None, None]).any(-1)
        is_above_SW1 = (level.depths + 1 < self._depth_S1)[..., None]
        rows = slice(self._num_rows, self._num_rows + width)
        nodes = slice(rows.start * branch, rows.stop * branch)
        self._num_rows = rows.stop
        self._tokens_SN[:, nodes] = tokens_SWC.flatten(1)
        self._survival_SN[:, nodes] = survival_SWC.flatten(1)
        open_SWC = there_SWC & ~ends_SWC & is_above_SW1 & (survival_SWC >= self._growth.floor)
        self._open_SN[:, nodes] = open_SWC.flatten(1)
        self._depths_SH[:, rows], self._ancestors_SH[:, rows] = level.depths, level.ancestors
        self.answer_SHN[:, rows, 0] = level.nodes.int()
        self.answer_SHN[:, rows, 1:] = answered(*found).view(num_texts, width, -1)

    def _chances(self, depths_SW: Tensor, chances_SWCG: Tensor) -> Tensor:
        """How likely each guess is, fp64 `[S, W, C]`; less than 0 where it is not to be one."""
        if self._growth.ranks is not None:
            return self._by_depth_D[depths_SW]
        tempers_SW11 = self._by_depth_D[depths_SW][..., None, None]
        return chances_SWCG.gather(3, tempers_SW11.expand(-1, -1, self._branch, 1))[..., 0].double()


def _told(
    texts: Seq[Growing], slots_SM: NDArray[np.int64], num_levels: int, growth: Growth, vocab_size: int
) -> dict[str, NDArray[Any] | Tensor]:
    """All that a device must be told of a draft: what `specdec.scoring.told` says of each text at each depth, and of a
    row of nobody behind; what limits each tree; and how likely guesses are: by which temper at each depth, or at each
    depth and rank themselves."""
    paths = [(0,) * depth for depth in range(num_levels)]  # any tokens will do
    asked = [RowsOf(one.seq, text * num_levels, paths) for text, one in enumerate(texts)]
    limits = [(len(one.seq.tokens) - 1, one.depth, one.room, one.rows) for one in texts]
    ending_SE = np.full((len(texts), max(1, *(len(one.seq.ending) for one in texts))), NONE, np.int64)
    for row_E, one in zip(ending_SE, texts, strict=True):
        row_E[: len(one.seq.ending)] = sorted(one.seq.ending)
    by_depth: NDArray[Any] = np.array([texts[0].draws.temper(depth) for depth in range(num_levels)], np.int64)
    if growth.ranks is not None:
        by_depth = np.full((num_levels, min(growth.branch, vocab_size)), float(NONE))
        for row_C, shares in zip(by_depth, growth.ranks, strict=False):
            row_C[: len(shares)] = shares[: len(row_C)]
    own = (np.array(limits, np.int64), ending_SE, slots_SM, by_depth)
    return {**told(asked, TokenMask(len(texts) * num_levels + 1, vocab_size)), **dict(zip(OWN, own, strict=True))}


def _repeat(texts: Seq[Growing], answer_SHN: NDArray[np.int32], growth: Growth) -> None:
    """Grow the trees as the device did."""
    branch = (answer_SHN.shape[2] - 1) // (1 + len(TEMPERS))
    for one, answer_HN in zip(texts, answer_SHN, strict=True):
        begins: dict[int, int] = {}  # of each row, where what is guessed behind it begins
        for row in np.flatnonzero(answer_HN[:, 0] != NONE).tolist():
            node = 0
            if row > 0:
                above, rank = divmod(int(answer_HN[row, 0]), branch)
                node = begins[above] + rank
            begins[row] = len(one.tokens)
            one.grow(node, guessed(answer_HN[row, 1:], one.draws, one.paths[node], None), growth)
