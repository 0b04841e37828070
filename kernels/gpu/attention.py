"""Paged tree attention in Triton: the items of a work list, each a tile of queries over a chunk of its context, then
the joins of what they leave.

R rows, H query heads, G key-value heads, K head size, N slots, P rows of partial results, M queries of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.paged import Layout, PagedRows, Work
from specdec.kernels.work_list import ITEM_FIELDS, JOIN_FIELDS, WorkList

LARGEST_HEAD = 256
SMALL = 32  # queries of a tile that decodes: few enough that the cache's bandwidth is the limit, not the products
FEWEST = 16  # what a product of matrices takes at least
PROGRAMS = 4  # programs for each multiprocessor, of which a few fit at a time
JOIN_WARPS = 4
JOIN_CHUNKS = 16

FIELDS, JOINED = tl.constexpr(ITEM_FIELDS), tl.constexpr(JOIN_FIELDS)
LOG2_E = tl.constexpr(1.4426950408889634)
NO_WINDOW = 2**30
DOTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Tuning:
    """Slots that a program takes at a time, where all rows see them and at an edge; warps; how many steps its loads run
    ahead, with their own; and numbers of a head that are multiplied at a time, 0 for all."""

    slots: int
    edge: int
    warps: int
    stages: int
    dims: int = 0

    @property
    def options(self) -> dict[str, int | bool]:
        """Compiler options. Products are fused into sums: a row's bits depend on how its context was cut anyway."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


def tunings(queries: int, head_size: int, element_size: int, cramped: bool = False) -> tuple[Tuning, ...]:
    """How tiles of so many queries may be cut; the first is taken. Each fits the shared memory of every target. A
    `cramped` GPU (see `is_cramped`) multiplies out of registers, which are too few for the largest.

    The block of a slot is loaded before the slot itself, so of 5 stages two hold keys and values.
    """
    if element_size == 4:  # multiplied without tensor cores, out of registers
        return (Tuning(16, 16, 8, 1, 32 if head_size <= 128 else 16),)
    wide = head_size > 128
    if queries <= SMALL:
        if wide:
            return (Tuning(16, 16, 4, 5),)
        return (Tuning(32, 32, 4, 5), Tuning(64, 16 if queries < SMALL else 32, 8, 3))
    if queries <= 64:
        return (Tuning(32, 16, 8, 2, 64),) if wide else (Tuning(32, 32, 4, 3), Tuning(64, 32, 8, 2))
    return (Tuning(32, 16, 8, 2),) if cramped else (Tuning(64, 16, 8, 2), Tuning(32, 32, 8, 3))


def largest_tile(head_size: int, element_size: int) -> int:
    """Queries of a tile that reads a prompt."""
    if element_size == 4:
        return SMALL
    return 128 if head_size <= 128 else 64


