"""How a kernel is cut: the numbers a launcher may choose freely without changing what is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_THREADS = 1024  # of a program, on every target
LANES = 64 if torch.version.hip else 32  # of a warp here; an AMD GPU's may have 32 as well, and then has room to spare


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tokens a program takes at a time, and warps a program, where it may have so many."""

    block: int
    warps: int

    @property
    def options(self) -> dict[str, int | bool]:
        """Compiler options. Fusing products into sums is off: what is fused is written so, and all devices agree."""
        return {"num_warps": fitting_warps(self.warps, LANES), "enable_fp_fusion": False}


def fitting_warps(warps: int, lanes: int) -> int:
    """`warps` of so many lanes, or as many as a program may have."""
    return min(warps, MOST_THREADS // lanes)
