"""What heads are made of: the numbers of their decoder layers, their embedding and lm_head, their vocabulary.

Publishers write configs of many names around the same Llama layer, so what the tensors show counts more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from specdec.drafters.heads import Target
from specdec.drafters.heads.files import Files
from specdec.errors import ModelError
from specdec.kernels.head import wide_logits
from specdec.loader import fill
from specdec.models.config import FULL, ModelConfig
from specdec.models.layers import frequencies
from specdec.protocols import LayerShape

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# What training needed and drafting does not.
_IGNORED = ("t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight")

# Left over from the config of the target that a head's config was copied from; a head that had experts would hold
# tensors of them, which are then unexpected.
_OF_THE_TARGET = ("num_experts", "num_local_experts", "n_routed_experts")


def body_config(files: Files, *, inside_target: bool = False) -> ModelConfig:
    """The numbers of a head's layers, with biases and norms of queries and keys where the first has tensors of them.

    From config.json, or from what lies in it under `transformer_layer_config` or `text_config`. `inside_target`: it is
    the target's config, of which one layer with full attention is asked for. Raises `ModelError` naming config.json
    and the key.
    """
    raw = files.config
    for nested in ("transformer_layer_config", "text_config"):
        raw = raw[nested] if isinstance(raw.get(nested), Mapping) else raw
    changed = {key: value for key, value in raw.items() if key not in _OF_THE_TARGET}
    kinds = changed.get("layer_types")
    if inside_target:
        changed |= {"num_hidden_layers": 1, "layer_types": None, "use_sliding_window": False}
        changed |= {"partial_rotary_factor": None, "rope_parameters": _without_share(changed.get("rope_parameters"))}
    elif isinstance(kinds, list) and all(kind == FULL for kind in kinds):
        changed["layer_types"] = None  # whatever its length: nothing is said
    changed["model_type"] = "qwen3" if raw.get("model_type") == "qwen3" else "llama"
    config = ModelConfig.from_dict(changed, str(files.config_file))

    def has(name: str) -> bool:
        return f"layers.0.{name}" in files.tensors

    return replace(
        config,
        attention_bias=has("self_attn.q_proj.bias"),
        output_bias=has("self_attn.o_proj.bias"),
        mlp_bias=has("mlp.gate_proj.bias"),
        qk_norm=config.qk_norm or has("self_attn.q_norm.weight"),
    )


def _without_share(rope: object) -> object:
    """Who asks for one layer of a target looks after `partial_rotary_factor` himself."""
    return {k: v for k, v in rope.items() if k != "partial_rotary_factor"} if isinstance(rope, Mapping) else rope


def same_width(config: ModelConfig, files: Files, target: Target) -> ModelConfig:
    """`config`, if its width is the target's, whose hidden states a head takes as they are; else `ModelError`."""
    if config.hidden_size != target.hidden_size:
        raise ModelError(
            f"{files.config_file}: hidden_size is {config.hidden_size}, the target's is {target.hidden_size}; "
            "a head of this family fits only targets of its own width"
        )
    return config


