"""What texts that came to their end leave to later ones, apart for each cache salt. Knows nothing of what it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from specdec.sequence import Sequence

MAX_SALTS = 64

Pool = TypeVar("Pool")


def pool_of(seq: Sequence, pools: OrderedDict[str, Pool], new: Callable[[], Pool]) -> Pool | None:
    """The one of `pools`, by salt, that a text joins, made `new` where there is none; None for a text that was cut off
    before its end. Of more than `MAX_SALTS` the one that nobody joined for longest goes."""
    if seq.finish_reason not in ("stop", "length"):
        return None
    salt = seq.request.cache_salt
    pool = pools.setdefault(salt, new())
    pools.move_to_end(salt)
    if len(pools) > MAX_SALTS:
        pools.popitem(last=False)
    return pool
