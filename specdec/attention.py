"""Paged attention for one step: planned once from the batch, then called by every layer.

R rows, H query heads, G key-value heads, K head size, N slots that a sequence's rows may see.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.batch import Batch
from specdec.kernels.tree_attention import tree_attention, visible
from specdec.kv import KVCache


@dataclass(slots=True)
class _Context:
    """One sequence's part of the plan: its rows, its blocks, and what each row sees, by window."""

    rows: slice
    blocks: slice | Tensor  # a run of blocks is a view of the cache, any other table a gather
    num_slots: int
    prefix_R: Tensor
    ancestors_R: Tensor
    seen: dict[int | None, Tensor | None] = field(default_factory=dict)

    def seen_by_row(self, window: int | None) -> Tensor | None:
        if window not in self.seen:
            seen_RN = visible(self.prefix_R, self.ancestors_R, self.num_slots, window=window)
            self.seen[window] = None if bool(seen_RN.all()) else seen_RN
        return self.seen[window]


class PagedAttention:
    """The `Attend` of a step: `plan` it, then hand it to the model."""

    def __init__(self, cache: KVCache, device: str) -> None:
        self.cache = cache
        self.device = device
        self._slots_R = torch.empty(0, dtype=torch.int64)
        self._contexts: list[_Context] = []

    def plan(self, batch: Batch) -> None:
        """Take in where this step's rows lie and what they see."""
        self._slots_R = batch.slots_R.to(self.device)
        self._contexts = []
        for index, (start, end) in enumerate(batch.rows_S):
            table = batch.tables_S[index]
            run = slice(table[0], table[-1] + 1)
            is_run = table == tuple(range(run.start, run.stop))
            self._contexts.append(
                _Context(
                    slice(start, end),
                    run if is_run else batch.blocks_SB[index, : len(table)].to(self.device),
                    batch.lengths_S[index],
                    batch.prefix_R[start:end].to(self.device),
                    batch.ancestors_R[start:end].to(self.device),
                )
            )

    def __call__(
        self,
        layer: int,
        q_RHK: Tensor,
        k_RGK: Tensor,
        v_RGK: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`[R, H, K]`; see `Attend` in `specdec/protocols.py`."""
        self.cache.write(layer, self._slots_R, k_RGK, v_RGK)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        parts = [
            tree_attention(
                q_RHK[context.rows],
                keys[context.blocks].flatten(0, 1)[: context.num_slots],
                values[context.blocks].flatten(0, 1)[: context.num_slots],
                context.seen_by_row(window),
                scale=scale,
                softcap=softcap,
                sinks=sinks,
            )
            for context in self._contexts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
