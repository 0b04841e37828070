"""Where a number comes from: versions, machine, threads, load, and the model with its options. Measures nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

import specdec
from specdec.cpu import cpu_info, cpu_name

if TYPE_CHECKING:
    from specdec.build import LoadedModel
    from specdec.chat import ChatTemplate

PACKAGES = ("torch", "numpy", "tokenizers", "llguidance", "xgrammar", "triton")
# Instructions that decide how fast a small model runs on a CPU, as Linux names them (x86-64, then AArch64).
CPU_FEATURES = (
    *("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimddp", "i8mm", "bf16", "sve"),
)


def machine() -> dict[str, Any]:
    """What this process runs on, as plain values."""
    info = cpu_info()
    return {
        "specdec": specdec.__version__,
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "system": platform.platform(terse=True),
        "cpu": cpu_name(),
        "cpu_features": [name for name in CPU_FEATURES if name in info.get("flags", info.get("Features", "")).split()],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def load_average() -> float | None:
    """Processes that ran or waited to run over the last minute, other programs' included; None where unknown."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def provenance(loaded: LoadedModel) -> dict[str, Any]:
    """The machine at this moment, and the model behind a number: where it runs, and the options it was built with."""
    facts = machine()
    return {
        **facts,
        "device": facts["device"] if loaded.device == "cuda" else "cpu",
        "load_average": load_average(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": loaded.name,
        "context": loaded.max_model_len,
        "options": {name: value for name, value in asdict(loaded.options).items() if value is not None},
        "chat_template_sha256": None if loaded.template is None else _fingerprint(loaded.template),
    }


def tokenizer_provenance(name: str) -> dict[str, Any]:
    """The machine at this moment, and the vocabulary behind a number that no model gave."""
    return {**machine(), "device": "cpu", "load_average": load_average(), "model": f"tokenizer {name}"}


def _fingerprint(template: ChatTemplate) -> str:
    """A hash of what the template makes of a short conversation, its default system prompt included: drafters are bound
    to the template they were made for."""
    turns = (("user", "one"), ("assistant", "two"), ("user", "three"))
    probe = [{"role": role, "content": content} for role, content in turns]
    return sha256(template.render(probe).encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
