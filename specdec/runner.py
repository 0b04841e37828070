"""Runs batches of a model on one device, with its KV cache. One call a step over the flat rows: the seam where a native
forward or captured graphs go in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.attention import PagedAttention
from specdec.batch import Batch
from specdec.kv import KVCache
from specdec.protocols import Forward, Model


class TorchRunner:
    """The plain torch runner, on the CPU or on a CUDA device."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.device = device
        self.cache = KVCache(model.layers, num_blocks, block_size, device=device, dtype=dtype)
        self.attention = PagedAttention(self.cache, device)

    @torch.inference_mode()
    def forward(self, batch: Batch, taps: Sequence[int] = ()) -> Forward:
        """See `Runner` in `specdec/protocols.py`. Logits stay on the device."""
        self.attention.plan(batch)
        hidden_RD, tapped = self.model.forward(
            batch.tokens_R.to(self.device), batch.positions_R.to(self.device), self.attention, taps
        )
        if batch.num_logits == 0:  # nothing but chunks of prompts: the head has no row to read
            return Forward(torch.empty(0, self.vocab_size), tuple(tapped))
        rows_L = batch.logit_rows_L.to(self.device)
        hidden_LD = hidden_RD if batch.num_logits == batch.num_rows else hidden_RD.index_select(0, rows_L)
        return Forward(self.model.logits(hidden_LD), tuple(tapped))

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Runner` in `specdec/protocols.py`."""
        self.cache.move(torch.tensor(sources, device=self.device), torch.tensor(targets, device=self.device))
