"""Moving keys and values in Triton's interpreter: the reference's bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.kernels import kv
from specdec.kernels.device import interpreted
from tests.kernels.cover import pairwise

NUM_SLOTS = 40


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "count": [0, 1, 3, 17],
            "groups": [1, 3, 8],
            "head_size": [5, 16, 80, 256],
            "dtype": [torch.float32, torch.float16, torch.bfloat16],
            "caches": [2, 6],
        }
    ),
)
def test_bits_are_moved_as_the_reference_does(case: dict[str, Any]) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    count, groups, size, dtype = case["count"], case["groups"], case["head_size"], case["dtype"]
    caches_CGNK = torch.randn(case["caches"], groups, NUM_SLOTS, size).to(dtype)
    caches_CGNK[0, 0, :3, 0] = torch.tensor([torch.nan, torch.inf, -0.0], dtype=dtype)
    sources, targets = torch.randint(0, NUM_SLOTS, (count,)), torch.randperm(NUM_SLOTS)[:count]
    expected = caches_CGNK.clone()
    kv.move(expected, sources, targets)
    with interpreted():
        kv.move(caches_CGNK, sources, targets)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(caches_CGNK.view(bits), expected.view(bits))


def test_every_source_is_read_before_any_target_is_written() -> None:
    caches_CGNK = torch.arange(2 * NUM_SLOTS * 4.0).view(2, 1, NUM_SLOTS, 4)
    before, order = caches_CGNK.clone(), torch.arange(NUM_SLOTS).flip(0)
    with interpreted():
        kv.move(caches_CGNK, order, torch.arange(NUM_SLOTS))
    assert torch.equal(caches_CGNK, before[:, :, order])
