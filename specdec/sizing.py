"""How many blocks of KV fit beside a model on a GPU: what is left of its share of the memory, once a largest forward
has shown what it needs, and graphs what they take. Knows bytes and blocks; no model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specdec.errors import ConfigError
from specdec.kv import Pool

GIB = 2**30
COPIES_OF_LOGITS = 2  # scores that something changes, and those that filters look at


def room(total: int, used: int, needed: int, utilization: float) -> int:
    """Bytes for the cache, of `total` on the device: its share, less what is `used` already (by whomever) and what
    forwards will need for a while. Below 0 where there is too little."""
    return int(total * utilization) - used - needed


def fitting(num_bytes: int, block_bytes: int, *, least: int, utilization: float, max_model_len: int) -> int:
    """Blocks in `num_bytes`. Raises `ConfigError` where they are fewer than the `least` that one context needs."""
    blocks = max(0, num_bytes) // block_bytes
    if blocks < least:
        raise ConfigError(
            f"gpu_memory_utilization {utilization} leaves {max(0, num_bytes) / GIB:.2f} GiB for the KV cache, and a "
            f"context of {max_model_len} tokens takes {least * block_bytes / GIB:.2f}: make max_model_len smaller or "
            f"gpu_memory_utilization larger"
        )
    return blocks


def measured_room(pool: Pool, largest: Callable[[], torch.Tensor], utilization: float) -> int:
    """See `room`: `largest` runs the largest forward that there will be, and returns its logits. What `pool` captures,
    for a target and its drafters, is captured to see what it takes, and released. CUDA only."""
    device = pool.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    logits_LV = largest()
    torch.cuda.synchronize(device)
    needed = torch.cuda.max_memory_allocated(device) - before + COPIES_OF_LOGITS * logits_LV.nbytes
    del logits_LV
    without = free_memory(device)
    pool.capture()
    graphs = without - free_memory(device)
    pool.release()
    total = torch.cuda.mem_get_info(device)[1]
    return room(total, total - free_memory(device), needed + max(0, graphs), utilization)


def free_memory(device: str) -> int:
    """Bytes of the device that nobody has, once all is done and what lies unused is given back."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
