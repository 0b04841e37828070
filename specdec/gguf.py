"""A .gguf file (version 2 or 3, little endian) as Hugging Face names, shapes and config keys.

What its converter did to weights is undone here; the tokenizer's data is handed on as it stands.

The header is read and checked by hand, because a corrupt count must end in one line and not in an endless loop; blocks
are dequantised by the `gguf` package.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from specdec.errors import ModelError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
_MAX_NAME = 65535
_ROW_BLOCKS = 256

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FAMILY_BLOCK = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file: its torch shape, its block type, and where its bytes are."""

    shape: tuple[int, ...]
    block_type: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a file: metadata values (arrays of numbers as numpy arrays, of strings as lists) and tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def family(self) -> str:
        """The value of `general.architecture`. Raises `ModelError` for one that cannot be run."""
        family = self.metadata.get("general.architecture")
        if family not in _FAMILY_BLOCK:
            supported = ", ".join(_FAMILY_BLOCK)
            raise ModelError(f"{self.path}: general.architecture {family!r} is not supported; supported: {supported}")
        return str(family)


class _Reader:
    """Walks the header; refuses to read past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, count: int) -> int:
        """Step over `count` bytes and return where they begin."""
        start, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise ModelError(f"{self.path}: truncated or corrupt: the header needs more than {len(self.data)} bytes")
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def text(self, limit: int | None = None) -> str:
        size = self.number("Q")
        if limit is not None and size > limit:
            raise ModelError(f"{self.path}: corrupt: a name of {size} bytes in the header")
        start = self.take(size)
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner == _STRING:
                if count > len(self.data):
                    raise ModelError(f"{self.path}: corrupt: an array of {count} strings in the header")
                return [self.text() for _ in range(count)]
            return self.numbers(inner, count)
        value = self.numbers(kind, 1)[0]
        # float32 as the shortest decimal that reads back equal: 1e-05, not 9.999999747378752e-06
        return float(str(value)) if isinstance(value, np.float32) else value.item()

    def numbers(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        if kind not in _NUMBERS:
            raise ModelError(f"{self.path}: corrupt: unknown value type {kind} in the header")
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        start = self.take(count * dtype.itemsize)
        return np.frombuffer(self.data, dtype, count, start).copy()


def read_gguf(path: Path) -> GgufFile:
    """Read the header. Raises `ModelError` naming the file if it is not GGUF, corrupt, truncated or of a kind that
    cannot be read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_header(path, data)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None


