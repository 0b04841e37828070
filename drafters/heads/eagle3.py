"""EAGLE-3 (Li et al., arXiv 2503.01840): one layer over the next token and what three layers of the target made of the
last, with a vocabulary of its own.

R rows, L logits rows, A captured layers, T target width, D width, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from specdec.drafters.heads import Target
from specdec.drafters.heads.body import (
    HEAD,
    Ends,
    body_config,
    fill_head,
    layer_shapes,
    rotary_frequencies,
    same_width,
    target_ids,
)
from specdec.drafters.heads.conventions import Raw, overridden
from specdec.drafters.heads.files import Files
from specdec.errors import ModelError
from specdec.kernels.norm_rope import Rotary, rotary_table
from specdec.models.config import ModelConfig
from specdec.models.layers import Norm
from specdec.models.llama import Attention, Layer, Mlp
from specdec.protocols import Attend, LayerShape

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Eagle3Convention:
    """`aux_layers` are ids as the file's publisher counts them: by "boundary" k (what enters layer k) or by "output" of
    layer k; None chooses. `features` says what a head without `fc` reads: the last layer "before_norm" or "after_norm".
    """

    aux_layers: tuple[int, ...] | None = None
    aux_convention: Literal["boundary", "output"] | None = None
    features: Literal["before_norm", "after_norm"] = "after_norm"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    embed_first: bool = True
    logit_scale: float = 1.0


class FirstLayer(nn.Module):
    """Its queries, keys and values read the token and the features side by side, each behind a norm of its own."""

    def __init__(self, config: ModelConfig, convention: Eagle3Convention) -> None:
        super().__init__()
        D = config.hidden_size
        self.norm_before_residual, self.embed_first = convention.norm_before_residual, convention.embed_first
        self.input_layernorm = Norm(D, config.rms_norm_eps)
        self.hidden_norm = Norm(D, config.rms_norm_eps)
        self.self_attn = Attention(config, 0, width=2 * D)
        self.post_attention_layernorm = Norm(D, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, embedded_RD: Tensor, h_RD: Tensor, rotary: Rotary, attend: Attend) -> tuple[Tensor, Tensor]:
        """See `Layer.forward`."""
        e_RD, normed_RD = self.input_layernorm(embedded_RD), self.hidden_norm(h_RD)
        both = (e_RD, normed_RD) if self.embed_first else (normed_RD, e_RD)
        residual_RD = normed_RD if self.norm_before_residual else h_RD
        mixed_RD = self.self_attn(torch.cat(both, -1), rotary, attend)
        x_RD, h_RD = self.post_attention_layernorm.of_sum(residual_RD, mixed_RD)
        return x_RD, self.mlp(h_RD)


class Body(nn.Module):
    """Everything but embedding and lm_head, under the names that files use. `sizes` are the widths of what is tapped;
    `has_fc` is false for a head that reads one feature as it is."""

    frequencies: Tensor

    def __init__(
        self, config: ModelConfig, convention: Eagle3Convention, sizes: Sequence[int], *, has_fc: bool, fc_bias: bool
    ) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        later = (Layer(config, layer) for layer in range(1, config.num_layers))
        self.input_norm = Norm(sum(sizes), eps) if convention.norm_before_fc else None
        self.fc_norm = nn.ModuleList(Norm(size, eps) for size in sizes) if convention.fc_norm else None
        self.fc = nn.Linear(sum(sizes), D, bias=fc_bias) if has_fc else None
        self.layers = nn.ModuleList([FirstLayer(config, convention), *later])
        self.norm = Norm(D, eps)
        self.register_buffer("frequencies", rotary_frequencies(config), persistent=False)


class Eagle3(nn.Module):
    """Satisfies `Head`."""

    def __init__(
        self,
        body: Body,
        ends: Ends,
        convention: Eagle3Convention,
        *,
        layers: Sequence[LayerShape],
        taps: tuple[int, ...],
        targets: Tensor | None,
    ) -> None:
        super().__init__()
        self.name, self.layers, self.taps, self.targets = "eagle3", layers, taps, targets
        self.body, self.ends, self.convention = body, ends, convention

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """See `Head.features`: what was tapped side by side, through `fc`."""
        if self.body.fc_norm is not None:
            taps = [norm(tap) for norm, tap in zip(self.body.fc_norm, taps, strict=True)]
        x_RT = torch.cat(list(taps), -1)
        if self.body.input_norm is not None:
            x_RT = self.body.input_norm(x_RT)
        return x_RT if self.body.fc is None else self.body.fc(x_RT)

    def forward(self, tokens_R: Tensor, features_RD: Tensor | None, positions_R: Tensor, attend: Attend) -> Tensor:
        """See `Head.forward`: before the final norm, unless `norm_output`."""
        assert features_RD is not None
        first, later = self.body.layers[0], cast(list[Layer], [*self.body.layers][1:])
        rotary = rotary_table(positions_R, self.body.frequencies)
        x_RD, delta_RD = first(self.ends.embed(tokens_R), features_RD, rotary, attend)
        for layer in later:
            x_RD, h_RD = layer.input_layernorm.of_sum(x_RD, delta_RD)
            x_RD, delta_RD = layer(x_RD, h_RD, rotary, attend)
        return self.body.norm.of_sum(x_RD, delta_RD)[1] if self.convention.norm_output else x_RD + delta_RD

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """See `Head.logits`."""
        normed_LD = hidden_LD if self.convention.norm_output else self.body.norm(hidden_LD)
        return self.ends.logits(normed_LD) * self.convention.logit_scale


def open_eagle3(
    files: Files, target: Target, overrides: Mapping[str, object], device: torch.device, dtype: torch.dtype
) -> Eagle3:
    """See `open_head`."""
    convention = overridden(convention_of(files), overrides, "eagle3")
    return build(files, target, convention, device, dtype)


def build(
    files: Files, target: Target, convention: Eagle3Convention, device: torch.device, dtype: torch.dtype
) -> Eagle3:
    """The head of `files`, read by `convention`. Raises `ModelError`."""
    raw, config = _raw(files), body_config(files)
    taps = _taps(files, raw, convention, target)
    draft_vocab_size = raw.get("draft_vocab_size", int, config.vocab_size)
    if draft_vocab_size < 1:
        raise ModelError(f"{files.config_file}: draft_vocab_size must be 1 or more, got {draft_vocab_size}")
    if draft_vocab_size == config.vocab_size and HEAD not in files.tensors and not config.tie_word_embeddings:
        draft_vocab_size = target.vocab_size  # whose head it is
    has_fc, sizes = "fc.weight" in files.tensors, [target.hidden_size] * len(taps)
    if not has_fc:
        same_width(config, files, target)
    with torch.device("meta"):
        body = Body(config, convention, sizes, has_fc=has_fc, fc_bias="fc.bias" in files.tensors)
        ends = Ends(config, target, draft_vocab_size, files)
    fill_head(files, body, ends, device, dtype)
    targets = target_ids(files, config, draft_vocab_size, target, device)
    return Eagle3(body, ends, convention, layers=layer_shapes(config), taps=taps, targets=targets).eval()


def _raw(files: Files) -> Raw:
    return Raw(files.config, files.config_file, nested=("eagle_config",))


def convention_of(files: Files) -> Eagle3Convention:
    """What config.json says; where it is silent, what the tensors show. Old `speculators` files that leave out
    `norm_before_residual` mean true."""
    raw, speculators = _raw(files), files.config.get("speculators_model_type")
    ids, outputs = raw.ids("eagle_aux_hidden_state_layer_ids"), raw.ids("target_layer_ids")
    return Eagle3Convention(
        aux_layers=ids or outputs,
        aux_convention="boundary" if speculators is not None else "output" if outputs and not ids else None,
        norm_before_residual=raw.get("norm_before_residual", bool, speculators == "eagle3"),
        norm_before_fc=raw.get("norm_before_fc", bool, "input_norm.weight" in files.tensors),
        fc_norm=raw.get("fc_norm", bool, raw.get("use_aux_norm", bool, "fc_norm.0.weight" in files.tensors)),
        norm_output=raw.get("norm_output", bool, False),
        logit_scale=raw.number("logit_scale", 1.0),
    )


def _taps(files: Files, raw: Raw, convention: Eagle3Convention, target: Target) -> tuple[int, ...]:
    """Which streams of the target enter `fc`, whose width says how many they are."""
    n = target.num_layers
    if not raw.get("use_aux_hidden_state", bool, True) and "fc.weight" not in files.tensors:
        return (n + (convention.features == "after_norm"),)
    width = files.width("fc.weight", 1)
    count, rest = divmod(width, target.hidden_size)
    if rest:
        raise ModelError(
            f"{files.folder}: fc.weight reads {width} numbers, which is no multiple of the target's "
            f"hidden_size {target.hidden_size}"
        )
    usual = (2, n // 2, n - 3)
    ids, counted = convention.aux_layers or (usual if count == 3 else ()), convention.aux_convention
    if len(ids) != count:
        raise ModelError(
            f"{files.folder}: fc.weight reads {count} layers of the target, but {list(ids)} are named; "
            "name them with the override aux_layers"
        )
    if counted is None:
        sure = ids == usual or n in ids
        counted = "output" if ids[0] == 1 and not sure else "boundary"
        if counted == "boundary" and not sure:
            log.warning(
                "%s: takes the layers %s by what enters them; if few drafts are accepted, try aux_convention output",
                files.folder,
                list(ids),
            )
    taps = tuple(layer + (counted == "output") for layer in ids)
    if min(taps) < 0 or max(taps) > n:
        raise ModelError(
            f"{files.folder}: the layers {list(ids)} (by {counted}) are not all among the target's {n}; "
            "name them with the overrides aux_layers and aux_convention"
        )
    return taps
