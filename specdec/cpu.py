"""What the operating system says of the processor. Knows Linux's way; elsewhere it knows little."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """The processor's name for people."""
    return cpu_info().get("model name") or platform.processor() or platform.machine()


def cpu_info() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
