"""Root-mean-square norms in Triton, with what is added to the residual stream first: one launch, each row read once (of
more than `WIDEST` numbers twice, in a launch of its own).

R rows, J heads of a row, D width. A program has whole rows, so a row has the same bits in any company.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gpu.tuning import Tuning

TUNINGS = (Tuning(block=1024, warps=4), Tuning(block=2048, warps=8))
MOST_WARPS = 16  # a program's on AMD
WIDEST = 16384  # what the registers of a program hold
WIDE = Tuning(block=4096, warps=16)


def cut(width: int, tuning: Tuning) -> tuple[int, int, dict[str, int | bool]]:
    """Rows of a program, its width and its compiler options: `tuning.block` numbers, or one row; more warps where a
    lane would have more than 32 numbers."""
    whole = triton.next_power_of_2(width)
    warps = max(tuning.warps, min(MOST_WARPS, whole // 1024))
    return max(1, tuning.block // whole), whole, {**tuning.options, "num_warps": warps}


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor, tuning: Tuning = TUNINGS[0]) -> Tensor:
    """See `specdec.kernels.norm_rope.rms_norm`. Rows that are not contiguous themselves are copied first."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x_RJD = x.flatten(0, -3) if x.ndim > 2 else torch.atleast_2d(x)[:, None]
    num_rows, num_heads, width = x_RJD.shape
    strides = x_RJD.stride(0), x_RJD.stride(1), weight.stride(0) if weight.ndim > 1 else 0
    if width > WIDEST and out.numel():
        wide_norm_kernel[(num_rows * num_heads,)](
            *(out, x_RJD, weight, eps, num_heads, width, *strides), WIDTH=WIDE.block, **WIDE.options
        )
    elif out.numel():
        rows, whole, options = cut(width, tuning)
        norm_kernel[(triton.cdiv(num_rows * num_heads, rows),)](
            *(out, x_RJD, weight, eps, num_rows * num_heads, num_heads, width),
            *strides,
            ROWS=rows,
            WIDTH=whole,
            **options,
        )
    return out


def add_rms_norm(
    x_RD: Tensor, delta_RD: Tensor, weight_D: Tensor, eps: Tensor, tuning: Tuning = TUNINGS[0]
) -> tuple[Tensor, Tensor]:
    """See `specdec.kernels.norm_rope.add_rms_norm`."""
    num_rows, width = x_RD.shape
    if width > WIDEST:
        total_RD = x_RD + delta_RD
        return total_RD, rms_norm(total_RD, weight_D, eps)
    total_RD, normed_RD = (torch.empty(x_RD.shape, dtype=x_RD.dtype, device=x_RD.device) for _ in range(2))
    if x_RD.numel():
        rows, whole, options = cut(width, tuning)
        add_norm_kernel[(triton.cdiv(num_rows, rows),)](
            *(total_RD, normed_RD, x_RD, delta_RD, weight_D, eps),
            *(num_rows, width, x_RD.stride(0), delta_RD.stride(0)),
            ROWS=rows,
            WIDTH=whole,
            **options,
        )
    return total_RD, normed_RD


