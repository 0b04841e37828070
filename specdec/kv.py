"""Keys and values of all sequences, one pair of tensors a layer, in the blocks that the pool hands out.

G key-value heads, K head size, N slots, C caches. Knows no sequence: slots are integers from 0, block b holds slots
b * block_size and up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels import kv
from specdec.protocols import LayerShape


class InBlocks(Protocol):
    """What lies in the blocks of a `Pool`."""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        ...

    def resize(self, num_blocks: int) -> None:
        """Make room for so many blocks; what lay there is lost."""
        ...


class Captured(Protocol):
    """Forwards over the blocks of a `Pool` that are captured as graphs, which know where the blocks lie."""

    def capture(self) -> None:
        """Make all graphs. Raises torch.OutOfMemoryError where there is too little memory."""
        ...

    def release(self) -> None:
        """Let go of them."""
        ...


class Pool:
    """Which blocks there are, of a target and of drafters that share its block tables, where what lies in them lives,
    and what is captured over them. It can be made larger before it is used: how much fits is known once all is loaded.
    Graphs are for batches whose block tables hold up to `captured_blocks` blocks together; 0: there is none."""

    def __init__(
        self, num_blocks: int, block_size: int, device: str, dtype: torch.dtype, *, captured_blocks: int = 0
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.device, self.dtype = device, dtype
        self.captured_blocks = captured_blocks
        self._owned: list[InBlocks] = []
        self._captured: list[Captured] = []

    @property
    def num_bytes(self) -> int:
        """Of all that is owned."""
        return sum(owned.num_bytes for owned in self._owned)

    def own(self, inside: InBlocks) -> None:
        """Something that lies in the blocks."""
        self._owned.append(inside)

    def serve(self, forwards: Captured) -> None:
        """Forwards that are to be captured."""
        self._captured.append(forwards)

    def capture(self) -> None:
        """Capture all forwards, so that none is while a request waits."""
        for forwards in self._captured:
            forwards.capture()

    def release(self) -> None:
        """Let go of all that was captured."""
        for forwards in self._captured:
            forwards.release()

    def resize(self, num_blocks: int) -> None:
        """Make all that is owned as large; what it held is lost, as is what was captured."""
        self.release()
        self.num_blocks = num_blocks
        for inside in self._owned:
            inside.resize(num_blocks)


class KVCache:
    """`keys[layer]` and `values[layer]` are `[G, num_blocks * block_size, K]`: a head's slots lie side by side. All
    layers of one shape share one tensor, `[C, G, N, K]`, in `stacks`."""

    def __init__(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, *, device: str, dtype: torch.dtype
    ) -> None:
        self.block_size = block_size
        self._layers, self._device, self._dtype = tuple(layers), device, dtype
        self.stacks: tuple[Tensor, ...] = ()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.resize(num_blocks)

    @property
    def num_bytes(self) -> int:
        """Of all layers."""
        return sum(stack.nbytes for stack in self.stacks)

    def resize(self, num_blocks: int) -> None:
        """See `InBlocks.resize`."""
        self.stacks, self.keys, self.values = (), [], []  # or there were two of them for a while
        num_slots = num_blocks * self.block_size
        stacks = {
            layer: torch.zeros(
                (2 * count, layer.num_kv_heads, num_slots, layer.head_size), device=self._device, dtype=self._dtype
            )
            for layer, count in Counter(self._layers).items()
        }
        self.stacks = tuple(stacks.values())
        parts = {layer: iter(stack) for layer, stack in stacks.items()}
        for layer in self._layers:
            self.keys.append(next(parts[layer]))
            self.values.append(next(parts[layer]))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots to slots in every layer; every source is read before any target is written."""
        for stack_CGNK in self.stacks:
            kv.move(stack_CGNK, sources, targets)
