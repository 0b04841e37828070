"""Decoder layers written down once more, densely, in fp64, from the formulas: what heads are checked against.

Shares no code with the package. A layer's state is the list of its rows so far, so that a row may see any of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

EPSILON, THETA = 1e-6, 1e4


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """Divide by the root of the mean square, times `weight`."""
    return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


def turned(x: Tensor, position: int, share: float = 1.0) -> Tensor:
    """Rotary position: the first `share` of the head's numbers, as complex numbers (x_i, x_{i + half}), each turned by
    position * theta^(-2i / size)."""
    size = round(x.shape[-1] * share)
    half = size // 2
    angle = position * THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half], x[..., half:size]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag, x[..., size:]), -1)


@dataclass(slots=True)
class ReferenceLayer:
    """One attention with SwiGLU. `weights` by names behind `prefix`; biases, norms of queries and keys where there are
    any. `offset` is what norms add to their weights."""

    weights: Mapping[str, Tensor]
    prefix: str
    heads: int
    kv_heads: int
    offset: float = 0.0
    gated: bool = False
    share: float = 1.0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def linear(self, name: str, x: Tensor) -> Tensor:
        out = self.weights[f"{self.prefix}{name}.weight"].double() @ x
        bias = self.weights.get(f"{self.prefix}{name}.bias")
        return out if bias is None else out + bias.double()

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Nothing where there is no such norm."""
        weight = self.weights.get(f"{self.prefix}{name}.weight")
        return x if weight is None else rms(x, weight.double() + self.offset)

    def row(self, x: Tensor, position: int, seen: Sequence[int], residual: Tensor) -> Tensor:
        """One row: `x` enters the attention, which sees the rows `seen` and itself, and is added to `residual`."""
        gate = None
        q = self.linear("self_attn.q_proj", x).reshape(self.heads, -1)
        if self.gated:
            q, gate = q.chunk(2, -1)
        k = self.linear("self_attn.k_proj", x).reshape(self.kv_heads, -1)
        v = self.linear("self_attn.v_proj", x).reshape(self.kv_heads, -1)
        q, k = self.norm("self_attn.q_norm", q), self.norm("self_attn.k_norm", k)
        q, k = turned(q, position, self.share), turned(k, position, self.share)
        self.keys.append(k)
        self.values.append(v)
        rows = [*seen, len(self.keys) - 1]
        mixed = []
        for head in range(self.heads):
            group = head * self.kv_heads // self.heads
            scores = torch.stack([q[head] @ self.keys[row][group] for row in rows]) / math.sqrt(q.shape[1])
            weights = scores.exp() / scores.exp().sum()
            mixed.append(sum(w * self.values[row][group] for w, row in zip(weights, rows, strict=True)))
        together = torch.stack([torch.as_tensor(part) for part in mixed])
        if gate is not None:
            together = together * torch.sigmoid(gate)
        y = residual + self.linear("self_attn.o_proj", together.flatten())
        inner = self.norm("post_attention_layernorm", y)
        gate_up = self.linear("mlp.gate_proj", inner)
        swish = gate_up / (1 + (-gate_up).exp()) * self.linear("mlp.up_proj", inner)
        return y + self.linear("mlp.down_proj", swish)
