"""Gated activations, as functions on what a merged linear puts out: R rows, F of gates and F behind them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.device import on_gpu


def swiglu(gate_up_R2F: Tensor) -> Tensor:
    """`silu(gate) * up` `[R, F]` of both halves side by side (Shazeer, arXiv 2002.05202), computed in fp32, rounded
    once."""
    if on_gpu(gate_up_R2F):
        from specdec.kernels.gpu import activation

        return activation.swiglu(gate_up_R2F)
    if gate_up_R2F.dtype != torch.float32:
        return swiglu(gate_up_R2F.float()).to(gate_up_R2F.dtype)
    gate, up = gate_up_R2F.chunk(2, -1)
    return F.silu(gate) * up


def geglu(gate_up_R2F: Tensor) -> Tensor:
    """`gelu(gate) * up` `[R, F]` of both halves side by side (the same paper), with gelu by its tanh (Hendrycks and
    Gimpel, arXiv 1606.08415), computed in fp32, rounded once."""
    if on_gpu(gate_up_R2F):
        from specdec.kernels.gpu import activation

        return activation.geglu(gate_up_R2F)
    if gate_up_R2F.dtype != torch.float32:
        return geglu(gate_up_R2F.float()).to(gate_up_R2F.dtype)
    gate, up = gate_up_R2F.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up
