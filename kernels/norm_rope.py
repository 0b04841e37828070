"""Root-mean-square norm and rotary positions, as functions on tensors. They know no model.

R rows, D width, H heads, K head size, F = K / 2 frequencies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_RD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in fp32, in x's dtype
    (Zhang and Sennrich, arXiv 1910.07467). `weight_D` is fp32."""
    if x_RD.dtype is torch.float32:
        return F.rms_norm(x_RD, weight_D.shape, weight_D, eps)
    return F.rms_norm(x_RD.float(), weight_D.shape, weight_D, eps).to(x_RD.dtype)


def rotary_table(positions_R: Tensor, frequencies_F: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[R, 1, K]` for `rotate`, computed in fp32. The sines of the first half are negated, so that
    `rotate` needs no negation."""
    angles_RF = positions_R[:, None] * frequencies_F
    cos_RF, sin_RF = angles_RF.cos(), angles_RF.sin()
    cos_R1K = torch.cat((cos_RF, cos_RF), -1)[:, None]
    sin_R1K = torch.cat((-sin_RF, sin_RF), -1)[:, None]
    return cos_R1K.to(dtype), sin_R1K.to(dtype)


def rotate(x_RHK: Tensor, cos_R1K: Tensor, sin_R1K: Tensor) -> Tensor:
    """Rotate dimension i of the first half with dimension i of the second by the row's angle
    (Su et al., arXiv 2104.09864, in the half-split layout)."""
    return torch.addcmul(x_RHK * cos_R1K, x_RHK.roll(x_RHK.shape[-1] // 2, -1), sin_R1K)
