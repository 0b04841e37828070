"""Which tensors Triton's kernels take: a GPU's; and, where it is asked for, a CPU's too, in its interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_interpreting = False


def on_gpu(tensor: Tensor) -> bool:
    """Whether the work on `tensor` is for `specdec.kernels.gpu`."""
    return tensor.is_cuda or _interpreting


def launch_problem() -> str | None:
    """Why Triton cannot launch kernels on this machine's GPU, in its own words; None where it can. What launches them
    is built by a C compiler, with Python's headers and the driver's library, when it is first asked for."""
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


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