def paged_attention(
    q_RHK: Tensor,
    keys_GNK: Tensor,
    values_GNK: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tuning: Tuning | None = None,
) -> Tensor:
    """See `specdec.kernels.tree_attention.paged_attention`; accumulates in fp32, multiplies in the cache's dtype.

    Where `rows` brings its work, a launch asks the host and the device nothing: its grid and its buffers depend on the
    lengths of the work's tensors alone. Rows that no item names are left undefined, rows
    that see nothing are 0. Raises ValueError for head sizes
    over 256 and dtypes other than fp32, fp16 and bf16.
    """
    (num_rows, num_heads, head_size), num_groups = q_RHK.shape, len(keys_GNK)
    if head_size > LARGEST_HEAD or keys_GNK.dtype not in DOTS:
        raise ValueError(
            f"attention takes heads up to {LARGEST_HEAD} in fp32, fp16 or bf16, got {head_size} in {keys_GNK.dtype}"
        )
    out_RHK = q_RHK.new_empty(num_rows, num_heads, head_size)
    num_shared = num_heads // num_groups
    for work in work_of(rows, num_shared, keys_GNK):
        fewest = SMALL if keys_GNK.element_size() == 4 else FEWEST
        queries = max(fewest, triton.next_power_of_2(work.tile_rows * num_shared))
        chosen = tuning or tunings(queries, head_size, keys_GNK.element_size(), is_cramped(keys_GNK.device))[0]
        # The interpreter cannot multiply in bf16.
        dot = torch.float32 if keys_GNK.dtype is torch.bfloat16 and not keys_GNK.is_cuda else keys_GNK.dtype
        partial_PHK = q_RHK.new_empty(work.num_partials, num_heads, head_size, dtype=torch.float32)
        # One by one: the second of two in one tensor is aligned or not by their length, and compiled for either.
        highest_PH, sums_PH = (partial_PHK.new_empty(work.num_partials, num_heads) for _ in range(2))
        sinks_H = out_RHK if sinks is None else sinks
        size = triton.next_power_of_2(max(FEWEST, head_size))
        if len(work.items):
            attend_kernel[(len(work.items), num_groups)](
                *(out_RHK, partial_PHK, highest_PH, sums_PH, q_RHK, keys_GNK, values_GNK),
                *(rows.blocks_B, rows.prefix_R, rows.ancestors_R, sinks_H, work.items),
                *(q_RHK.stride(0), q_RHK.stride(1), keys_GNK.stride(0), rows.first),
                *(NO_WINDOW if window is None else window, scale, 1.0 if softcap is None else softcap),
                GROUP=num_shared,
                HEAD_SIZE=head_size,
                BLOCK_SIZE=rows.block_size,
                QUERIES=queries,
                SLOTS=chosen.slots,
                EDGE=chosen.edge,
                SIZE=size,
                DIMS=min(size, chosen.dims or size),
                DOT=DOTS[dot],
                SOFTCAPPED=softcap is not None,
                SINKS=sinks is not None,
                **chosen.options,
            )
        if len(work.joins):
            join_kernel[(len(work.joins), num_heads)](
                *(out_RHK, partial_PHK, highest_PH, sums_PH, sinks_H, work.joins, head_size),
                CHUNKS=JOIN_CHUNKS,
                SIZE=size,
                SINKS=sinks is not None,
                num_warps=JOIN_WARPS,
                enable_fp_fusion=True,
            )
    return out_RHK


