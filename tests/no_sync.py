"""Code under `no_sync` may ask a device for work but never wait for it, nor let a shape depend on what it computed: it
raises where code would, on a CPU's tensors too. Triton's interpreter, which plays the device, may do as it likes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.staging import Staging

# What Python sees; on a CPU some of it never reaches the dispatcher.
METHODS = {
    *("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__"),
    *("__contains__", "__format__", "__repr__", "is_nonzero", "equal", "allclose", "nonzero", "argwhere"),
    *("masked_select", "unique", "unique_consecutive", "bincount", "histc", "synchronize"),
}
# What reaches the dispatcher, also from inside other operations: shapes that depend on values, and values read back.
OPERATIONS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere", "masked_select"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave", "_assert_async"),
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


class Synchronises(AssertionError):
    """Something waits for the device."""


def _is_the_device() -> bool:
    """Whether Triton's interpreter called, directly or not."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("triton."):
            return True
        frame = frame.f_back
    return False


def _is_staging() -> bool:
    """Whether `Staging.move` called: what it reads as an array is the host's own memory."""
    code = sys._getframe(2).f_code
    return code is Staging.move.__code__


def _to_host(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether the arguments of `Tensor.to` name the host."""
    named = [*arguments[1:], *options.values()]
    return any(isinstance(one, str | torch.device) and torch.device(one).type == "cpu" for one in named)


class _Functions(TorchFunctionMode):
    """What Python calls."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, options = getattr(func, "__name__", str(func)), kwargs or {}
        waits = name in METHODS or (name == "to" and _to_host(args, options))
        # Made of numbers in memory that is not pinned.
        waits |= name in ("tensor", "as_tensor") and options.get("device") is not None
        waits = waits and not _is_the_device()
        if waits and not (name == "numpy" and _is_staging()):
            raise Synchronises(f"{name} waits for the device")
        return func(*args, **options)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What the dispatcher is asked for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, options = func.overloadpacket.__name__, kwargs or {}
        waits = name in OPERATIONS
        if name in INDEXING:
            waits = any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if name == "_to_copy" and options.get("device") is not None:
            waits = torch.device(options["device"]).type == "cpu" != args[0].device.type
        if name == "copy_" and args[0].device.type == "cpu" != args[1].device.type:
            waits = not (args[2] if len(args) > 2 else options.get("non_blocking", False))
        if waits and not _is_the_device():
            raise Synchronises(f"{name} waits for the device")
        return func(*args, **options)


@contextmanager
def no_sync() -> Iterator[None]:
    """Inside, whatever would wait for the device raises `Synchronises`."""
    with _Operations(), _Functions():  # type: ignore[no-untyped-call]
        yield
