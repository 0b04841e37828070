"""Rotary positions in Triton: the tables of a forward, and the rotation that writes keys and values to their slots.

R rows, H query heads, G of keys and values, J = H + G, K head size, F rotated frequencies, N slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gpu.tuning import Tuning

TABLE_TUNINGS = (Tuning(block=256, warps=4), Tuning(block=1024, warps=4))
WRITE_TUNINGS = (Tuning(block=1024, warps=4), Tuning(block=2048, warps=4), Tuning(block=512, warps=2))

PER_TURN = tl.constexpr(0.6366197723675814)  # quarter turns in an angle of 1
QUARTER = tl.constexpr(1.5707963267948966)


def rotary_table(
    positions_R: Tensor, frequencies_F: Tensor, tuning: Tuning = TABLE_TUNINGS[0]
) -> tuple[Tensor, Tensor]:
    """See `specdec.kernels.norm_rope.rotary_table`."""
    num_rows, num_frequencies = len(positions_R), len(frequencies_F)
    shape = (num_rows, 1, 2 * num_frequencies)
    cos_R1K, sin_R1K = (torch.empty(shape, dtype=torch.float32, device=positions_R.device) for _ in range(2))
    if cos_R1K.numel():
        table_kernel[(triton.cdiv(num_rows * num_frequencies, tuning.block),)](
            *(cos_R1K, sin_R1K, positions_R, frequencies_F, num_rows * num_frequencies, num_frequencies),
            BLOCK=tuning.block,
            **tuning.options,
        )
    return cos_R1K, sin_R1K


def rotate_and_write(
    qk_RJK: Tensor,
    v_RGK: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    keys_GNK: Tensor,
    values_GNK: Tensor,
    slots_R: Tensor,
    tuning: Tuning = WRITE_TUNINGS[0],
) -> Tensor:
    """See `specdec.kernels.norm_rope.rotate_and_write`. Without rotation the queries are those given, not a copy."""
    num_rows, num_kv_heads, size = v_RGK.shape
    num_queries = qk_RJK.shape[1] - num_kv_heads
    q_RHK, half = qk_RJK[:, :num_queries], 0
    if rotary is not None:
        q_RHK, half = torch.empty(q_RHK.shape, dtype=q_RHK.dtype, device=q_RHK.device), rotary[0].shape[-1] // 2
    cos, sin = rotary if rotary is not None else (slots_R, slots_R)
    first = 0 if rotary is not None else num_queries  # of the heads that a program must touch
    whole = triton.next_power_of_2(size)
    heads = max(1, min(tuning.block // whole, triton.next_power_of_2(qk_RJK.shape[1] - first)))
    blocks = triton.cdiv(qk_RJK.shape[1] - first, heads), triton.cdiv(num_kv_heads, heads)
    if num_rows:
        rotate_kernel[(num_rows, sum(blocks))](
            *(q_RHK, keys_GNK, values_GNK, qk_RJK, v_RGK, cos, sin, slots_R),
            *(first, num_queries, num_kv_heads, size, half, blocks[0]),
            *(qk_RJK.stride(0), qk_RJK.stride(1), v_RGK.stride(0), v_RGK.stride(1)),
            *(keys_GNK.stride(0), keys_GNK.stride(1), values_GNK.stride(0), values_GNK.stride(1)),
            HEADS=heads,
            HALF=triton.next_power_of_2(half) if half else 0,
            REST=triton.next_power_of_2(size - 2 * half) if size > 2 * half else 0,
            SIZE=whole,
            **tuning.options,
        )
    return q_RHK


@triton.jit(do_not_specialize=["count"])
def table_kernel(cos_R1K, sin_R1K, positions_R, frequencies_F, count, num_frequencies, BLOCK: tl.constexpr):
    """Some angles, row by row. The angle is rounded to fp32, as everywhere; its whole quarter turns are taken off in
    fp64, so what is left is right to 1e-9 for angles of millions."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    row, frequency = (place // num_frequencies).to(tl.int64), place % num_frequencies
    position = tl.load(positions_R + row, mask=inside, other=0).to(tl.float32)
    angle = (position * tl.load(frequencies_F + frequency, mask=inside, other=0.0)).to(tl.float64)
    turns = (angle * PER_TURN + 0.5).to(tl.int64)  # angles are not negative
    left = (angle - turns.to(tl.float64) * QUARTER).to(tl.float32)
    cosine, sine = small_cosine(left), small_sine(left)
    swapped = (turns & 1) != 0
    found_cosine, found_sine = tl.where(swapped, sine, cosine), tl.where(swapped, cosine, sine)
    found_cosine = tl.where(((turns + 1) & 2) != 0, -found_cosine, found_cosine)
    found_sine = tl.where((turns & 2) != 0, -found_sine, found_sine)
    first = row * 2 * num_frequencies + frequency
    tl.store(cos_R1K + first, found_cosine, mask=inside)
    tl.store(cos_R1K + first + num_frequencies, found_cosine, mask=inside)
    tl.store(sin_R1K + first, -found_sine, mask=inside)
    tl.store(sin_R1K + first + num_frequencies, found_sine, mask=inside)


