"""Keys and values to their slots of the cache, and from slots to slots. It knows no sequence and no layer.

R rows, G key-value heads, K head size, N slots, C caches (of keys and of values of all layers of one shape), M moves.
"""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.device import on_gpu


def write(keys_GNK: Tensor, values_GNK: Tensor, slots_R: Tensor, k_RGK: Tensor, v_RGK: Tensor) -> None:
    """Store each row's key and value in its slot (int64), in place. Rows and heads of `k_RGK` and `v_RGK` may lie any
    distance apart; a slot of the caches is one piece. Of rows with the same slot, as padding has, any may win."""
    if on_gpu(keys_GNK):
        from specdec.kernels.gpu import kv

        kv.write(keys_GNK, values_GNK, slots_R, k_RGK, v_RGK)
        return
    keys_GNK.index_copy_(1, slots_R, k_RGK.transpose(0, 1))
    values_GNK.index_copy_(1, slots_R, v_RGK.transpose(0, 1))


def move(caches_CGNK: Tensor, sources_M: Tensor, targets_M: Tensor) -> None:
    """Copy slots to slots in every cache, in place; every source is read before any target is written. Slots are int64,
    no two targets equal, but for padding: moves of a slot that nobody reads to itself."""
    if on_gpu(caches_CGNK):
        from specdec.kernels.gpu import kv

        kv.move(caches_CGNK, sources_M, targets_M)
        return
    caches_CGNK.index_copy_(2, targets_M, caches_CGNK.index_select(2, sources_M))
