"""What is left of a GPU's memory for the KV cache."""

from __future__ import annotations

import pytest
import torch

from specdec.drafters.memory import Memory
from specdec.errors import ConfigError
from specdec.kv import KVCache, Pool
from specdec.protocols import LayerShape
from specdec.sizing import GIB, fitting, room

LAYERS = [LayerShape(2, 16), LayerShape(1, 8)]


def test_the_cache_gets_its_share_less_what_is_used_and_what_forwards_need() -> None:
    assert room(100 * GIB, 16 * GIB, 4 * GIB, 0.9) == 70 * GIB
    assert room(10 * GIB, 9 * GIB, 4 * GIB, 0.9) == -4 * GIB


def test_blocks_fill_the_room_and_too_few_are_refused() -> None:
    assert fitting(1000, 99, least=10, utilization=0.9, max_model_len=150) == 10
    for left in (999, 0, -5):
        with pytest.raises(ConfigError, match=r"gpu_memory_utilization 0.9 leaves .* a context of 150 tokens"):
            fitting(left, 100, least=10, utilization=0.9, max_model_len=150)


def test_a_pool_is_made_larger_with_all_that_lies_in_its_blocks() -> None:
    pool = Pool(2, 4, "cpu", torch.float32)
    cache = KVCache(LAYERS, pool.num_blocks, pool.block_size, device=pool.device, dtype=pool.dtype)
    pool.own(cache)
    memory = Memory(lambda *_: torch.empty(0), LAYERS[:1], 32, pool)
    block_bytes = pool.num_bytes // 2
    # Keys and values of both layers for the target, of one for the drafter, and its feature.
    assert block_bytes == 4 * (2 * 4 * (2 * 16 + 8) + 2 * 4 * 2 * 16 + 32)
    pool.resize(7)
    assert pool.num_blocks == 7
    assert pool.num_bytes == 7 * block_bytes
    assert [keys.shape for keys in cache.keys] == [(2, 28, 16), (1, 28, 8)]
    assert [values.shape for values in cache.values] == [(2, 28, 16), (1, 28, 8)]
    assert memory.num_bytes == 7 * 32 * 4
