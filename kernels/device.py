"""Which tensors Triton's kernels take: a GPU's; and, where it is asked for, a CPU's too, in its interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_interpreting = False


def on_gpu(tensor: Tensor) -> bool:
    """Whether the work on `tensor` is for `specdec.kernels.gpu`."""
    return tensor.is_cuda or _interpreting


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, a CPU's tensors are for `specdec.kernels.gpu` as well, which Triton must have been imported for with
    TRITON_INTERPRET=1. For all threads: a whole engine can be proved this way without a GPU."""
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before
