"""A GPU that holds no numbers and runs nothing: kernels launched on it are compiled, or only noted, and what is read
back are small numbers. So one can see what a program would compile, where and when, without a GPU.

It plays an H200 for a whole process, in which Triton must not be interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

PROCESSORS, MEMORY, GRAPH = 132, 139 * 2**30, 2**23
# What Python asks of values; all else is done on shapes.
READS = {
    *("cpu", "item", "tolist", "numpy", "equal", "allclose", "nonzero", "argwhere", "is_nonzero", "masked_select"),
    *("__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__", "__format__", "__repr__"),
}


@dataclass(slots=True)
class Launches:
    """`asked` are the specialisations of kernels that were launched, each once: the kernel's name, and what is compiled
    for; `compiled` those that no file of Triton's cache had, with the seconds that they took. `waits` are operations
    that keep the host waiting, which copies from and to pinned memory do not. `captured` graphs were made, of which
    some are still `alive`."""

    asked: set[tuple[str, str]] = field(default_factory=set)
    compiled: list[tuple[str, float]] = field(default_factory=list)
    captured: int = 0
    alive: int = 0
    waits: list[str] = field(default_factory=list)


class Driver:
    """Of Triton."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Elsewhere(TorchFunctionMode):
    """Tensors of "cuda" are made without memory; they are read as `read` says."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, options = getattr(func, "__name__", str(func)), {**(kwargs or {})}
        if name == "__get__":
            found = args[0].is_meta if func.__self__ is Tensor.is_cuda else func(*args)  # type: ignore[attr-defined]
            return torch.device("cuda") if found == torch.device("meta") else found
        options.pop("pin_memory", None)
        if keeps_waiting(name, args, options):
            self._launches.waits.append(name)
        if "device" in options:
            options["device"] = there(options["device"])
        to_host = name == "to" and any(is_host(one) for one in (*args[1:], *options.values()))
        from_here = name == "copy_" and not args[0].is_meta and args[1].is_meta
        if to_host or from_here or name in READS:
            args = [read(one) for one in args]
        if name == "cuda":
            name, func, args = "to", Tensor.to, [args[0], "meta"]
        args = [there(one) if isinstance(one, str | torch.device) else one for one in args]
        return func(*args, **options)


def keeps_waiting(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether an operation is one of `Launches.waits`."""
    tensors = [one for one in args if isinstance(one, Tensor)]
    if name == "copy_":
        return args[0].is_meta != args[1].is_meta and not (args[2:3] == (True,) or options.get("non_blocking"))
    if any(one.is_meta for one in tensors):
        return name in READS or (name == "to" and any(is_host(one) for one in (*args[1:], *options.values())))
    moved = there(options.get("device")) if name in ("tensor", "as_tensor") else None
    if name in ("to", "cuda") and tensors:
        moved = next((there(one) for one in (*args[1:], *options.values()) if is_device(one)), moved)
    return name == "cuda" or (moved is not None and torch.device(moved).type == "meta")


def is_device(one: Any) -> bool:
    return isinstance(one, str | torch.device)


def is_host(one: Any) -> bool:
    return isinstance(one, str | torch.device) and torch.device(one).type == "cpu"


def there(device: Any) -> Any:
    """A device, the GPU in the shape of torch's device without memory."""
    if isinstance(device, str | torch.device) and str(device).startswith("cuda"):
        return torch.device("meta")
    return device


def read(one: Any) -> Any:
    """What is read of a tensor of the GPU, none of it 0 and neighbours different; all else as it is."""
    if not isinstance(one, Tensor) or not one.is_meta:
        return one
    return (torch.arange(one.numel()) % 61 + 1).view(one.shape).to(one.dtype)


class Event:
    """Of torch.cuda: everything takes a millisecond."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Generator(torch.Generator):
    """Of numbers that nobody reads."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls)


class CUDAGraph:
    """Of torch.cuda; it takes `GRAPH` bytes as long as it lives."""

    launches = Launches()  # of the process

    def __init__(self) -> None:
        self.launches.alive += 1

    def __del__(self) -> None:
        self.launches.alive -= 1

    def replay(self) -> None:
        pass


@contextmanager
def fake_gpu(*, compiling: bool = False, memory: int = MEMORY) -> Iterator[Launches]:
    """Inside, torch has one GPU, and what is launched on it is noted, and compiled where it is asked for."""
    launches = CUDAGraph.launches

    @contextmanager
    def graph(graph: CUDAGraph, pool: Any = None) -> Iterator[None]:
        launches.captured += 1
        yield

    def nothing(*args: Any) -> None:
        pass

    for name, value in {
        "is_available": lambda: True,
        "synchronize": nothing,
        "empty_cache": nothing,
        "mem_get_info": lambda device=None: (memory - launches.alive * GRAPH, memory),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": nothing,
        "get_device_name": lambda device=None: "a fake GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=PROCESSORS),
        "graph_pool_handle": lambda: None,
        "set_sync_debug_mode": nothing,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
    }.items():
        setattr(torch.cuda, name, value)
    torch.Generator = Generator  # type: ignore[misc]

    compile_now = JITFunction._do_compile

    def noted(function: Any, key: Any, signature: Any, device: int, *rest: Any) -> Any:
        launches.asked.add((function.__name__, str(key)))
        if compiling:
            return compile_now(function, key, signature, device, *rest)
        kernel = SimpleNamespace(run=nothing, launch_metadata=nothing, function=None, packed_metadata=None)
        return function.device_caches[device][0].setdefault(key, kernel)

    def listened(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            launches.compiled.append((src.name, times.total / 1e6))

    triton.runtime.driver.set_active(Driver())
    JITFunction._do_compile, knobs.compilation.listener = noted, listened
    CompiledKernel.run = property(lambda kernel: nothing)
    CompiledKernel.launch_metadata = nothing
    CompiledKernel._init_handles = nothing
    with Elsewhere(launches):
        yield launches
