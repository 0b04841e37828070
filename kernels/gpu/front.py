"""Which nodes are grown next and the guesses behind them, in Triton: a launch for each. Dimensions as in
`specdec.kernels.trees`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.trees import Level, Limits, Trees

NODES_A_WARP = 256  # of which each thread holds some numbers: more, and older Tritons spill
HANG_WARPS = 1


def front(trees: Trees, limits: Limits, level: int, width: int, filled: int, branch: int) -> Level:
    """See `specdec.kernels.front.front`, where `filled` nodes have been guessed so far."""
    num_trees, num_nodes = trees.tokens_SN.shape
    size = triton.next_power_of_2(num_nodes)
    # One by one: parts of one tensor are aligned or not by their length, and compiled for either.
    fields = [trees.tokens_SN.new_empty(num_trees, width) for _ in range(7)]
    survival_SW = trees.survival_SN.new_empty(num_trees, width)
    front_kernel[(num_trees,)](
        *(*fields, survival_SW, trees.tokens_SN, trees.survival_SN, trees.open_SN, trees.depths_SH),
        *(trees.ancestors_SH, trees.num_grown_S, limits.root_S, limits.depth_S, limits.room_S, limits.rows_S),
        *(limits.slots_SM, num_nodes, num_nodes // branch, limits.slots_SM.shape[1], filled, level, width, branch),
        SIZE=size,
        num_warps=num_warps(size),
        enable_fp_fusion=False,
    )
    return Level(fields[0], survival_SW, *fields[1:])


def num_warps(size: int) -> int:
    """Of `front_kernel`, for trees of up to `size` nodes."""
    return max(4, min(16, size // NODES_A_WARP))


def hang(
    trees: Trees, limits: Limits, level: Level, first_row: int, tokens_LC: Tensor, chances_LCG: Tensor, by_depth: Tensor
) -> None:
    """See `specdec.kernels.front.hang`."""
    (num_trees, width), (_, branch, num_tempers) = level.nodes.shape, chances_LCG.shape
    hang_kernel[(num_trees, width)](
        *(trees.tokens_SN, trees.survival_SN, trees.open_SN, trees.depths_SH, trees.ancestors_SH, trees.answer_SHK),
        *(level.nodes, level.survival, level.depths, level.ancestors, tokens_LC, chances_LCG, by_depth),
        *(limits.depth_S, limits.ending_SE, limits.floor, trees.depths_SH.shape[1], limits.ending_SE.shape[1]),
        *(first_row, branch),
        BRANCH=triton.next_power_of_2(branch),
        TEMPERS=num_tempers,
        RANKED=by_depth.dtype is torch.float64,
        num_warps=HANG_WARPS,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_slots", "filled", "level", "width"])
def front_kernel(
    nodes_SW,
    depths_SW,
    new_tokens_SW,
    positions_SW,
    slots_SW,
    ancestors_SW,
    above_SW,
    survival_SW,
    tokens_SN,
    survival_SN,
    open_SN,
    depths_SH,
    ancestors_SH,
    num_grown_S,
    root_S,
    depth_S,
    room_S,
    rows_S,
    slots_SM,
    num_nodes,
    num_rows,
    num_slots,
    filled,
    level,
    width,
    branch,
    SIZE: tl.constexpr,
):
    """The nodes of one tree, one after the other: the likeliest that is open, unless too many are likelier."""
    tree = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, SIZE)
    survival = tl.load(survival_SN + tree * num_nodes + node, mask=node < filled, other=-1.0)
    is_open = tl.load(open_SN + tree * num_nodes + node, mask=node < filled, other=0) != 0
    root, depth, room = tl.load(root_S + tree), tl.load(depth_S + tree), tl.load(room_S + tree)
    grown = tl.load(num_grown_S + tree)
    places = tl.where(level < depth, tl.load(rows_S + tree) - grown, 0)
    for column in range(width):
        highest = tl.max(tl.where(is_open, survival, -1.0), 0)
        best = tl.min(tl.where(is_open & (survival == highest), node, SIZE), 0)
        likelier = (survival > highest) | ((survival == highest) & (node < best))
        taken = (best < SIZE) & (tl.sum(likelier.to(tl.int32), 0) < room) & (column < places)
        some = tl.where(taken, best, 0)
        above = some // branch
        deep = tl.where(taken, tl.load(depths_SH + tree * num_rows + above) + 1, 0)
        token = tl.load(tokens_SN + tree * num_nodes + some)
        row = tl.minimum(grown + column, num_slots - 1)
        slot = tl.load(slots_SM + tree * num_slots + row)
        path = tl.load(ancestors_SH + tree * num_rows + above) | (tl.full((), 1, tl.int64) << row)
        place = tree * width + column
        tl.store(nodes_SW + place, tl.where(taken, best, -1))
        tl.store(depths_SW + place, deep)
        tl.store(new_tokens_SW + place, tl.where(taken, token, 0))
        tl.store(positions_SW + place, root + deep)
        tl.store(slots_SW + place, tl.where(taken, slot, 0))
        tl.store(ancestors_SW + place, tl.where(taken, path, 1))
        tl.store(above_SW + place, above)
        tl.store(survival_SW + place, tl.load(survival_SN + tree * num_nodes + some))
        tl.store(open_SN + tree * num_nodes + some, False, mask=taken)
        is_open = is_open & ((node != best) | (taken == 0))
        tl.store(num_grown_S + tree, grown + column + 1, mask=taken)


@triton.jit(do_not_specialize=["num_ending", "first_row"])
def hang_kernel(
    tokens_SN,
    survival_SN,
    open_SN,
    depths_SH,
    ancestors_SH,
    answer_SHK,
    nodes_SW,
    survival_SW,
    depths_SW,
    ancestors_SW,
    tokens_LC,
    chances_LCG,
    by_depth,
    depth_S,
    ending_SE,
    floor,
    num_rows,
    num_ending,
    first_row,
    branch,
    BRANCH: tl.constexpr,
    TEMPERS: tl.constexpr,
    RANKED: tl.constexpr,
):
    """The guesses behind one row."""
    tree, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tree * tl.num_programs(1) + column
    row = tree * num_rows + first_row + column
    guess, temper = tl.arange(0, BRANCH), tl.arange(0, TEMPERS)
    inside = guess < branch
    node, depth = tl.load(nodes_SW + place), tl.load(depths_SW + place)
    token = tl.load(tokens_LC + place * branch + guess, mask=inside, other=-1)
    each = (place * branch + guess) * TEMPERS
    if RANKED:
        chance = tl.load(by_depth + depth * branch + guess, mask=inside, other=-1.0)
    else:
        chance = tl.load(chances_LCG + each + tl.load(by_depth + depth), mask=inside, other=-1.0).to(tl.float64)
    there = inside & (node >= 0) & (token >= 0) & (chance >= 0.0)
    survival = tl.where(there, tl.load(survival_SW + place) * chance, -1.0)
    is_open = there & (depth + 1 < tl.load(depth_S + tree)) & (survival >= tl.load(floor))
    for number in range(num_ending):
        is_open = is_open & (token != tl.load(ending_SE + tree * num_ending + number))
    tl.store(tokens_SN + row * branch + guess, token.to(tl.int64), mask=inside)
    tl.store(survival_SN + row * branch + guess, survival, mask=inside)
    tl.store(open_SN + row * branch + guess, is_open, mask=inside)
    tl.store(depths_SH + row, depth)
    tl.store(ancestors_SH + row, tl.load(ancestors_SW + place))
    answer = answer_SHK + row * (1 + branch + branch * TEMPERS)
    tl.store(answer, node.to(tl.int32))
    tl.store(answer + 1 + guess, token, mask=inside)
    chances = tl.load(chances_LCG + each[:, None] + temper[None, :], mask=inside[:, None], other=0.0)
    bits = answer + 1 + branch + (guess * TEMPERS)[:, None] + temper[None, :]
    tl.store(bits, chances.to(tl.int32, bitcast=True), mask=inside[:, None])
