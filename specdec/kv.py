"""Keys and values of all sequences, one pair of tensors a layer, in the blocks that the pool hands out.

G key-value heads, K head size, N slots, C caches. Knows no sequence: slots are integers from 0, block b holds slots
b * block_size and up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels import kv
from specdec.protocols import LayerShape


class KVCache:
    """`keys[layer]` and `values[layer]` are `[G, num_blocks * block_size, K]`: a head's slots lie side by side. All
    layers of one shape share one tensor, `[C, G, N, K]`, in `stacks`."""

    def __init__(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, *, device: str, dtype: torch.dtype
    ) -> None:
        self.block_size = block_size
        stacks = {
            layer: torch.zeros(
                (2 * count, layer.num_kv_heads, num_blocks * block_size, layer.head_size), device=device, dtype=dtype
            )
            for layer, count in Counter(layers).items()
        }
        self.stacks: tuple[Tensor, ...] = tuple(stacks.values())
        parts = {layer: iter(stack) for layer, stack in stacks.items()}
        pairs = [(next(parts[layer]), next(parts[layer])) for layer in layers]
        self.keys: list[Tensor] = [keys for keys, _ in pairs]
        self.values: list[Tensor] = [values for _, values in pairs]

    def write(self, layer: int, slots_R: Tensor, k_RGK: Tensor, v_RGK: Tensor) -> None:
        """Store a row's key and value in its slot."""
        kv.write(self.keys[layer], self.values[layer], slots_R, k_RGK, v_RGK)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots to slots in every layer; every source is read before any target is written."""
        for stack_CGNK in self.stacks:
            kv.move(stack_CGNK, sources, targets)
