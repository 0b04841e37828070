"""Attention of rows over the paged slots of their sequence, by one visibility formula (docs/design.md, 2).

R rows, N slots, H query heads, G key-value heads, K head size. `paged_attention` is what a layer calls;
`tree_attention`, of one sequence, is the torch reference; `native_tree_attention` is C for a CPU; `gpu/` has Triton.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from specdec.kernels.device import on_gpu
from specdec.kernels.native import library
from specdec.kernels.paged import PagedRows


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
) -> Tensor:
    """`[R, H, K]`: attention of all rows of a batch over the whole cache (N all its slots), each over what it sees.

    Triton on a GPU, on a CPU C where it `serves`, else torch. `window` counts positions; `softcap` c squeezes scores to
    c * tanh(score / c); `sinks` `[H]` add one logit a head to the denominator. What a row does not see, finite or not,
    does not change it; a row that sees a key or value that is not finite gives numbers that are not.
    """
    attend = torch_attention
    if on_gpu(q_RHK):
        from specdec.kernels.gpu import attention

        attend = attention.paged_attention
    elif serves(q_RHK.shape[2], keys_GNK.dtype, q_RHK.device.type):
        attend = native_tree_attention
    return attend(q_RHK, keys_GNK, values_GNK, rows, scale=scale, window=window, softcap=softcap, sinks=sinks)


def torch_attention(
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
    """The reference of `paged_attention`: `tree_attention` of one sequence after the other."""
    assert rows.layout is not None
    parts = []
    for index, stretch in enumerate(rows.layout.stretches):
        slots = rows.slots(index)
        parts.append(
            tree_attention(
                q_RHK[stretch.first_row : stretch.end_row],
                keys_GNK[:, slots],
                values_GNK[:, slots],
                rows.hidden_from(index, window),
                scale=scale,
                softcap=softcap,
                sinks=sinks,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    """`[R, H, K]`: softmax attention of each row over slots of its sequence; see `paged_attention`.

    `hidden_RN` says which slots a row does not see; None: each row sees each slot.
    """
    num_rows, num_heads, head_size = q_RHK.shape
    num_groups, num_slots, _ = k_GNK.shape
    num_shared = num_heads // num_groups
    q_GQK = q_RHK.view(num_rows, num_groups, num_shared, head_size).transpose(0, 1).reshape(num_groups, -1, head_size)
    scores_GQN = torch.baddbmm(q_GQK[:, :, :1], q_GQK, k_GNK.mT, beta=0, alpha=scale)
    scores_GQN.add_(scores_GQN, alpha=0)  # infinity becomes NaN: neither the softcap nor a weight of 0 may hide it
    if softcap is not None:
        scores_GQN = scores_GQN.div_(softcap).tanh_().mul_(softcap)
    if hidden_RN is not None:
        scores_GQN.view(num_groups, num_rows, num_shared, num_slots).masked_fill_(hidden_RN[:, None], -torch.inf)
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
    if hidden_RN is not None and not out_GQK.sum().isfinite():
        # 0 times what is not finite is NaN: such values count for the rows that see them, and for no others.
        fine_GNK = v_GNK.isfinite()
        out_GQK = torch.bmm(weights_GQN, v_GNK.where(fine_GNK, 0))
        bad_GR = ((~fine_GNK.all(-1))[:, None] & ~hidden_RN).any(-1)
        out_GQK.masked_fill_(bad_GR.repeat_interleave(num_shared, 1)[..., None], torch.nan)
    return (
        out_GQK.view(num_groups, num_rows, num_shared, head_size)
        .transpose(0, 1)
        .reshape(num_rows, num_heads, head_size)
    )


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
    """`paged_attention` in fp32 on the CPU.

    A row has the same bits alone and in any company, in a tree or not. `serves` says whether it can be called.
    """
    num_rows, num_heads, head_size = q_RHK.shape
    num_groups, num_slots, _ = keys_GNK.shape
    q_RHK = q_RHK.contiguous()
    out_RHK = torch.empty_like(q_RHK)
    assert rows.layout is not None
    longest = rows.layout.longest
    work = num_rows * num_heads * head_size * longest
    threads = torch.get_num_threads() if work > PARALLEL_FROM else 1
    scratch = (longest + 8) * threads
    slots, weights = torch.empty(scratch, dtype=torch.int64), torch.empty(scratch)
    sinks = None if sinks is None else sinks.float().contiguous()
    _function()(
        *(tensor.data_ptr() for tensor in (q_RHK, keys_GNK, values_GNK, out_RHK)),
        *(tensor.data_ptr() for tensor in (rows.blocks_B, rows.layout.first_blocks_R, rows.prefix_R, rows.ancestors_R)),
        0 if sinks is None else sinks.data_ptr(),
        slots.data_ptr(),
        weights.data_ptr(),
        *(num_rows, num_heads, num_groups, head_size, num_slots * head_size, rows.block_size),
        *(longest, rows.first, window or 0, scale, softcap or 0.0, threads),
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
    pointers, sizes = [ctypes.c_void_p] * 11, [ctypes.c_long] * 9
    found.tree_attention.argtypes = [*pointers, *sizes, ctypes.c_float, ctypes.c_float, ctypes.c_int]
    found.tree_attention.restype = None
    return function
