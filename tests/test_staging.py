"""Arrays on their way to a device and back: every type, every shape, aligned, and never overwritten on the way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specdec.staging import ALIGNMENT, SMALLEST, Staging


def arrays(seed: int, longest: int = 9) -> dict[str, NDArray[Any]]:
    """One of each type, of odd lengths, one of them empty."""
    rng = np.random.default_rng(seed)
    return {
        "flags": rng.random(longest) < 0.5,
        "nothing": np.empty((0, 3), np.float32),
        "small": rng.integers(0, 9, 5).astype(np.int32),
        "wide": rng.normal(size=(longest, 7)),
        "large": rng.integers(-(2**62), 2**62, 3),
        "real": rng.normal(size=(1, 1)).astype(np.float32),
    }


def test_arrays_and_tensors_arrive_with_their_types_shapes_and_names_each_aligned() -> None:
    told = arrays(0)
    found = Staging("cpu").move({**told, "tensor": torch.arange(6).view(2, 3).T})
    assert list(found) == [*told, "tensor"]
    assert torch.equal(found["tensor"], torch.tensor([[0, 3], [1, 4], [2, 5]]))
    for name, array in told.items():
        assert torch.equal(found[name], torch.from_numpy(array))
        assert found[name].dtype == torch.from_numpy(array).dtype
        assert found[name].storage_offset() * found[name].element_size() % ALIGNMENT == 0


def test_what_arrived_stays_whatever_is_sent_later_and_whatever_becomes_of_the_source() -> None:
    staging = Staging("cpu")
    sent = [arrays(seed, longest=9 + SMALLEST * (seed == 3)) for seed in range(6)]  # one outgrows the buffer
    found = []
    for told in sent:
        copies = {name: array.copy() for name, array in told.items()}
        found.append(staging.move(copies))
        for array in copies.values():
            array[...] = 0
    for told, got in zip(sent, found, strict=True):
        assert all(torch.equal(got[name], torch.from_numpy(array)) for name, array in told.items())


def test_arrays_alike_come_to_lie_in_the_same_places_where_a_target_is_given() -> None:
    staging, target = Staging("cpu"), torch.zeros(1024, dtype=torch.uint8)
    first = staging.move(arrays(0), target)
    then = staging.move(arrays(1), target)
    for name, array in arrays(1).items():
        assert first[name].data_ptr() == then[name].data_ptr()
        assert torch.equal(first[name], torch.from_numpy(array))
    size = max(place.storage_offset() * place.element_size() + place.nbytes for place in then.values())
    with pytest.raises(ValueError, match="bytes do not fit into 64"):
        staging.move(arrays(0), target[:64])
    assert size <= 1024


@pytest.mark.parametrize("shape", [(0, 2), (5,), (3, 70_000)])
def test_an_answer_comes_back_as_a_copy(shape: tuple[int, ...]) -> None:
    staging = Staging("cpu")
    answer = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    found = staging.fetch(answer)
    staging.fetch(torch.zeros_like(answer))
    assert found.dtype == np.int32
    assert np.array_equal(found, answer.numpy())
