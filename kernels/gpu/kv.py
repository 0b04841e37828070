"""Keys and values from slots to slots, in Triton. Nothing is computed: bits are copied.

G key-value heads, K head size, N slots, C caches, M moves.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WARPS = 4


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
