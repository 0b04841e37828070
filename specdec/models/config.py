"""What a model is made of, as numbers: read once from a config.json (or from the like of it that `gguf.py` builds).

Knows no tensors and no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import ModelError

FULL = "full_attention"
SLIDING = "sliding_attention"
# More are a damaged file; building them would fill the memory before any tensor is looked for.
MAX_LAYERS, MAX_HEAD_DIM = 1024, 65536
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "divisors")

# Where configs say how many modules for multi-token prediction came with the model.
MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")

# What the classes of each family assume where config.json is silent (transformers' own defaults).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "max_window_layers": 28,
    },
    "qwen3": {
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "max_window_layers": 28,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "hidden_act": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
}
_GEMMA = "gemma3_text"
# Keys that change what the model computes and that no model file here honours: only these values pass.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary frequencies of one kind of layer. `kind` is one of `ROPE_KINDS`; `divisors` (one a frequency) serve
    "divisors", `factor` all others but "default", `original_max_positions` "llama3" and "yarn", the two
    `..._freq_factor` "llama3", the rest "yarn". Queries and keys are each multiplied by `attention_factor`."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers of one model, with the field's usual names. `ropes` has one entry a kind that occurs in
    `layer_kinds`; `attention_scale` is what queries times keys are multiplied by; `attention_bias` is about
    q, k and v; `output_gate` says that q brings a gate for what the attention puts out; `rotary_dim` is how much of a
    head is rotated, None for all of it; `num_mtp_modules` counts the layers for multi-token prediction that files
    number behind the model's own."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    activation: str
    tie_word_embeddings: bool
    attention_scale: float
    layer_kinds: tuple[str, ...]
    ropes: Mapping[str, Rope]
    sliding_window: int | None = None
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    mlp_bias: bool = False
    output_gate: bool = False
    rotary_dim: int | None = None
    num_mtp_modules: int = 0
    final_softcap: float | None = None

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str) -> ModelConfig:
        """Read the keys of a config.json, in the spelling of transformers 4 or 5. A wrapper's `text_config` is used
        in its place. Raises `ModelError` naming `where` and the key."""
        if isinstance(raw.get("text_config"), Mapping):
            raw = {"tie_word_embeddings": raw.get("tie_word_embeddings")} | dict(raw["text_config"])
        model_type = raw.get("model_type")
        if not isinstance(model_type, str) or model_type not in _DEFAULTS:
            raise ModelError(f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(_DEFAULTS)}")
        keys = _Keys(raw, _DEFAULTS[model_type], where)
        for key, allowed in _NEUTRAL.items():
            keys.only(key, allowed)
        if model_type != _GEMMA:
            keys.only("final_logit_softcapping", (None,))
        activation = raw.get("hidden_activation") or keys.value("hidden_act")
        if activation != _DEFAULTS[model_type]["hidden_act"]:
            raise keys.wrong("hidden_act", activation, _DEFAULTS[model_type]["hidden_act"])

        hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
        num_layers = keys.integer("num_hidden_layers")
        if num_layers > MAX_LAYERS:
            raise keys.wrong("num_hidden_layers", num_layers, f"at most {MAX_LAYERS}")
        num_kv_heads = keys.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise keys.wrong("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
        if raw.get("head_dim") is None and "head_dim" not in _DEFAULTS[model_type] and hidden_size % num_heads:
            raise keys.wrong("hidden_size", hidden_size, f"a multiple of num_attention_heads ({num_heads})")
        head_dim = keys.integer("head_dim", hidden_size // num_heads)
        if head_dim % 2 or head_dim > MAX_HEAD_DIM:
            raise keys.wrong("head_dim", head_dim, f"an even number up to {MAX_HEAD_DIM}")
        layer_kinds = _layer_kinds(keys, num_layers)
        ropes = {kind: _rope(keys, kind if model_type == _GEMMA else FULL) for kind in dict.fromkeys(layer_kinds)}
        attention_bias = keys.flag("attention_bias", False)
        return ModelConfig(
            model_type=model_type,
            vocab_size=keys.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps"),
            max_position_embeddings=keys.integer("max_position_embeddings"),
            activation=activation,
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            attention_scale=keys.number("query_pre_attn_scalar", float(head_dim)) ** -0.5
            * ropes[layer_kinds[0]].attention_factor ** 2,
            layer_kinds=layer_kinds,
            ropes=ropes,
            sliding_window=keys.integer("sliding_window") if SLIDING in layer_kinds else None,
            attention_bias=attention_bias or model_type == "qwen2",
            output_bias=attention_bias,
            qk_norm=model_type in ("qwen3", _GEMMA),
            mlp_bias=keys.flag("mlp_bias", False),
            num_mtp_modules=max((keys.count(key) for key in MTP_COUNTS), default=0),
            final_softcap=keys.number("final_logit_softcapping") if raw.get("final_logit_softcapping") else None,
        )


class _Keys:
    """Typed look-ups in a raw config; every complaint names the file and the key."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self.raw, self.defaults, self.where = raw, defaults, where

    def wrong(self, key: str, value: object, right: str) -> ModelError:
        shown = " ".join(repr(value).split())[:80]
        return ModelError(f"{self.where}: {key} must be {right}, got {shown}")

    def value(self, key: str, default: object = None) -> Any:
        value = self.raw.get(key)
        if value is None:
            value = self.defaults.get(key, default)
        if value is None:
            raise ModelError(f"{self.where}: the key {key} is missing")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, value, "a positive integer")
        return value

    def count(self, key: str) -> int:
        """An integer from 0; 0 where there is none."""
        return self.integer(key) if self.raw.get(key) else 0

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.raw.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        return value

    def only(self, key: str, allowed: tuple[object, ...]) -> None:
        value = self.raw.get(key)
        if value not in allowed:
            raise ModelError(f"{self.where}: {key} {value!r} is not supported; leave it out")


