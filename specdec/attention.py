"""Paged attention for one step: planned once from the batch, then called by every layer.

R rows, H query heads, G key-value heads, J = H + G, K head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.batch import Batch
from specdec.kernels.norm_rope import Rotary, rotate_and_write
from specdec.kernels.paged import PagedRows
from specdec.kernels.tree_attention import paged_attention
from specdec.kv import KVCache


class PagedAttention:
    """The `Attend` of a step: `plan` it, then hand it to the model.

    No row sees a slot below `first`: a drafter whose rows pair a token with the feature of the one before has none in
    slot 0.
    """

    def __init__(self, cache: KVCache, device: str, first: int = 0) -> None:
        self.cache = cache
        self.device = device
        self.first = first
        self._slots_R = torch.empty(0, dtype=torch.int64)
        self.rows: PagedRows | None = None

    def plan(self, batch: Batch) -> None:
        """Take in where this step's rows lie and what they see. The copies come from memory that is not pinned, so a
        GPU may make them wait: steps that replay graphs `place` theirs."""
        self._slots_R = batch.slots_R.to(self.device)
        self.rows = PagedRows.of(
            batch.tables_S,
            batch.rows_S,
            batch.lengths_S,
            batch.prefix_R,
            batch.ancestors_R,
            self.cache.block_size,
            first=self.first,
            device=self.device,
        )

    def place(self, slots_R: Tensor, rows: PagedRows) -> None:
        """What `plan` finds, as tensors that the caller keeps: those of a captured graph, whose numbers may change
        between its replays."""
        self._slots_R, self.rows = slots_R, rows

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
        """`[R, H, K]`; see `Attend` in `specdec/protocols.py`."""
        assert self.rows is not None, "attention is called before it is planned"
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        q_RHK = rotate_and_write(qk_RJK, v_RGK, rotary, keys, values, self._slots_R)
        return paged_attention(q_RHK, keys, values, self.rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
