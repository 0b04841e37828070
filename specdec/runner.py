"""Runs batches of a model on one device, with its KV cache. One call a step over the flat rows: the seam where a native
forward or captured graphs go in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.attention import PagedAttention
from specdec.batch import Batch
from specdec.kv import KVCache
from specdec.protocols import Forward, Model
from specdec.staging import Staging


def said(model: Model, batch: Batch, hidden_RD: Tensor, taps_RD: Sequence[Tensor], logit_rows_L: Tensor) -> Forward:
    """What a forward of `batch` says, by its hidden states: the head reads the rows that ask (int64 `[L]`, there)."""
    if batch.num_logits == 0:  # nothing but chunks of prompts: the head has no row to read
        return Forward(torch.empty(0, model.vocab_size), tuple(taps_RD))
    all_ask = batch.num_logits == batch.num_rows
    hidden_LD = hidden_RD if all_ask else hidden_RD.index_select(0, logit_rows_L)
    return Forward(model.logits(hidden_LD), tuple(taps_RD))


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
        self._staging = Staging(device)

    @torch.inference_mode()
    def forward(self, batch: Batch, taps: Sequence[int] = ()) -> Forward:
        """See `Runner` in `specdec/protocols.py`. Logits stay on the device."""
        inputs = self.attention.plan(batch)
        hidden_RD, tapped = self.model.forward(inputs["tokens"], inputs["positions"], self.attention, taps)
        return said(self.model, batch, hidden_RD, tapped, inputs["logit_rows"])

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Runner` in `specdec/protocols.py`."""
        there = self._staging.move({"sources": np.array(sources, np.int64), "targets": np.array(targets, np.int64)})
        self.cache.move(there["sources"], there["targets"])