@triton.jit
def small_sine(x):
    """fp32 sine between plus and minus an eighth of a turn: x + x^3 P(x^2)."""
    z = x * x
    p = -1.9515295891e-4 * z + 8.3321608736e-3
    p = p * z - 1.6666654611e-1
    return p * z * x + x


@triton.jit
def small_cosine(x):
    """fp32 cosine between plus and minus an eighth of a turn: 1 - x^2 / 2 + x^4 Q(x^2)."""
    z = x * x
    q = 2.443315711809948e-5 * z - 1.388731625493765e-3
    q = q * z + 4.166664568298827e-2
    return 1.0 - (0.5 * z - q * z * z)


@triton.jit
def rotate_kernel(
    q_RHK,
    keys_GNK,
    values_GNK,
    qk_RJK,
    v_RGK,
    cos_R1K,
    sin_R1K,
    slots_R,
    first,
    num_queries,
    num_kv_heads,
    size,
    half,
    qk_blocks,
    qk_stride,
    qk_head_stride,
    v_stride,
    v_head_stride,
    keys_head_stride,
    keys_stride,
    values_head_stride,
    values_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Some heads of one row: queries and keys, or, behind their `qk_blocks`, values. Heads below `first` are left
    alone; of a head the first 2 `half` numbers are rotated, the rest is copied."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_R + row)
    if block < qk_blocks:
        head = first + block * HEADS + tl.arange(0, HEADS)
        source = qk_RJK + row * qk_stride + head[:, None] * qk_head_stride
        query = q_RHK + (row * num_queries + head[:, None]) * size
        key = keys_GNK + slot * keys_stride + (head - num_queries)[:, None].to(tl.int64) * keys_head_stride
        is_query = (head < num_queries)[:, None]
        is_key = ((head >= num_queries) & (head < num_queries + num_kv_heads))[:, None]
        if HALF > 0:
            low = tl.arange(0, HALF)[None, :]
            inside = (is_query | is_key) & (low < half)
            cos = tl.load(cos_R1K + row * 2 * half + low, mask=low < half, other=0.0)
            sin = tl.load(sin_R1K + row * 2 * half + half + low, mask=low < half, other=0.0)
            a = tl.load(source + low, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(source + half + low, mask=inside, other=0.0).to(tl.float32)
            turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
            write(query, key, low, turned_a, is_query & (low < half), is_key & (low < half))
            write(query, key, half + low, turned_b, is_query & (low < half), is_key & (low < half))
        if REST > 0:
            rest = 2 * half + tl.arange(0, REST)[None, :]
            x = tl.load(source + rest, mask=(is_query | is_key) & (rest < size), other=0.0)
            write(query, key, rest, x, is_query & (rest < size), is_key & (rest < size))
    else:
        group = (block - qk_blocks) * HEADS + tl.arange(0, HEADS)[:, None]
        column = tl.arange(0, SIZE)[None, :]
        stored = (group < num_kv_heads) & (column < size)
        v = tl.load(v_RGK + row * v_stride + group * v_head_stride + column, mask=stored, other=0.0)
        value = values_GNK + slot * values_stride + group.to(tl.int64) * values_head_stride
        tl.store(value + column, v.to(values_GNK.dtype.element_ty), mask=stored)


@triton.jit
def write(query, key, column, x, is_query, is_key):
    """Numbers of heads to where queries are collected, or to the cache."""
    tl.store(query + column, x.to(query.dtype.element_ty), mask=is_query)
    tl.store(key + column, x.to(key.dtype.element_ty), mask=is_key)
