"""Attention of rows over the paged slots of their sequence, by one visibility formula (docs/design.md, 2).

R rows of one sequence, N slots of its block table in order, H query heads, G key-value heads, K head size. Row r sees
slot j < prefix, and slot prefix + i for each set bit i of its ancestors, within the window. `tree_attention` is the
torch reference; `native_tree_attention` is the same for all rows of a batch at once, in C for a CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from specdec.kernels.native import library


def visible(
    prefix_R: Tensor, ancestors_R: Tensor, num_slots: int, *, first: int = 0, window: int | None = None
) -> Tensor:
    """Booleans `[R, N]`: which of a sequence's first `num_slots` slots each row sees.

    `prefix_R` and `ancestors_R` are int64. Bit i of `ancestors` stands for slot prefix + i at position
    prefix + (number of set bits below i); a window w, in positions, leaves those above the row's own position - w.
    """
    slot_N = torch.arange(num_slots, device=prefix_R.device)
    offset_RN = slot_N - prefix_R[:, None]
    bit_RN = (ancestors_R[:, None] >> offset_RN.clamp(0, 62)) & 1
    in_tree_RN = (offset_RN >= 0) & (offset_RN <= 62) & bit_RN.bool()
    seen_RN = ((offset_RN < 0) & (slot_N >= first)) | in_tree_RN
    if window is None:
        return seen_RN
    bits_R63 = (ancestors_R[:, None] >> torch.arange(63, device=prefix_R.device)) & 1
    depth_R63 = bits_R63.cumsum(1) - bits_R63
    position_R = prefix_R + bits_R63.sum(1) - 1
    depth_RN = depth_R63.gather(1, offset_RN.clamp(0, 62))
    position_RN = torch.where(offset_RN < 0, slot_N, prefix_R[:, None] + depth_RN)
    return seen_RN & (position_RN > position_R[:, None] - window)


def tree_attention(
    q_RHK: Tensor,
    k_GNK: Tensor,
    v_GNK: Tensor,
    hidden_RN: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`[R, H, K]`: softmax attention of each row over slots of its sequence.

    `hidden_RN` is 0 where a row sees a slot and -inf where not, in q's dtype; None: each row sees each slot. `softcap`
    c squeezes scores to c * tanh(score / c); `sinks` `[H]` add one logit a head to the denominator.
    """
    num_rows, num_heads, head_size = q_RHK.shape
    num_groups, num_slots, _ = k_GNK.shape
    num_shared = num_heads // num_groups
    q_GQK = q_RHK.view(num_rows, num_groups, num_shared, head_size).transpose(0, 1).reshape(num_groups, -1, head_size)
    scores_GQN = torch.baddbmm(q_GQK[:, :, :1], q_GQK, k_GNK.mT, beta=0, alpha=scale)
    if softcap is not None:
        scores_GQN = scores_GQN.div_(softcap).tanh_().mul_(softcap)
    if hidden_RN is not None:
        scores_GQN.view(num_groups, num_rows, num_shared, num_slots).add_(hidden_RN[:, None])
    if sinks is None:
        weights_GQN = torch.softmax(scores_GQN, -1)
    else:
        sink_GQ1 = (
            sinks.to(scores_GQN.dtype)
            .view(num_groups, 1, num_shared)
            .expand(-1, num_rows, -1)
            .reshape(num_groups, -1, 1)
        )
        weights_GQN = torch.softmax(torch.cat([scores_GQN, sink_GQ1], -1), -1)[..., :-1]
    out_GQK = torch.bmm(weights_GQN, v_GNK)
    return (
        out_GQK.view(num_groups, num_rows, num_shared, head_size)
        .transpose(0, 1)
        .reshape(num_rows, num_heads, head_size)
    )


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where the rows of a batch look: `tables` are the slots of all sequences end to end, row r's sequence begins at
    `starts_R[r]`; all int64 on the CPU. No row sees more than `longest` slots, nor one below `first`."""

    tables: Tensor
    starts_R: Tensor
    prefix_R: Tensor
    ancestors_R: Tensor
    longest: int
    first: int = 0


PARALLEL_FROM = 400_000  # multiplications; below, a second thread costs more than it brings


def native_tree_attention(
    q_RHK: Tensor,
    keys_GNK: Tensor,
    values_GNK: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`[R, H, K]`, fp32 on the CPU: attention of all rows of a batch over the whole cache (N all its slots).

    A row has the same bits alone and in any company, in a tree or not. `serves` says whether it can be called.
    """
    num_rows, num_heads, head_size = q_RHK.shape
    num_groups, num_slots, _ = keys_GNK.shape
    q_RHK = q_RHK.contiguous()
    out_RHK = torch.empty_like(q_RHK)
    work = num_rows * num_heads * head_size * rows.longest
    threads = torch.get_num_threads() if work > PARALLEL_FROM else 1
    scratch = (rows.longest + 8) * threads
    slots, weights = torch.empty(scratch, dtype=torch.int64), torch.empty(scratch)
    sinks = None if sinks is None else sinks.float().contiguous()
    _function()(
        *(tensor.data_ptr() for tensor in (q_RHK, keys_GNK, values_GNK, out_RHK)),
        *(tensor.data_ptr() for tensor in (rows.tables, rows.starts_R, rows.prefix_R, rows.ancestors_R)),
        0 if sinks is None else sinks.data_ptr(),
        slots.data_ptr(),
        weights.data_ptr(),
        *(num_rows, num_heads, num_groups, head_size, num_slots * head_size, rows.longest),
        *(rows.first, window or 0, scale, softcap or 0.0, threads),
    )
    return out_RHK


def serves(head_size: int, dtype: torch.dtype, device: str) -> bool:
    """Whether `native_tree_attention` can do such layers here: fp32 on a CPU, head sizes that are multiples of 8 up to
    512, and a library that could be compiled."""
    fits = dtype is torch.float32 and device == "cpu" and head_size % 8 == 0 and head_size <= 512
    return fits and library("tree_attention") is not None


@cache
def _function() -> Callable[..., None]:
    found = library("tree_attention")
    assert found is not None
    function: Callable[..., None] = found.tree_attention
    pointers, sizes = [ctypes.c_void_p] * 11, [ctypes.c_long] * 8
    found.tree_attention.argtypes = [*pointers, *sizes, ctypes.c_float, ctypes.c_float, ctypes.c_int]
    found.tree_attention.restype = None
    return function
