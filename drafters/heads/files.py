"""What lies in a drafter's folder: its config, and its tensors by name. Knows no family."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.errors import ModelError
from specdec.loader import read_json, weight_files

# In the order of preference; safetensors with an index, or as model.safetensors, come before all of them.
SINGLE = ("medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
# Spellings of one name, as (pattern, ours). All rules apply, in this order.
_RENAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^transformer\."), "layers.0."),
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: where, under which name, of which shape."""

    file: Path
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Files:
    """A folder: `config` is its config.json, `tensors` what its weights hold, by one spelling for all publishers."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    @property
    def config_file(self) -> Path:
        """For messages."""
        return self.folder / "config.json"

    def width(self, name: str, axis: int) -> int:
        """The size of a tensor along `axis`. Raises `ModelError` where there is no such tensor or axis."""
        stored = self.tensors.get(name)
        if stored is None:
            raise ModelError(f"{self.folder}: missing tensors: {name}")
        if len(stored.shape) <= axis:
            raise ModelError(
                f"{self.folder}: {name} has the shape {list(stored.shape)}, expected {axis + 1} axes or more"
            )
        return stored.shape[axis]

    def read(self, names: Iterator[str] | list[str]) -> Iterator[tuple[str, Tensor]]:
        """Each name with its tensor, a file at a time. Raises `ModelError` naming a file that cannot be read."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file, inside in by_file.items():
            if file.suffix == ".safetensors":
                try:
                    with safe_open(file, framework="pt") as opened:
                        for name in inside:
                            yield name, opened.get_tensor(self.tensors[name].name)
                except (OSError, SafetensorError) as error:
                    raise ModelError(f"{file}: cannot be read: {error}") from None
            else:
                unpickled = _unpickle(file)
                yield from ((name, unpickled[self.tensors[name].name]) for name in inside)


def open_files(folder: Path) -> Files:
    """Look into a folder; reads no tensor of safetensors. Raises `ModelError` naming the file that is at fault."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    tensors: dict[str, Stored] = {}
    for stored in _stored(folder):
        name = stored.name
        for pattern, ours in _RENAMES:
            name = pattern.sub(ours, name)
        if name in tensors:
            raise ModelError(f"{stored.file}: {stored.name} and {tensors[name].name} are the same tensor, {name}")
        tensors[name] = stored
    return Files(folder, read_json(folder / "config.json"), tensors)


def _stored(folder: Path) -> Iterator[Stored]:
    single = next((folder / name for name in SINGLE if (folder / name).is_file()), None)
    if single is None or any(
        (folder / name).exists() for name in ("model.safetensors.index.json", "model.safetensors")
    ):
        for file in weight_files(folder):
            yield from _headers(file)
    elif single.suffix == ".safetensors":
        yield from _headers(single)
    else:
        yield from (Stored(single, name, tuple(tensor.shape)) for name, tensor in _unpickle(single).items())


def _headers(file: Path) -> Iterator[Stored]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield Stored(file, name, tuple(opened.get_slice(name).get_shape()))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from None


def _unpickle(file: Path) -> dict[str, Tensor]:
    """A state dict, by the unpickler that knows tensors and nothing that could run."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises nearly anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{file}: cannot be read: {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ModelError(f"{file}: must hold tensors by name, got {type(state).__name__}")
    return cast(dict[str, Tensor], state)
