"""How a kernel is cut: the numbers a launcher may choose freely without changing what is computed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tokens a program takes at a time, and warps (of 32 lanes, of 64 on AMD) a program."""

    block: int
    warps: int

    @property
    def options(self) -> dict[str, int | bool]:
        """Compiler options. Fusing products into sums is off: what is fused is written so, and all devices agree."""
        return {"num_warps": self.warps, "enable_fp_fusion": False}
