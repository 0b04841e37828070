"""Keys and values to slots and from slots to slots, in Triton. Nothing is computed: bits are copied.

R rows, G key-value heads, K head size, N slots, C caches, M moves.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WARPS = 4


def write(keys_GNK: Tensor, values_GNK: Tensor, slots_R: Tensor, k_RGK: Tensor, v_RGK: Tensor) -> None:
    """See `specdec.kernels.kv.write`. One launch, one program a row."""
    num_rows, num_groups, head_size = k_RGK.shape
    if k_RGK.stride(2) != 1 or v_RGK.stride(2) != 1:
        raise ValueError(f"heads must lie in one piece, got strides {k_RGK.stride()} and {v_RGK.stride()}")
    if num_rows:
        write_kernel[(num_rows,)](
            *(keys_GNK, values_GNK, slots_R, k_RGK, v_RGK, keys_GNK.stride(0)),
            *(k_RGK.stride(0), k_RGK.stride(1), v_RGK.stride(0), v_RGK.stride(1), num_groups, head_size),
            **sizes(num_groups, head_size),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def move(caches_CGNK: Tensor, sources_M: Tensor, targets_M: Tensor) -> None:
    """See `specdec.kernels.kv.move`. Two launches: all sources to a buffer, then the buffer to all targets."""
    num_caches, num_groups, _, head_size = caches_CGNK.shape
    num_moves = len(sources_M)
    staged_MCGK = caches_CGNK.new_empty(num_moves, num_caches, num_groups, head_size)
    if num_moves:
        for slots_M, back in ((sources_M, False), (targets_M, True)):
            stage_kernel[(num_moves, num_caches)](
                *(caches_CGNK, staged_MCGK, slots_M),
                *(caches_CGNK.stride(0), caches_CGNK.stride(1), num_groups, head_size),
                BACK=back,
                **sizes(num_groups, head_size),
                num_warps=WARPS,
                enable_fp_fusion=False,
            )


def sizes(num_groups: int, head_size: int) -> dict[str, int]:
    """The powers of two that hold all heads of a slot."""
    return {"HEADS": triton.next_power_of_2(num_groups), "SIZE": triton.next_power_of_2(head_size)}


@triton.jit
def write_kernel(
    keys_GNK,
    values_GNK,
    slots_R,
    k_RGK,
    v_RGK,
    cache_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_groups,
    head_size,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One row: its key and its value, all heads."""
    row = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    inside = (head < num_groups) & (dim < head_size)
    there = head.to(tl.int64) * cache_stride + tl.load(slots_R + row) * head_size + dim
    k = tl.load(k_RGK + row * k_row_stride + head * k_head_stride + dim, mask=inside)
    v = tl.load(v_RGK + row * v_row_stride + head * v_head_stride + dim, mask=inside)
    tl.store(keys_GNK + there, k, mask=inside)
    tl.store(values_GNK + there, v, mask=inside)


@triton.jit
def stage_kernel(
    caches_CGNK,
    staged_MCGK,
    slots_M,
    cache_stride,
    group_stride,
    num_groups,
    head_size,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One slot of one cache, all heads: to its place in the buffer, or BACK from it."""
    move, cache = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    inside = (head < num_groups) & (dim < head_size)
    slot = tl.load(slots_M + move) * head_size
    there = caches_CGNK + cache * cache_stride + head.to(tl.int64) * group_stride + slot + dim
    here = staged_MCGK + (move * tl.num_programs(1) + cache) * num_groups * head_size + head * head_size + dim
    if BACK:
        tl.store(there, tl.load(here, mask=inside), mask=inside)
    else:
        tl.store(here, tl.load(there, mask=inside), mask=inside)
