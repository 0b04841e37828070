"""The guard itself: what waits for a device is caught, on a CPU's tensors too, and what does not is let through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.no_sync import Synchronises, no_sync

NUMBERS = torch.tensor([3, 1, 2, 1])
FLAGS = NUMBERS > 1

WAITING: dict[str, Callable[[], object]] = {
    "item": lambda: NUMBERS[0].item(),
    "list": lambda: NUMBERS.tolist(),
    "array": lambda: NUMBERS.numpy(),
    "host": lambda: NUMBERS.cpu(),
    "host by name": lambda: NUMBERS.to("cpu"),
    "host as a device": lambda: NUMBERS.to(device=torch.device("cpu")),
    "truth": lambda: bool(FLAGS.any()),
    "branch": lambda: 1 if NUMBERS.sum() > 3 else 0,
    "integer": lambda: int(NUMBERS[0]),
    "float": lambda: float(NUMBERS[0]),
    "index of a list": lambda: [1, 2, 3, 4][NUMBERS[1]],
    "flags as an index": lambda: NUMBERS[FLAGS],
    "flags as a target": lambda: NUMBERS.clone().__setitem__(FLAGS, torch.tensor([1, 2])),
    "places": lambda: torch.nonzero(FLAGS),
    "places by where": lambda: torch.where(FLAGS),
    "selection": lambda: torch.masked_select(NUMBERS, FLAGS),
    "unique": lambda: torch.unique(NUMBERS),
    "equality": lambda: torch.equal(NUMBERS, NUMBERS),
    "membership": lambda: 3 in NUMBERS,
    "repeats": lambda: NUMBERS.repeat_interleave(NUMBERS),
    "numbers of the host": lambda: torch.tensor([1, 2], device=NUMBERS.device),
}
ASKING: dict[str, Callable[[], object]] = {
    "places as an index": lambda: NUMBERS[NUMBERS],
    "filling": lambda: NUMBERS.clone().masked_fill_(FLAGS, 0),
    "choosing": lambda: torch.where(FLAGS, NUMBERS, 0),
    "views and copies": lambda: torch.empty(4, dtype=torch.int64).copy_(NUMBERS).view(torch.int32)[::2],
    "types": lambda: NUMBERS.to(torch.float32).sum(),
    "shapes": lambda: (len(NUMBERS), NUMBERS.shape, NUMBERS.stride(0), NUMBERS.device),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_caught(name: str) -> None:
    with pytest.raises(Synchronises, match="waits for the device"), no_sync():
        WAITING[name]()
    WAITING[name]()


@pytest.mark.parametrize("name", ASKING)
def test_what_only_asks_is_let_through(name: str) -> None:
    with no_sync():
        ASKING[name]()
