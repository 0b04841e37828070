"""The small arrays of a step on their way to a device, and its answer on the way back: one copy each. It knows no
engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes: every array begins where kernels load whole vectors, so none is compiled twice
SMALLEST = 1 << 16


class Staging:
    """Copies arrays to `device` through pinned memory without waiting, and back with one wait.

    Two buffers are written in turn: while a copy from one may be in flight, the next step's arrays go into the other.
    On a CPU nothing is pinned and nothing waits, else all is the same.
    """

    __slots__ = ("_answer", "_device", "_outgoing", "_turn")

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._outgoing = (_Buffer(self._device), _Buffer(self._device))
        self._answer = _Buffer(self._device)
        self._turn = 0

    def move(self, arrays: Mapping[str, NDArray[Any] | Tensor], into: Tensor | None = None) -> dict[str, Tensor]:
        """`arrays` (a CPU's) on the device, by their names. They may be changed once this returns.

        They lie in one new tensor or, where captured graphs know the place, at the beginning of `into` (uint8, aligned
        to 16 bytes), always alike for arrays of the same shapes and types in the same order; what lay there is
        overwritten in the order of the stream. Raises ValueError where `into` is too small.
        """
        sources = {
            name: torch.from_numpy(array) if isinstance(array, np.ndarray) else array for name, array in arrays.items()
        }
        places, size = _places(sources)
        if into is not None and len(into) < size:
            raise ValueError(f"arrays of {size} bytes do not fit into {len(into)}")
        self._turn ^= 1
        buffer = self._outgoing[self._turn]
        pinned = buffer.take(size)
        for name, source in sources.items():
            _view(pinned, places[name], source).copy_(source)
        target = torch.empty(size, dtype=torch.uint8, device=self._device) if into is None else into[:size]
        target.copy_(pinned, non_blocking=True)
        buffer.mark()
        return {name: _view(target, places[name], source) for name, source in sources.items()}

    def fetch(self, answer: Tensor) -> NDArray[Any]:
        """`answer` of the device as an array of the host: waits for all that was asked for before it, once."""
        place = (0, answer.numel() * answer.element_size())
        pinned = _view(self._answer.take(place[1]), place, answer)
        pinned.copy_(answer, non_blocking=True)
        self._answer.mark()
        self._answer.wait()
        array: NDArray[Any] = pinned.numpy().copy()
        return array


class _Buffer:
    """Memory of the host that is written only when no copy from it, or into it, is in flight."""

    __slots__ = ("_bytes", "_event", "_pinned")

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._event: torch.cuda.Event | None = None

    def take(self, size: int) -> Tensor:
        """uint8 `[size]`, to be written now."""
        self.wait()
        if len(self._bytes) < size:
            room = max(SMALLEST, 2 ** math.ceil(math.log2(size)))
            self._bytes = torch.empty(room, dtype=torch.uint8, pin_memory=self._pinned)
        return self._bytes[:size]

    def mark(self) -> None:
        """A copy was begun."""
        if self._pinned:
            self._event = self._event or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Until the last copy is done."""
        if self._event is not None:
            self._event.synchronize()


def room_for(arrays: Mapping[str, Tensor]) -> int:
    """Bytes that `Staging.move` lays `arrays` out in."""
    return _places(arrays)[1]


def laid_out(memory: Tensor, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts of `memory` (uint8) in which `Staging.move` puts arrays of the shapes and types of `arrays`."""
    places, _ = _places(arrays)
    return {name: _view(memory, places[name], array) for name, array in arrays.items()}


def _places(arrays: Mapping[str, Tensor]) -> tuple[dict[str, tuple[int, int]], int]:
    """Where each array begins and ends, and what all take."""
    places: dict[str, tuple[int, int]] = {}
    size = 0
    for name, array in arrays.items():
        places[name] = (size, size + array.numel() * array.element_size())
        size = -(-places[name][1] // ALIGNMENT) * ALIGNMENT
    return places, size


def _view(memory: Tensor, place: tuple[int, int], like: Tensor) -> Tensor:
    """Part of `memory` (uint8) as a tensor of the shape and type of `like`."""
    return memory[place[0] : place[1]].view(like.dtype).view(like.shape)
