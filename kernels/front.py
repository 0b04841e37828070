"""Which nodes of growing trees are grown next, and the guesses behind them: many trees at once, nothing read back. It
knows no text and no model.

S trees, W rows of a tree on a level, N nodes of a tree, L = S W rows, C guesses behind a row, G tempers, D depths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.device import on_gpu
from specdec.kernels.trees import LAST_BIT, NONE, Level, Limits, Trees


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
