"""Keys and values of all sequences, one pair of tensors a layer, in the blocks that the pool hands out.

G key-value heads, K head size. Knows no sequence: slots are integers from 0, block b holds slots b * block_size and up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.protocols import LayerShape


class KVCache:
    """`keys[layer]` and `values[layer]` are `[G, num_blocks * block_size, K]`: a head's slots lie side by side."""

    def __init__(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, *, device: str, dtype: torch.dtype
    ) -> None:
        self.block_size = block_size
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in layers:
            shape = (layer.num_kv_heads, num_blocks * block_size, layer.head_size)
            self.keys.append(torch.zeros(shape, device=device, dtype=dtype))
            self.values.append(torch.zeros(shape, device=device, dtype=dtype))

    def write(self, layer: int, slots_R: Tensor, k_RGK: Tensor, v_RGK: Tensor) -> None:
        """Store a row's key and value in its slot."""
        self.keys[layer].index_copy_(1, slots_R, k_RGK.transpose(0, 1))
        self.values[layer].index_copy_(1, slots_R, v_RGK.transpose(0, 1))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots to slots in every layer; every source is read before any target is written."""
        for cache in (*self.keys, *self.values):
            cache.index_copy_(1, targets, cache.index_select(1, sources))
