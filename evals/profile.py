"""Where the time of an engine step goes, by area: Python's own profiler, grouped by the file that was running.

Calls into native code count for the Python function that makes them, so the areas add up to the step. On a device that
works on its own the numbers say where the CPU waited, not what the device did.
"""

from __future__ import annotations

import cProfile
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")

# The first part of a path that fits decides; the rest of torch and Python is what calls cost.
AREAS = (
    # torch/_ops.py: operators called by name, which only the packed linears do
    ("linears", ("torch/nn/modules/linear.py", "torch/_ops.py", "specdec/quant", "kernels/qmatmul", "kernels/cpu")),
    ("attention", ("kernels/tree_attention", "specdec/attention.py", "specdec/kv.py")),
    ("norm and rotary", ("kernels/norm_rope", "models/layers.py")),
    ("activations, residuals, embedding", ("specdec/models/", "torch/nn/functional.py", "torch/nn/modules/sparse.py")),
    ("sampling", ("specdec/sampling.py", "kernels/sample", "specdec/mask.py")),
    ("grammar", ("specdec/grammar/", "llguidance/", "xgrammar/")),
    ("drafting", ("specdec/drafters/", "specdec/evals/", "specdec/tree.py")),
    ("scheduling, batch, commit, text", ("specdec/",)),
    ("calls between modules", ("",)),
)


class Profile:
    """Profiles calls of functions; everything between them is left out."""

    def __init__(self) -> None:
        self._profiler = cProfile.Profile(builtins=False)

    def call(self, function: Callable[[], ResultT]) -> ResultT:
        """`function()`, profiled."""
        return self._profiler.runcall(function)

    def areas(self) -> dict[str, float]:
        """Seconds by area over all calls, largest first; areas without any are left out."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for entry in self._profiler.getstats():
            if isinstance(entry.code, str):
                continue
            path = entry.code.co_filename.replace("\\", "/")
            seconds[next(area for area, parts in AREAS if any(part in path for part in parts))] += entry.inlinetime
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))