def _layer_kinds(keys: _Keys, num_layers: int) -> tuple[str, ...]:
    """From `layer_types`, else from how the family counts: Gemma by a pattern, Qwen from a first layer on."""
    kinds, model_type = keys.raw.get("layer_types"), keys.raw["model_type"]
    if kinds is not None:
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or not all(kind in (FULL, SLIDING) for kind in kinds)
        ):
            raise keys.wrong("layer_types", kinds, f"{num_layers} times {FULL} or {SLIDING}")
        return tuple(kinds)
    if model_type == _GEMMA:
        old_name = "_sliding_window_pattern"
        pattern = keys.integer(old_name if keys.raw.get(old_name) is not None else "sliding_window_pattern")
        return tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))
    if keys.flag("use_sliding_window", False):
        first = keys.raw.get("max_window_layers", keys.defaults.get("max_window_layers", num_layers))
        if isinstance(first, bool) or not isinstance(first, int):
            raise keys.wrong("max_window_layers", first, "an integer")
        return tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return (FULL,) * num_layers


def _rope(keys: _Keys, kind: str) -> Rope:
    """transformers 5 keeps everything in `rope_parameters` (per layer kind where kinds differ), 4 in `rope_theta` and
    `rope_scaling`, which never applies to sliding layers, whose theta is `rope_local_base_freq`."""
    name = "rope_parameters"
    values = keys.mapping(name)
    if isinstance(values.get(kind), Mapping):
        values = values[kind]
    elif not values:
        name = "rope_scaling"
        values = {} if kind == SLIDING else keys.mapping(name)
    theta_key = "rope_local_base_freq" if kind == SLIDING else "rope_theta"
    inside = _Keys(values, {"original_max_position_embeddings": keys.raw.get("original_max_position_embeddings")},
                   f"{keys.where}: {name}")  # fmt: skip
    inside.only("partial_rotary_factor", _NEUTRAL["partial_rotary_factor"])
    theta = inside.number("rope_theta", keys.number(theta_key))
    scaling = values.get("rope_type") or values.get("type") or "default"
    supported = ROPE_KINDS[:3] if keys.raw["model_type"] == _GEMMA else ROPE_KINDS[:4]
    if scaling not in supported and scaling != "divisors":
        raise ModelError(f"{inside.where}: rope_type {scaling!r} is not supported; supported: {', '.join(supported)}")
    if scaling == "default":
        return Rope(theta)
    if scaling == "divisors":
        return Rope(theta, scaling, divisors=tuple(inside.value("divisors")))
    if scaling == "linear":
        return Rope(theta, scaling, inside.number("factor"))
    if scaling == "yarn":
        return _yarn(inside, theta)
    return Rope(
        theta,
        scaling,
        inside.number("factor"),
        inside.number("low_freq_factor"),
        inside.number("high_freq_factor"),
        inside.integer("original_max_position_embeddings"),
    )


def _yarn(keys: _Keys, theta: float) -> Rope:
    """The factor of attention is given, or by the paper's rule, or by DeepSeek's two numbers for that rule."""
    factor = keys.number("factor")

    def rule(slope: float) -> float:
        return 0.1 * slope * math.log(factor) + 1 if factor > 1 else 1.0

    by_rule = rule(1.0)
    if keys.raw.get("mscale") and keys.raw.get("mscale_all_dim"):
        by_rule = rule(keys.number("mscale")) / rule(keys.number("mscale_all_dim"))
    return Rope(
        theta,
        "yarn",
        factor,
        original_max_positions=keys.integer("original_max_position_embeddings"),
        beta_fast=keys.number("beta_fast", 32.0),
        beta_slow=keys.number("beta_slow", 1.0),
        truncate=keys.flag("truncate", True),
        attention_factor=keys.number("attention_factor", by_rule),
    )
