"""The pieces that the model files share: a norm, and the frequencies of rotary positions. They know no model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from specdec.kernels.norm_rope import add_normed_rms_norm, add_rms_norm, rms_norm
from specdec.models.config import Rope


class Norm(nn.Module):
    """RMSNorm; its weight is always fp32. `offset` is what the weight on disk lacks: the loader adds it once. With
    `heads`, each of so many side by side has a weight, which the loader repeats from one of each part."""

    eps: Tensor

    def __init__(self, size: int, eps: float, offset: float = 0.0, heads: int | None = None) -> None:
        super().__init__()
        shape = (size,) if heads is None else (heads, size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
        self.register_buffer("eps", torch.tensor(eps, device="cpu"), persistent=False)
        self.offset, self.repeats = offset, heads is not None

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def of_sum(self, x_RD: Tensor, delta_RD: Tensor) -> tuple[Tensor, Tensor]:
        """`x + delta`, and the norm of it."""
        return add_rms_norm(x_RD, delta_RD, self.weight, self.eps)

    def of_normed_sum(self, x_RD: Tensor, delta_RD: Tensor, inner: Norm) -> tuple[Tensor, Tensor]:
        """`x + inner(delta)`, and the norm of it."""
        return add_normed_rms_norm(x_RD, delta_RD, inner.weight, inner.eps, self.weight, self.eps)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle per position, fp32 `[head_dim / 2]` on the CPU. "llama3" and "yarn" keep high frequencies, divide low ones
    by `factor`, and blend in between: by wavelength (Llama 3.1 model card, `apply_scaling`), or by index, between those
    that turn `beta_fast` and `beta_slow` times over the original length (Peng et al., arXiv 2309.00071, 3.2)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "divisors":
        return plain / torch.tensor(rope.divisors, device="cpu")
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / plain
        low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
        share = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        return (1 - share) * plain / rope.factor + share * plain
    if rope.kind == "yarn":
        low, high = (
            head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
            for turns in (rope.beta_fast, rope.beta_slow)
        )
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        index = torch.arange(len(plain), device="cpu")
        share = 1 - ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        return (1 - share) * plain / rope.factor + share * plain
    return plain