def tile_sizes(num_shared: int, head_size: int, element_size: int) -> tuple[int, int]:
    """Rows of the tiles of sequences with few rows, who have at most as many, and of those with more."""
    few = max(1, SMALL // num_shared)
    return few, max(few, largest_tile(head_size, element_size) // num_shared)


def work_of(rows: PagedRows, num_shared: int, keys_GNK: Tensor) -> tuple[Work, ...]:
    """The work that rows bring for such layers; else it is cut now: sequences with few rows in small tiles, the others
    in large ones, so that neither waits for what the other needs."""
    head_size = keys_GNK.shape[-1]
    if (num_shared, head_size) not in rows.work:
        layout, device = rows.layout, keys_GNK.device
        if layout is None:
            raise ValueError(
                f"work must be cut for {num_shared} queries a key head of size {head_size}, got {list(rows.work)}"
            )
        cut = work_lists(layout, num_shared, keys_GNK)
        rows.work[num_shared, head_size] = tuple(Work.of(found, tile_rows, device) for found, tile_rows in cut)
    return rows.work[num_shared, head_size]


def work_lists(layout: Layout, num_shared: int, keys_GNK: Tensor) -> list[tuple[WorkList, int]]:
    """What `work_of` cuts, on the host, and the rows of the tiles: one of two sizes, however long sequences are, or a
    kernel would be compiled for each length."""
    num_groups, _, head_size = keys_GNK.shape
    few, many = tile_sizes(num_shared, head_size, keys_GNK.element_size())
    pieces = num_pieces(keys_GNK.device, num_groups)
    counts = [stretch.end_row - stretch.first_row for stretch in layout.stretches]
    return [
        (layout.work_list(tile_rows=tile_rows, pieces=pieces, fewer=fewer, more=more), tile_rows)
        for tile_rows, fewer, more in ((few, 0, few), (many, few, 0))
        if any(count > fewer and (not more or count <= more) for count in counts)
    ]


def num_pieces(device: torch.device, num_groups: int) -> int:
    """Into how many items a batch is cut at least where it can be, so that each multiprocessor has work."""
    return max(1, PROGRAMS * num_processors(device) // num_groups)


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the device; 4 in the interpreter, so that there is something to join."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def is_cramped(device: torch.device) -> bool:
    """Whether it is a GPU of AMD, or of NVIDIA before Hopper."""
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0)


@triton.jit
def attend_kernel(
    out_RHK,
    partial_PHK,
    highest_PH,
    sums_PH,
    q_RHK,
    keys_GNK,
    values_GNK,
    blocks_B,
    prefix_R,
    ancestors_R,
    sinks_H,
    items_W,
    q_row_stride,
    q_head_stride,
    group_stride,
    first,
    window,
    scale,
    softcap,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
    EDGE: tl.constexpr,
    SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    DOT: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One item, one key head: the queries of its rows that share the head over its slots.

    Slots that every row sees need no mask; those near an edge - of the window, below `first`, in the tree, at the end -
    are masked row by row.
    """
    item, group = items_W + tl.program_id(0) * FIELDS, tl.program_id(1)
    first_row, num_rows, table = tl.load(item), tl.load(item + 1), blocks_B + tl.load(item + 2)
    begin, end, place = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    if num_rows > 0:
        query, dim = tl.arange(0, QUERIES), tl.arange(0, SIZE)
        index, head = query // GROUP, group * GROUP + query % GROUP
        valid = index < num_rows
        row = (first_row + index).to(tl.int64)
        stored = valid[:, None] & (dim < HEAD_SIZE)[None, :]
        queries = q_RHK + row * q_row_stride + head * q_head_stride
        q = tl.load(queries[:, None] + tl.arange(0, DIMS)[None, :], mask=within(valid, 0, DIMS, HEAD_SIZE), other=0.0)
        q = q.to(DOT)

        prefix = tl.load(prefix_R + row, mask=valid, other=0).to(tl.int32)
        ancestors = tl.load(ancestors_R + row, mask=valid, other=0)
        count = popcount(ancestors)
        lowest = tl.maximum(first, prefix + count - window)
        for _ in range(window, 63):  # a window of w reaches the last w of the path: the bits above the others
            ancestors = tl.where(count > window, ancestors & (ancestors - 1), ancestors)
            count = tl.where(count > window, count - 1, count)
        low, high = ancestors.to(tl.uint32), (ancestors >> 32).to(tl.uint32)

        # In steps of SLOTS from `begin`: [from, whole) edge, [whole, tree) seen by all, [tree, last) edge.
        far = 2147483647
        common_end = tl.min(tl.where(valid, prefix, far), 0)
        common_begin = tl.max(tl.where(valid, lowest, 0), 0)
        any_begin = tl.minimum(tl.min(tl.where(valid, lowest, far), 0), common_end)
        last = (end - begin + SLOTS - 1) // SLOTS
        start = tl.minimum(tl.maximum(any_begin - begin, 0) // SLOTS, last)
        whole = tl.minimum(tl.maximum((tl.maximum(common_begin - begin, 0) + SLOTS - 1) // SLOTS, start), last)
        tree = tl.maximum(tl.maximum(tl.minimum(common_end, end) - begin, 0) // SLOTS, whole)

        keys, values = keys_GNK + group.to(tl.int64) * group_stride, values_GNK + group.to(tl.int64) * group_stride
        highest = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        mixed = tl.zeros((QUERIES, SIZE), tl.float32)
        STEPS: tl.constexpr = SLOTS // EDGE
        before = (whole - start) * STEPS
        for step in tl.range(0, before + (last - tree) * STEPS, num_stages=1):
            near = tl.where(step < before, start * STEPS + step, tree * STEPS + step - before)
            slot = begin + near * EDGE + tl.arange(0, EDGE)
            offset = slot[None, :] - prefix[:, None]
            word = tl.where(offset < 32, low[:, None], high[:, None])
            bit = (word >> (offset & 31).to(tl.uint32)) & 1
            in_tree = (offset >= 0) & (offset < 63) & (bit != 0)
            seen = (((offset < 0) & (slot[None, :] >= lowest[:, None])) | in_tree) & (slot < end)[None, :]
            highest, total, mixed = absorb(
                *(highest, total, mixed, q, queries, valid, keys, values, table, slot, end, seen, scale, softcap),
                *(HEAD_SIZE, BLOCK_SIZE, SIZE, DIMS, DOT, SOFTCAPPED, True),
            )
        for near in range(whole, tree):
            slot = begin + near * SLOTS + tl.arange(0, SLOTS)
            highest, total, mixed = absorb(
                *(highest, total, mixed, q, queries, valid, keys, values, table, slot, end, slot, scale, softcap),
                *(HEAD_SIZE, BLOCK_SIZE, SIZE, DIMS, DOT, SOFTCAPPED, False),
            )

        num_heads = tl.num_programs(1) * GROUP
        if place < 0:
            if SINKS:
                sink = tl.load(sinks_H + head).to(tl.float32) * LOG2_E
                highest, total, mixed = with_sink(highest, total, mixed, sink)
            there = (row[:, None] * num_heads + head[:, None]) * HEAD_SIZE + dim[None, :]
            tl.store(out_RHK + there, mixed / tl.where(total == 0.0, 1.0, total)[:, None], mask=stored)
        else:
            left = (place + index).to(tl.int64) * num_heads + head
            tl.store(highest_PH + left, highest, mask=valid)
            tl.store(sums_PH + left, total, mask=valid)
            tl.store(partial_PHK + left[:, None] * HEAD_SIZE + dim[None, :], mixed, mask=stored)


@triton.jit
def absorb(
    highest,
    total,
    mixed,
    q,
    queries,
    valid,
    keys,
    values,
    table,
    slot,
    end,
    seen,
    scale,
    softcap,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    DOT: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    AT_EDGE: tl.constexpr,
):
    """Take some slots into a tile's running softmax (highest score in bits, sum, mixed values); at an edge only what is
    `seen`.

    A score or a seen value that is not finite makes the row's sum NaN: no weight of 0 and no softcap hides it. Values
    that are not finite are 0 for the rows that do not see them.
    """
    inside = slot < end
    if AT_EDGE:
        block = tl.load(table + slot // BLOCK_SIZE, mask=inside, other=0)
    else:
        block = tl.load(table + slot // BLOCK_SIZE)
    place = (block.to(tl.int64) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_SIZE
    k = cached(keys, place, inside, 0, DIMS, HEAD_SIZE, AT_EDGE).to(DOT)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    for first in tl.static_range(DIMS, SIZE, DIMS):
        dims = first + tl.arange(0, DIMS)
        q = tl.load(queries[:, None] + dims[None, :], mask=within(valid, first, DIMS, HEAD_SIZE), other=0.0).to(DOT)
        k = cached(keys, place, inside, first, DIMS, HEAD_SIZE, AT_EDGE).to(DOT)
        score = tl.dot(q, tl.trans(k), score, input_precision="ieee")
    v = cached(values, place, inside, 0, SIZE, HEAD_SIZE, AT_EDGE).to(DOT)
    score *= scale
    score = tl.where(tl.abs(score) < float("inf"), score, float("nan"))
    if SOFTCAPPED:
        small = tl.exp2(tl.abs(score) * (-2.0 * LOG2_E / softcap))
        squeezed = (1.0 - small) / (1.0 + small) * softcap
        score = tl.where(score < 0.0, -squeezed, squeezed)
    score *= LOG2_E
    if AT_EDGE:
        fine = tl.abs(v) < float("inf")
        v = tl.where(fine, v, 0.0).to(DOT)
        bad = tl.max(tl.where(fine, 0, 1), 1) != 0
        score = tl.where(seen, tl.where(bad[None, :], float("nan"), score), float("-inf"))
    top = tl.maximum(highest, tl.max(score, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(score - safe[:, None])
    old = tl.exp2(highest - safe)
    total = total * old + tl.sum(weight, 1)
    mixed = tl.dot(weight.to(DOT), v, mixed * old[:, None], input_precision="ieee")
    return top, total, mixed


@triton.jit
def cached(slots, place, inside, first, DIMS: tl.constexpr, HEAD_SIZE: tl.constexpr, AT_EDGE: tl.constexpr):
    """DIMS numbers of each slot from `first` on; 0 past the head's size and, at an edge, outside."""
    pointer = slots + place[:, None] + (first + tl.arange(0, DIMS))[None, :]
    if AT_EDGE:
        found = tl.load(pointer, mask=within(inside, first, DIMS, HEAD_SIZE), other=0.0)
    elif first + DIMS > HEAD_SIZE:
        found = tl.load(pointer, mask=within(inside | True, first, DIMS, HEAD_SIZE), other=0.0)
    else:
        found = tl.load(pointer)
    return found


@triton.jit
def within(rows, first, DIMS: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Which of DIMS numbers from `first` on belong to a head, in the rows that count."""
    return rows[:, None] & (first + tl.arange(0, DIMS) < HEAD_SIZE)[None, :]


@triton.jit
def with_sink(highest, total, mixed, sink):
    """A softmax with one more logit, in bits, in its denominator."""
    top = tl.maximum(highest, sink)
    old = tl.exp2(highest - top)
    return top, total * old + tl.exp2(sink - top), mixed * old[:, None]


@triton.jit
def popcount(x):
    """How many bits of an int64 that is not negative are set."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return ((x + (x >> 32)) & 127).to(tl.int32)


@triton.jit
def join_kernel(
    out_RHK,
    partial_PHK,
    highest_PH,
    sums_PH,
    sinks_H,
    joins_J,
    head_size,
    CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One row, one head: the chunks of its context, joined."""
    join, head = joins_J + tl.program_id(0) * JOINED, tl.program_id(1)
    row, place, step, count = tl.load(join), tl.load(join + 1), tl.load(join + 2), tl.load(join + 3)
    if count > 0:
        num_heads = tl.num_programs(1)
        dim = tl.arange(0, SIZE)
        highest = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        mixed = tl.zeros((1, SIZE), tl.float32)
        for begin in range(0, count, CHUNKS):
            chunk = begin + tl.arange(0, CHUNKS)
            there = (place + chunk * step).to(tl.int64) * num_heads + head
            inside = chunk < count
            tops = tl.load(highest_PH + there, mask=inside, other=float("-inf"))
            sums = tl.load(sums_PH + there, mask=inside, other=0.0)
            parts = tl.load(
                partial_PHK + there[:, None] * head_size + dim[None, :],
                mask=inside[:, None] & (dim < head_size)[None, :],
                other=0.0,
            )
            top = tl.maximum(highest, tl.max(tops, 0))
            safe = tl.where(top == float("-inf"), 0.0, top)
            old, weight = tl.exp2(highest - safe), tl.exp2(tops - safe)
            total = total * old + tl.sum(sums * weight, 0)
            mixed = mixed * old[:, None] + tl.sum(parts * weight[:, None], 0)[None, :]
            highest = top
        if SINKS:
            highest, total, mixed = with_sink(
                highest, total, mixed, tl.zeros((1,), tl.float32) + tl.load(sinks_H + head).to(tl.float32) * LOG2_E
            )
        there = out_RHK + (row.to(tl.int64) * num_heads + head) * head_size + dim[None, :]
        tl.store(there, mixed / tl.where(total == 0.0, 1.0, total)[:, None], mask=(dim < head_size)[None, :])