def _read_header(path: Path, data: mmap.mmap) -> GgufFile:
    reader = _Reader(path, data)
    if data[:4] != _MAGIC:
        raise ModelError(f"{path}: not a GGUF file (it begins with {data[:4]!r})")
    reader.take(4)
    version = reader.number("I")
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} is not supported; supported: 2 and 3, little endian")
    num_tensors, num_values = reader.number("Q"), reader.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.text(_MAX_NAME)
        metadata[key] = reader.value(reader.number("I"))
    infos = [_read_tensor(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path}: general.alignment must be a positive integer, got {alignment!r}")
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in infos:
        end = start + tensor.offset + tensor.num_bytes
        if end > len(data):
            raise ModelError(f"{path}: truncated: {name} ends at byte {end}, the file at {len(data)}")
        if name in tensors:
            raise ModelError(f"{path}: corrupt: {name} is there twice")
        tensors[name] = GgufTensor(tensor.shape, tensor.block_type, start + tensor.offset, tensor.num_bytes)
    return GgufFile(path, metadata, tensors)


def _read_tensor(reader: _Reader) -> tuple[str, GgufTensor]:
    name, rank = reader.text(_MAX_NAME), reader.number("I")
    if not 1 <= rank <= 4:
        raise ModelError(f"{reader.path}: corrupt: {name} has {rank} dimensions")
    shape = tuple(reader.number("Q") for _ in range(rank))[::-1]  # dimensions are listed fastest first
    code, offset = reader.number("I"), reader.number("Q")
    try:
        block_type = gguf.GGMLQuantizationType(code)
        block, block_bytes = gguf.GGML_QUANT_SIZES[block_type]
    except (ValueError, KeyError):
        raise ModelError(f"{reader.path}: {name} has the unknown block type {code}") from None
    if shape[-1] % block:
        raise ModelError(f"{reader.path}: corrupt: rows of {name} ({shape[-1]}) are no multiple of {block}")
    count = 1
    for size in shape:
        count *= size
    return name, GgufTensor(shape, block_type, offset, count // block * block_bytes)


def weights(file: GgufFile) -> Iterator[tuple[str, Tensor]]:
    """Every weight as fp32 under its Hugging Face name. Raises `ModelError` for a tensor that has none here."""
    heads = {}
    if file.family == "llama":
        heads["q_proj"] = file.metadata["llama.attention.head_count"]
        heads["k_proj"] = file.metadata.get("llama.attention.head_count_kv", heads["q_proj"])
    with file.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for source, tensor in file.tensors.items():
            name = _name(file, source)
            if name is None:
                continue
            try:
                values = _dequantize(data, tensor)
            except NotImplementedError as error:
                raise ModelError(f"{file.path}: {source}: {error}") from None
            weight = torch.from_numpy(values)
            module = name.split(".")[-2]
            if module in heads and weight.shape[0] % (2 * heads[module]):
                raise ModelError(
                    f"{file.path}: {source} has {weight.shape[0]} rows, which {heads[module]} heads cannot share"
                )
            if module in heads:
                weight = _half_split(weight, heads[module])
            if file.family == "gemma3" and module.endswith("norm"):
                weight = weight - 1.0  # stored as 1 + w
            yield name, weight


def _name(file: GgufFile, source: str) -> str | None:
    """The Hugging Face name of a tensor; None for what `config_dict` reads instead."""
    if source == "rope_freqs.weight":
        return None
    stem, _, suffix = source.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    blk, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    module = (_BLOCK | _FAMILY_BLOCK[file.family]).get(part)
    if blk != "blk" or not number.isdigit() or module is None:
        raise ModelError(f"{file.path}: unexpected tensor {source} for general.architecture {file.family!r}")
    return f"model.layers.{number}.{module}.{suffix}"


def _dequantize(data: mmap.mmap, tensor: GgufTensor) -> np.ndarray[Any, Any]:
    raw = np.frombuffer(data, np.uint8, tensor.num_bytes, tensor.offset)
    # The package works through 16 rows at a time, and blocks do not care about rows: long ones are much quicker.
    block_bytes = gguf.GGML_QUANT_SIZES[tensor.block_type][1]
    row_blocks = math.gcd(tensor.num_bytes // block_bytes, _ROW_BLOCKS)
    values = gguf.dequantize(raw.reshape(-1, row_blocks * block_bytes), tensor.block_type)
    if tensor.block_type is gguf.GGMLQuantizationType.F32:
        values = values.copy()  # was a view of the map, which is closed when the caller is done
    return values.reshape(tensor.shape)


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k back from the interleaved rotary layout: row 2i + j of a head becomes row j * K/2 + i."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def config_dict(file: GgufFile) -> dict[str, Any]:
    """The file's numbers under the keys of config.json (`ModelConfig.from_dict` reads them). What a converter leaves
    out (activation, pattern and theta of Gemma's sliding layers) is left to the family's defaults."""
    family, values = file.family, file.metadata

    def value(key: str) -> Any:
        return values.get(f"{family}.{key}")

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: the tensor token_embd.weight is missing")
    config = {
        "model_type": "gemma3_text" if family == "gemma3" else family,
        "vocab_size": embedding.shape[0],
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length") or value("rope.dimension_count"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length"),
        "rope_theta": value("rope.freq_base"),
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "sliding_window": value("attention.sliding_window"),
        "num_experts": value("expert_count"),
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
    }
    return {key: entry for key, entry in config.items() if entry is not None}


def _rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    divisors = file.tensors.get("rope_freqs.weight")
    if divisors is not None:
        with file.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return {"rope_type": "divisors", "divisors": _dequantize(data, divisors).tolist()}
    kind = file.metadata.get(f"{file.family}.rope.scaling.type")
    if kind in (None, "none"):
        return None
    return {"rope_type": kind, "factor": file.metadata.get(f"{file.family}.rope.scaling.factor")}


def end_ids(file: GgufFile) -> tuple[int, ...]:
    """The ids that end a text: of the sequence, of a turn, of a message; each only once."""
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(int(file.metadata[key]) for key in keys if key in file.metadata))


def tokenizer_metadata(file: GgufFile) -> dict[str, Any]:
    """All `tokenizer.*` values under their names in the file: `tokenizer.ggml.tokens`, `.token_type`, `.merges`,
    `.scores`, `.model`, `.pre`, ids and flags, `tokenizer.chat_template`. Raises `ModelError` without tokens."""
    values = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" not in values:
        raise ModelError(f"{file.path}: the key tokenizer.ggml.tokens is missing")
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in values.items()}