def add_normed_rms_norm(
    x_RD: Tensor,
    delta_RD: Tensor,
    delta_weight_D: Tensor,
    delta_eps: Tensor,
    weight_D: Tensor,
    eps: Tensor,
    tuning: Tuning = TUNINGS[0],
) -> tuple[Tensor, Tensor]:
    """See `specdec.kernels.norm_rope.add_normed_rms_norm`."""
    num_rows, width = x_RD.shape
    if width > WIDEST:
        return add_rms_norm(x_RD, rms_norm(delta_RD, delta_weight_D, delta_eps), weight_D, eps)
    total_RD, normed_RD = (torch.empty(x_RD.shape, dtype=x_RD.dtype, device=x_RD.device) for _ in range(2))
    if x_RD.numel():
        rows, whole, options = cut(width, tuning)
        add_normed_norm_kernel[(triton.cdiv(num_rows, rows),)](
            *(total_RD, normed_RD, x_RD, delta_RD, delta_weight_D, delta_eps, weight_D, eps),
            *(num_rows, width, x_RD.stride(0), delta_RD.stride(0)),
            ROWS=rows,
            WIDTH=whole,
            **options,
        )
    return total_RD, normed_RD


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    out,
    x_RJD,
    weight,
    eps,
    num_rows,
    num_heads,
    width,
    x_stride,
    head_stride,
    weight_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Some rows of some heads; the weight of a row is that of its head, `weight_stride` apart."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    head = row % num_heads
    place = (row // num_heads).to(tl.int64) * x_stride + head * head_stride
    x = tl.load(x_RJD + place[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(weight + (head * weight_stride)[:, None] + column[None, :], mask=inside, other=0.0)
    store(out, row, column, inside, width, normed(x, scales, width, tl.load(eps)))


@triton.jit(do_not_specialize=["num_rows"])
def add_norm_kernel(
    total_RD,
    normed_RD,
    x_RD,
    delta_RD,
    weight_D,
    eps,
    num_rows,
    width,
    x_stride,
    delta_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The sum of two streams, rounded as it is stored, and its norm."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    x = load(x_RD, row, column, inside, x_stride)
    total = (x + load(delta_RD, row, column, inside, delta_stride)).to(total_RD.dtype.element_ty)
    store(total_RD, row, column, inside, width, total)
    scales = load(weight_D, row, column, inside, 0)
    store(normed_RD, row, column, inside, width, normed(total.to(tl.float32), scales, width, tl.load(eps)))


@triton.jit(do_not_specialize=["num_rows"])
def add_normed_norm_kernel(
    total_RD,
    normed_RD,
    x_RD,
    delta_RD,
    delta_weight_D,
    delta_eps,
    weight_D,
    eps,
    num_rows,
    width,
    x_stride,
    delta_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The sum of a stream and the norm of another, each rounded as if it was stored, and the norm of the sum."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    scales = load(delta_weight_D, row, column, inside, 0)
    delta = normed(load(delta_RD, row, column, inside, delta_stride), scales, width, tl.load(delta_eps))
    delta = delta.to(total_RD.dtype.element_ty).to(tl.float32)
    total = (load(x_RD, row, column, inside, x_stride) + delta).to(total_RD.dtype.element_ty)
    store(total_RD, row, column, inside, width, total)
    scales = load(weight_D, row, column, inside, 0)
    store(normed_RD, row, column, inside, width, normed(total.to(tl.float32), scales, width, tl.load(eps)))


@triton.jit
def wide_norm_kernel(
    out, x_RJD, weight, eps, num_heads, width, x_stride, head_stride, weight_stride, WIDTH: tl.constexpr
):
    """One row, a part at a time: its mean square first."""
    row = tl.program_id(0).to(tl.int64)
    head = row % num_heads
    x_D = x_RJD + (row // num_heads) * x_stride + head * head_stride
    squares = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, width, WIDTH):
        column = first + tl.arange(0, WIDTH)
        x = tl.load(x_D + column, mask=column < width, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, 0) / width + tl.load(eps)))
    for first in range(0, width, WIDTH):
        column = first + tl.arange(0, WIDTH)
        x = tl.load(x_D + column, mask=column < width, other=0.0).to(tl.float32)
        y = x * scale * tl.load(weight + head * weight_stride + column, mask=column < width, other=0.0)
        tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def normed(x, scales, width, eps):
    """fp32 rows, zero past `width`, over the root of their mean square, times `scales`."""
    mean = tl.sum(x * x, 1) / width
    return x * tl.div_rn(1.0 + tl.zeros_like(mean), tl.sqrt_rn(mean + eps))[:, None] * scales


@triton.jit
def load(x_RD, row, column, inside, stride):
    """Rows `stride` apart, as fp32."""
    return tl.load(x_RD + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store(out_RD, row, column, inside, width, x):
    """Rows side by side, rounded to what `out_RD` holds."""
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out_RD + place, x.to(out_RD.dtype.element_ty), mask=inside)
