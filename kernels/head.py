"""The last linear of a model, whose logits are fp32 whatever the weights are. L logits rows, D width, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def wide_logits(head: nn.Module, hidden_LD: Tensor) -> Tensor:
    """fp32 logits `[L, V]` of a linear without a bias, or of what stands for one on a CPU.

    On a GPU the sums of 16-bit products, which are fp32, are never rounded to 16 bits: logits that differ would become
    equal. On a CPU activations are fp32.
    """
    if hidden_LD.is_cuda and hidden_LD.dtype != torch.float32:
        assert getattr(head, "bias", None) is None
        return torch.mm(hidden_LD, head.get_parameter("weight").T, out_dtype=torch.float32)
    logits_LV: Tensor = head(hidden_LD)
    return logits_LV.to(torch.float32)