def layer_shapes(config: ModelConfig) -> list[LayerShape]:
    """What each of the layers keeps a token."""
    return [LayerShape(config.num_kv_heads, config.head_dim)] * config.num_layers


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Of all layers: kinds of layers differ in their windows only."""
    return frequencies(next(iter(config.ropes.values())), config.rotary_dim or config.head_dim)


class Ends(nn.Module):
    """A head's own embedding and lm_head where its file has them, else the target's."""

    def __init__(self, config: ModelConfig, target: Target, draft_vocab_size: int, files: Files) -> None:
        super().__init__()
        V, D = config.vocab_size, config.hidden_size
        own_embedding, own_head = EMBEDDING in files.tensors, HEAD in files.tensors
        tied = config.tie_word_embeddings and own_embedding and not own_head and draft_vocab_size == V
        lacking = [name for name, own in ((EMBEDDING, own_embedding), (HEAD, own_head or tied)) if not own]
        if lacking and target.hidden_size != D:
            raise ModelError(
                f"{files.folder}: missing tensors: {', '.join(lacking)}; the target's do not fit, "
                f"as its hidden_size is {target.hidden_size}, the head's {D}"
            )
        if not (own_head or tied) and draft_vocab_size != target.vocab_size:
            raise ModelError(
                f"{files.folder}: missing tensors: {HEAD}; the target's does not fit, "
                f"as its vocab_size is {target.vocab_size}, the head's {draft_vocab_size}"
            )
        self.target = target
        self.embed_tokens = nn.Embedding(V, D, _weight=torch.empty(V, D)) if own_embedding else None
        self.lm_head = nn.Linear(D, draft_vocab_size, bias=False) if own_head or tied else None
        if tied and self.lm_head is not None and self.embed_tokens is not None:
            self.lm_head.weight = self.embed_tokens.weight

    def embed(self, tokens_R: Tensor) -> Tensor:
        """`[R, D]`. Ids past the head's own embedding, which a target with more padding may pick, read its last row."""
        if self.embed_tokens is None:
            return self.target.embed(tokens_R)
        out: Tensor = self.embed_tokens(tokens_R.clamp(max=self.embed_tokens.num_embeddings - 1))
        return out

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """fp32 `[L, W]`."""
        if self.lm_head is None:
            return self.target.head(hidden_LD)
        return wide_logits(self.lm_head, hidden_LD)


def fill_head(files: Files, body: nn.Module, ends: Ends, device: torch.device, dtype: torch.dtype) -> None:
    """Read all tensors of `files` into the two. Raises `ModelError` listing those missing, unexpected or misshapen."""
    outer = [name for name in files.tensors if name in (EMBEDDING, HEAD)]
    inner = [name for name in files.tensors if name not in outer and not _ignorable(name)]
    fill(body, files.read(inner), files.folder, device=device, dtype=dtype)
    fill(ends, files.read(outer), files.folder, device=device, dtype=dtype)


def _ignorable(name: str) -> bool:
    return name in _IGNORED or name.endswith("rotary_emb.inv_freq")


def target_ids(
    files: Files, config: ModelConfig, draft_vocab_size: int, target: Target, device: torch.device
) -> Tensor | None:
    """The target's id of each draft id: d2t holds how far apart the two are. None where they are the same. A head with
    the whole vocabulary of its config needs none, also if the target's is padded further.

    Raises `ModelError` where a smaller vocabulary has no d2t, or one that names no id of the target or one id twice.
    """
    W, V = draft_vocab_size, target.vocab_size
    if "d2t" not in files.tensors:
        if W == config.vocab_size < V:
            return torch.arange(W, device=device)
        if W != V:
            raise ModelError(
                f"{files.folder}: missing tensors: d2t (the head's vocabulary has {W} ids, the target's {V})"
            )
        return None
    offsets = next(tensor for _, tensor in files.read(["d2t"]))
    if offsets.is_floating_point() or offsets.shape != (W,):
        kind = str(offsets.dtype).removeprefix("torch.")
        raise ModelError(f"{files.folder}: d2t is {kind} {list(offsets.shape)}, expected integers [{W}]")
    ids = checked_ids(torch.arange(W) + offsets, V, f"{files.folder}: d2t")
    return None if W == V and bool((ids == torch.arange(W)).all()) else ids.to(device)


def checked_ids(ids: Tensor, vocab_size: int, what: str) -> Tensor:
    """`ids` as int64 `[W]`. Raises `ModelError` saying `what` gave them, unless all are different ids of the target."""
    if ids.is_floating_point() or ids.ndim != 1:
        kind = str(ids.dtype).removeprefix("torch.")
        raise ModelError(f"{what} is {kind} {list(ids.shape)}, expected one axis of integers")
    known = set(ids.tolist())
    if len(known) != len(ids) or not known or min(known) < 0 or max(known) >= vocab_size:
        raise ModelError(f"{what} must give {len(ids)} different ids of the target, all below {vocab_size}")
    return ids.to(torch.int64)
