"""Which nodes of growing trees are grown next, and the guesses behind them: many trees at once, nothing read back. It
knows no text and no model.

S trees, W rows of a tree on a level, H rows of a tree in all (the root's first), C guesses behind a row, N = H C nodes
(node n is guess n mod C behind row n // C), G tempers, D depths, E ids that end a text, M rows with a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.device import on_gpu

NONE = -1  # as a node, and as the survival of one: there is none
LAST_BIT = 62  # of ancestors


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tree is held to; int64 but for `floor`, fp64 `[1]`, the least survival of what is grown on. `root_S` is
    the position of the root, `depth_S` how many levels grow, `room_S` how many nodes count, `rows_S` how many are
    grown; `ending_SE` are tokens behind which nothing is, or `NONE`; `slots_SM` are where rows lie, from the root's on.
    """

    root_S: Tensor
    depth_S: Tensor
    room_S: Tensor
    rows_S: Tensor
    ending_SE: Tensor
    slots_SM: Tensor
    floor: Tensor


@dataclass(frozen=True, slots=True)
class Trees:
    """Trees in the making, written in place: int64, but `survival_SN` fp64 and `open_SN` bool, which says what may be
    grown on. `answer_SHK` (int32) holds for each row its node, the tokens guessed behind it and the bits of their
    chances."""

    tokens_SN: Tensor
    survival_SN: Tensor
    open_SN: Tensor
    depths_SH: Tensor
    ancestors_SH: Tensor
    num_grown_S: Tensor
    answer_SHK: Tensor

    @staticmethod
    def planted(num_trees: int, num_rows: int, branch: int, num_tempers: int, device: torch.device) -> Trees:
        """With nothing behind their roots."""

        def filled(count: int, value: float, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((num_trees, count), value, dtype=dtype, device=device)

        width = 1 + branch * (1 + num_tempers)
        return Trees(
            filled(num_rows * branch, 0),
            filled(num_rows * branch, NONE, torch.float64),
            filled(num_rows * branch, False, torch.bool),
            filled(num_rows, 0),
            filled(num_rows, 1),
            filled(1, 1)[:, 0],
            filled(num_rows * width, NONE, torch.int32).view(num_trees, num_rows, width),
        )


@dataclass(frozen=True, slots=True)
class Level:
    """What is grown on one level, `[S, W]` each, int64: `nodes`, `NONE` where there are fewer, with their `survival` in
    fp64. As rows of a forward those without a node lie in slot 0, hold token 0 and see their text up to the root.
    `above` is where the row of a node's parent stands among the H of its tree."""

    nodes: Tensor
    survival: Tensor
    depths: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    ancestors: Tensor
    above: Tensor


def roots(limits: Limits) -> Level:
    """The first level: of the rows of the roots only what `hang` looks at means anything."""
    zero_S1 = torch.zeros_like(limits.root_S)[:, None]
    one_S1 = torch.ones_like(zero_S1)
    return Level(zero_S1, one_S1.double(), zero_S1, zero_S1, zero_S1, zero_S1, one_S1, zero_S1)


def front(trees: Trees, limits: Limits, level: int, width: int) -> Level:
    """The nodes of level `level`, from 1, each `width` rows wide: the likeliest open ones among the `room_S` likeliest
    of all, ties by the lowest. They are no longer open, and count as grown."""
    num_rows = 1 + (level - 1) * width
    branch = trees.tokens_SN.shape[1] // trees.depths_SH.shape[1]
    if on_gpu(trees.tokens_SN):
        from specdec.kernels.gpu import front as gpu

        return gpu.front(trees, limits, level, width, num_rows * branch, branch)
    filled = num_rows * branch
    order_SN = trees.survival_SN[:, :filled].argsort(dim=1, descending=True, stable=True)
    open_SN = trees.open_SN[:, :filled].gather(1, order_SN) & (torch.arange(filled) < limits.room_S[:, None])
    places_S = (limits.rows_S - trees.num_grown_S).clamp(max=width) * (level < limits.depth_S)
    number_SN = open_SN.cumsum(1)
    taken_SN = open_SN & (number_SN <= places_S[:, None])
    trees.open_SN[:, :filled].logical_and_(~torch.zeros_like(taken_SN).scatter_(1, order_SN, taken_SN))
    # What is not taken meets in a place behind the others.
    nodes_SW = torch.full((len(order_SN), width + 1), NONE)
    nodes_SW = nodes_SW.scatter_(1, (number_SN - 1).masked_fill_(~taken_SN, width), order_SN)[:, :width]

    none_SW, some_SW = nodes_SW < 0, nodes_SW.clamp(min=0)
    above_SW, rows_SW = some_SW // branch, trees.num_grown_S[:, None] + torch.arange(width)
    bits_SW = torch.ones_like(rows_SW) << rows_SW.clamp(max=LAST_BIT)
    depths_SW = (trees.depths_SH.gather(1, above_SW) + 1).masked_fill_(none_SW, 0)
    trees.num_grown_S.add_((~none_SW).sum(1))
    return Level(
        nodes_SW,
        trees.survival_SN.gather(1, some_SW),
        depths_SW,
        trees.tokens_SN.gather(1, some_SW).masked_fill_(none_SW, 0),
        limits.root_S[:, None] + depths_SW,
        limits.slots_SM.gather(1, rows_SW.clamp(max=limits.slots_SM.shape[1] - 1)).masked_fill_(none_SW, 0),
        (trees.ancestors_SH.gather(1, above_SW) | bits_SW).masked_fill_(none_SW, 1),
        above_SW,
    )


def hang(
    trees: Trees, limits: Limits, level: Level, first_row: int, tokens_LC: Tensor, chances_LCG: Tensor, by_depth: Tensor
) -> None:
    """Hang guesses, as `guess_rows` gives them for all rows of a level, behind its rows, which are `first_row` and
    following. How likely each is says the temper at its depth, where `by_depth` is int64 `[D]`, or its depth and rank
    alone, where that is fp64 `[D, C]`: a rank below 0 is no guess."""
    if on_gpu(trees.tokens_SN):
        from specdec.kernels.gpu import front as gpu

        gpu.hang(trees, limits, level, first_row, tokens_LC, chances_LCG, by_depth)
        return
    (num_trees, width), branch = level.nodes.shape, tokens_LC.shape[1]
    tokens_SWC = tokens_LC.view(num_trees, width, branch).long()
    told_SW = by_depth[level.depths]
    chances_SWC = told_SW
    if by_depth.ndim == 1:
        chances_SWCG = chances_LCG.view(num_trees, width, branch, -1)
        chances_SWC = chances_SWCG.gather(3, told_SW[..., None, None].expand(-1, -1, branch, 1))[..., 0].double()
    there_SWC = (level.nodes >= 0)[..., None] & (tokens_SWC >= 0) & (chances_SWC >= 0)
    survival_SWC = (level.survival[..., None] * chances_SWC).masked_fill_(~there_SWC, NONE)
    ends_SWC = (tokens_SWC[..., None] == limits.ending_SE[:, None, None]).any(-1)
    is_above_SW1 = (level.depths + 1 < limits.depth_S[:, None])[..., None]
    rows = slice(first_row, first_row + width)
    nodes = slice(rows.start * branch, rows.stop * branch)
    trees.tokens_SN[:, nodes] = tokens_SWC.flatten(1)
    trees.survival_SN[:, nodes] = survival_SWC.flatten(1)
    trees.open_SN[:, nodes] = (there_SWC & ~ends_SWC & is_above_SW1 & (survival_SWC >= limits.floor)).flatten(1)
    trees.depths_SH[:, rows], trees.ancestors_SH[:, rows] = level.depths, level.ancestors
    trees.answer_SHK[:, rows, 0] = level.nodes.int()
    trees.answer_SHK[:, rows, 1 : 1 + branch] = tokens_SWC.int()
    trees.answer_SHK[:, rows, 1 + branch :] = chances_LCG.view(torch.int32).view(num_trees, width, -1)
