"""Paged attention for one step: planned once from the batch, then called by every layer.

R rows, H query heads, G key-value heads, J = H + G, K head size, N slots that a sequence's rows may see.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.batch import Batch
from specdec.kernels.norm_rope import Rotary, rotate_and_write
from specdec.kernels.tree_attention import PagedRows, native_tree_attention, serves, tree_attention, visible
from specdec.kv import KVCache


@dataclass(slots=True)
class _Context:
    """One sequence's part of the plan: its rows, its slots, and what is hidden from each row, by window."""

    rows: slice
    slots: slice | Tensor  # of a run of blocks a view of the cache, of any other table a gather
    num_slots: int
    prefix_R: Tensor
    ancestors_R: Tensor
    first: int
    hidden: dict[int | None, Tensor | None] = field(default_factory=dict)

    def hidden_from_rows(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        if window not in self.hidden:
            seen_RN = visible(self.prefix_R, self.ancestors_R, self.num_slots, first=self.first, window=window)
            hidden_RN = torch.zeros(seen_RN.shape, dtype=dtype, device=seen_RN.device)
            self.hidden[window] = None if bool(seen_RN.all()) else hidden_RN.masked_fill_(~seen_RN, -torch.inf)
        return self.hidden[window]


class PagedAttention:
    """The `Attend` of a step: `plan` it, then hand it to the model. In C where that serves, else in torch.

    No row sees a slot below `first`: a drafter whose rows pair a token with the feature of the one before has none in
    slot 0.
    """

    def __init__(self, cache: KVCache, device: str, first: int = 0) -> None:
        self.cache = cache
        self.device = device
        self.first = first
        self.is_native = all(serves(keys.shape[-1], keys.dtype, device) for keys in cache.keys)
        self._slots_R = torch.empty(0, dtype=torch.int64)
        self._rows: PagedRows | None = None
        self._contexts: list[_Context] = []

    def plan(self, batch: Batch) -> None:
        """Take in where this step's rows lie and what they see."""
        self._slots_R = batch.slots_R.to(self.device)
        self._rows, self._contexts = None, []
        if self.is_native:
            self._rows = self._paged_rows(batch)
        else:
            self._contexts = [self._context(batch, index) for index in range(len(batch.rows_S))]

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
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        q_RHK = rotate_and_write(qk_RJK, v_RGK, rotary, keys, values, self._slots_R)
        if self._rows is not None:
            return native_tree_attention(
                q_RHK, keys, values, self._rows, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
        parts = [
            tree_attention(
                q_RHK[context.rows],
                keys[:, context.slots],
                values[:, context.slots],
                context.hidden_from_rows(window, q_RHK.dtype),
                scale=scale,
                softcap=softcap,
                sinks=sinks,
            )
            for context in self._contexts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _paged_rows(self, batch: Batch) -> PagedRows:
        size, offsets = self.cache.block_size, torch.arange(self.cache.block_size)
        tables, starts, start = [], [], 0
        for index, (first, end) in enumerate(batch.rows_S):
            blocks_B1 = batch.blocks_SB[index, : len(batch.tables_S[index]), None]
            tables.append((blocks_B1 * size + offsets).flatten())
            starts.append(torch.full((end - first,), start))
            start += len(tables[-1])
        return PagedRows(
            torch.cat(tables),
            torch.cat(starts),
            batch.prefix_R.contiguous(),
            batch.ancestors_R.contiguous(),
            max(batch.lengths_S),
            self.first,
        )

    def _context(self, batch: Batch, index: int) -> _Context:
        size = self.cache.block_size
        start, end = batch.rows_S[index]
        table, num_slots = batch.tables_S[index], batch.lengths_S[index]
        slots: slice | Tensor = slice(table[0] * size, table[0] * size + num_slots)
        if table != tuple(range(table[0], table[0] + len(table))):
            blocks_B1 = batch.blocks_SB[index, : len(table), None].to(self.device)
            slots = (blocks_B1 * size + torch.arange(size, device=self.device)).flatten()[:num_slots]
        return _Context(
            slice(start, end),
            slots,
            num_slots,
            batch.prefix_R[start:end].to(self.device),
            batch.ancestors_R[start:end].to(self.device),
            self.first,
        )
