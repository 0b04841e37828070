"""Keys and values from slots of the cache to others. It knows no sequence and no layer.

G key-value heads, K head size, N slots, C caches (of keys and of values of all layers of one shape), M moves.
"""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.device import on_gpu


def move(caches_CGNK: Tensor, sources_M: Tensor, targets_M: Tensor) -> None:
    """Copy slots to slots in every cache, in place; every source is read before any target is written. Slots are int64,
    no two targets equal, but for padding: moves of a slot that nobody reads to itself."""
    if on_gpu(caches_CGNK):
        from specdec.kernels.gpu import kv

        kv.move(caches_CGNK, sources_M, targets_M)
        return
    caches_CGNK.index_copy_(2, targets_M, caches_CGNK.index_select(2, sources_M))
