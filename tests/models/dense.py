"""A dense causal attention for tests: every row belongs to one sequence, row i sees rows 0..i (within the window)."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.norm_rope import Rotary, rotated
from specdec.protocols import Model


class Dense:
    """Satisfies `protocols.Attend` for one forward over a whole sequence."""

    def __call__(
        self,
        layer: int,
        qk_RJK: Tensor,
        v_RGK: Tensor,
        rotary: Rotary | None,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert softcap is None
        assert sinks is None
        q_RHK, k_RGK = rotated(qk_RJK, v_RGK.shape[1], rotary)
        rows, heads, _ = q_RHK.shape
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k_RGK, v_RGK))
        distance = torch.arange(rows)[:, None] - torch.arange(rows)
        visible = (distance >= 0) & (distance < (window or rows))
        scores = torch.einsum("rhk,shk->hrs", q_RHK, k) * scale
        return torch.einsum("hrs,shk->rhk", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def dense_logits(model: Model, tokens: list[int]) -> Tensor:
    """fp32 logits `[len(tokens), V]` of one sequence."""
    with torch.inference_mode():
        hidden, _ = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), Dense())
        return model.logits(hidden)
