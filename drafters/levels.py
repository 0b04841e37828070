"""Trees that grow where their chances are: a device chooses what is grown next, as `Growing.front` does, level after
level, and the host hears of all levels at once and repeats them. Knows no model.

S texts, D levels, W rows of a text on each but the first, which has the root's, H rows of a text on all of them, M rows
that a text has slots for, C guesses behind a row, V vocabulary of the drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.drafters.grow import Growing, Growth
from specdec.drafters.guessing import Guessing, guessed
from specdec.kernels.front import front, hang, roots
from specdec.kernels.guess import TEMPERS
from specdec.kernels.trees import NONE, Level, Limits, Trees
from specdec.mask import TokenMask
from specdec.scoring import RowsOf, rows_of, told

LIMITS = ("root", "depth", "room", "rows", "ending", "slots", "floor")  # as `Limits` has them


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
    # As many for every draft: what a GPU runs is compiled for a number of nodes.
    num_rows = 1 + growth.width * (growth.depth - 1)
    following = follow(free, width, num_rows)
    if following is None:
        return list(growing)
    logits_LV = following.roots()
    device = logits_LV.device
    staging = guessing.staging(device)
    there = staging.move(_told(free, following.slots_SM, num_levels, growth, guessing.vocab_size))
    limits = Limits(*(there.pop(name) for name in LIMITS))
    by_depth = there.pop("by depth")
    branch = min(growth.branch, guessing.vocab_size)
    trees = Trees.planted(len(free), num_rows, branch, len(TEMPERS), device)
    starts_S1 = (torch.arange(len(free), device=device) * num_levels)[:, None]
    level, first_row = roots(limits), 0
    for number in range(num_levels):
        if number > 0:
            level, first_row = front(trees, limits, number, width), 1 + width * (number - 1)
            logits_LV = following.rows(level)
        rows_SW = (starts_S1 + level.depths).masked_fill_(level.nodes < 0, len(free) * num_levels)
        found = guessing.at_once(logits_LV, rows_of(there, rows_SW.flatten()), branch)
        hang(trees, limits, level, first_row, *found, by_depth)
    _repeat(free, staging.fetch(trees.answer_SHK), growth)
    return [one for one in growing if one not in free]


def _told(
    texts: Seq[Growing], slots_SM: NDArray[np.int64], num_levels: int, growth: Growth, vocab_size: int
) -> dict[str, NDArray[Any] | Tensor]:
    """All that a device must be told of a draft: what `specdec.scoring.told` says of each text at each depth, and of a
    row of nobody behind; what limits each tree; and how likely guesses are: by which temper at each depth, or at each
    depth and rank themselves."""
    paths = [(0,) * depth for depth in range(num_levels)]  # any tokens will do
    asked = [RowsOf(one.seq, text * num_levels, paths) for text, one in enumerate(texts)]
    limits_4S = np.array([(len(one.seq.tokens) - 1, one.depth, one.room, one.rows) for one in texts], np.int64).T
    ending_SE = np.full((len(texts), max(1, *(len(one.seq.ending) for one in texts))), NONE, np.int64)
    for row_E, one in zip(ending_SE, texts, strict=True):
        row_E[: len(one.seq.ending)] = sorted(one.seq.ending)
    by_depth: NDArray[Any] = np.array([texts[0].draws.temper(depth) for depth in range(num_levels)], np.int64)
    if growth.ranks is not None:
        by_depth = np.full((num_levels, min(growth.branch, vocab_size)), float(NONE))
        for row_C, shares in zip(by_depth, growth.ranks, strict=False):
            row_C[: len(shares)] = shares[: len(row_C)]
    limits = dict(zip(LIMITS, (*limits_4S, ending_SE, slots_SM, np.array([growth.floor])), strict=True))
    rows = told(asked, TokenMask(len(texts) * num_levels + 1, vocab_size))
    return {**rows, **limits, "by depth": by_depth}


def _repeat(texts: Seq[Growing], answer_SHK: NDArray[np.int32], growth: Growth) -> None:
    """Grow the trees as the device did."""
    branch = (answer_SHK.shape[2] - 1) // (1 + len(TEMPERS))
    for one, answer_HK in zip(texts, answer_SHK, strict=True):
        begins: dict[int, int] = {}  # of each row, where what is guessed behind it begins
        for row in np.flatnonzero(answer_HK[:, 0] != NONE).tolist():
            node = 0
            if row > 0:
                above, rank = divmod(int(answer_HK[row, 0]), branch)
                node = begins[above] + rank
            begins[row] = len(one.tokens)
            one.grow(node, guessed(answer_HK[row, 1:], one.draws, one.paths[node], None), growth)
