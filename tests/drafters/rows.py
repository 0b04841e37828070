"""Attention for heads in tests: the rows of several forwards, each seeing what it is told to."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.norm_rope import Rotary, rotated


class Rows:
    """Satisfies `protocols.Attend`. Keeps what earlier forwards wrote; `seen_RN` says for each row of the next forward
    which of all N rows so far, its own forward's last, it attends to."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.seen_RN = torch.empty(0)

    def see(self, seen_RN: Tensor) -> Rows:
        self.seen_RN = seen_RN
        return self

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
        keys = self.keys[layer] = torch.cat((self.keys.get(layer, k_RGK[:0]), k_RGK))
        values = self.values[layer] = torch.cat((self.values.get(layer, v_RGK[:0]), v_RGK))
        rows, heads, _ = q_RHK.shape
        assert self.seen_RN.shape == (rows, len(keys))
        seen_RN = self.seen_RN
        if window is not None:  # only where the rows are one causal run
            assert len(keys) == rows
            distance = torch.arange(rows)[:, None] - torch.arange(rows)
            seen_RN = seen_RN & (distance < window)
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (keys, values))
        scores = torch.einsum("rhk,nhk->hrn", q_RHK, k) * scale
        return torch.einsum("hrn,nhk->rhk", scores.masked_fill(~seen_RN, -torch.inf).softmax(-1), v)


def causal(rows: int) -> Tensor:
    """Each row sees those before it and itself, `[R, R]`."""
    return torch.ones(rows, rows, dtype=torch.bool).tril()
