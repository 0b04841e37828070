"""Gated activations in Triton: both halves of a merged linear's output are read where they lie. R rows, F width."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gpu.tuning import Tuning

TUNINGS = (Tuning(block=1024, warps=4), Tuning(block=2048, warps=4), Tuning(block=512, warps=4))


def swiglu(gate_up_R2F: Tensor, tuning: Tuning = TUNINGS[0]) -> Tensor:
    """See `specdec.kernels.activation.swiglu`."""
    out_RF, num_rows, width = empty(gate_up_R2F)
    if out_RF.numel():
        swiglu_kernel[(num_rows, triton.cdiv(width, tuning.block))](
            out_RF, gate_up_R2F, width, gate_up_R2F.stride(0), BLOCK=tuning.block, **tuning.options
        )
    return out_RF


def geglu(gate_up_R2F: Tensor, tuning: Tuning = TUNINGS[0]) -> Tensor:
    """See `specdec.kernels.activation.geglu`."""
    out_RF, num_rows, width = empty(gate_up_R2F)
    if out_RF.numel():
        geglu_kernel[(num_rows, triton.cdiv(width, tuning.block))](
            out_RF, gate_up_R2F, width, gate_up_R2F.stride(0), BLOCK=tuning.block, **tuning.options
        )
    return out_RF


def empty(gate_up_R2F: Tensor) -> tuple[Tensor, int, int]:
    """Memory for what comes out, and its shape."""
    num_rows, width = gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
    return gate_up_R2F.new_empty(num_rows, width), num_rows, width


@triton.jit
def swiglu_kernel(out_RF, gate_up_R2F, width, stride, BLOCK: tl.constexpr):
    """A block of one row: x sigmoid(x), times the other half."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_R2F + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_R2F + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    out = gate * sigmoid(gate) * up
    tl.store(out_RF + row * width + column, out.to(out_RF.dtype.element_ty), mask=inside)


@triton.jit
def geglu_kernel(out_RF, gate_up_R2F, width, stride, BLOCK: tl.constexpr):
    """A block of one row. (1 + tanh(u)) / 2 is sigmoid(2 u), which does not cancel; past 100 it is 0 or 1, and a cube
    could overflow. What is no number stays so, as it is multiplied at last."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_R2F + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_R2F + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    near = tl.minimum(tl.maximum(gate, -100.0), 100.0)
    twice = 1.5957691216057308 * (near + 0.044715 * near * near * near)  # 2 sqrt(2 / pi)
    out = gate * sigmoid(twice) * up
    tl.store(out_RF + row * width + column, out.to(out_RF.dtype.element_ty), mask=inside)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), of exponentials that never overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)
