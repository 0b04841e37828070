"""Multi-token prediction: one more layer that came with the target (DeepSeek-V3, arXiv 2412.19437, 2.2), reading the
next token and the target's last hidden state, each behind a norm, and drafting on from what it puts out itself.

R rows, L logits rows, D width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from specdec.drafters.heads import Target
from specdec.drafters.heads.body import body_config, layer_shapes, rotary_frequencies, same_width
from specdec.drafters.heads.conventions import Raw, overridden
from specdec.drafters.heads.experts import Mixture, Routing, unfused
from specdec.drafters.heads.files import Files, Stored
from specdec.errors import ModelError
from specdec.kernels.norm_rope import rotary_table
from specdec.loader import fill
from specdec.models.config import MTP_COUNTS, ModelConfig
from specdec.models.layers import Norm
from specdec.models.llama import Layer
from specdec.protocols import Attend, LayerShape

_OUTER = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight")
_PLUS_ONE = ("qwen3_next", "qwen3_5")
# What configs leave out: the share of a head that is rotated.
_ROTATED = {"qwen3_next": 0.25, "qwen3_5": 0.25, "glm4_moe": 0.5}
_IGNORED = re.compile(r"(embed_tokens|lm_head|verifier_lm_head|verifier_norm)\.weight")


@dataclass(frozen=True, slots=True)
class Layout:
    """How one publisher spells the tensors: `pattern` finds module number and rest, `names` turns rests into ours,
    `copies` repeat tensors of the target."""

    pattern: re.Pattern[str]
    names: Mapping[str, str]
    embed_first: bool = True
    copies: tuple[str, ...] = ()


_MIMO = {
    "token_layernorm.weight": "enorm.weight",
    "hidden_layernorm.weight": "hnorm.weight",
    "input_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "norm.weight",
}
_QWEN = {
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "fc.weight": "eh_proj.weight",
}
_DEEPSEEK = {"shared_head.norm.weight": "norm.weight"}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
DEEPSEEK = Layout(re.compile(r"layers\.(\d+)\.(.+)"), _DEEPSEEK, copies=_COPIES)
MIMO = Layout(re.compile(r"mtp_layers\.(\d+)\.(.+)"), _MIMO, embed_first=False)
SPECULATORS = Layout(re.compile(r"mtp_layers\.(\d+)\.(.+)"), _MIMO)
QWEN = Layout(re.compile(r"mtp\.(?:layers\.(\d+)\.)?(.+)"), _QWEN)


@dataclass(frozen=True, slots=True)
class MtpConvention:
    """`features`: the target's last hidden state "before_norm" or "after_norm"; `recurrence`: what the next level reads
    of this one, "post_norm" or "pre_norm"; `norm_plus_one`: norms multiply by 1 + w."""

    features: Literal["before_norm", "after_norm"] = "after_norm"
    recurrence: Literal["pre_norm", "post_norm"] = "post_norm"
    embed_first: bool = True
    norm_plus_one: bool = False


class Body(nn.Module):
    """The module's tensors, in one spelling."""

    frequencies: Tensor

    def __init__(self, config: ModelConfig, mlp: nn.Module | None) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = Norm(D, eps), Norm(D, eps), Norm(D, eps)
        self.eh_proj = nn.Linear(2 * D, D, bias=False)
        layer = Layer(config, 0)
        if mlp is not None:
            layer.mlp = mlp  # type: ignore[assignment]
        self.layers = nn.ModuleList([layer])
        self.register_buffer("frequencies", rotary_frequencies(config), persistent=False)


class Mtp(nn.Module):
    """Satisfies `Head`. Embedding and lm_head are the target's."""

    targets: Tensor | None = None

    def __init__(
        self,
        body: Body,
        convention: MtpConvention,
        target: Target,
        *,
        layers: Sequence[LayerShape],
        taps: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.name, self.layers, self.taps = "mtp", layers, taps
        self.body, self.convention, self.target = body, convention, target

    @property
    def has_experts(self) -> bool:
        """Whether its layer is a mixture: which experts run is read back from what the router computes."""
        return any(isinstance(module, Mixture) for module in self.body.modules())

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """See `Head.features`: the target's hidden state as it is."""
        return taps[0]

    def forward(self, tokens_R: Tensor, features_RD: Tensor | None, positions_R: Tensor, attend: Attend) -> Tensor:
        """See `Head.forward`: as `recurrence` says."""
        assert features_RD is not None
        e_RD, h_RD = self.body.enorm(self.target.embed(tokens_R)), self.body.hnorm(features_RD)
        x_RD: Tensor = self.body.eh_proj(torch.cat((e_RD, h_RD) if self.convention.embed_first else (h_RD, e_RD), -1))
        rotary = rotary_table(positions_R, self.body.frequencies)
        layer = cast(Layer, self.body.layers[0])
        x_RD, delta_RD = layer(x_RD, layer.input_layernorm(x_RD), rotary, attend)
        reads_normed = self.convention.recurrence == "post_norm"
        return self.body.norm.of_sum(x_RD, delta_RD)[1] if reads_normed else x_RD + delta_RD

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """See `Head.logits`: the target's head behind the module's own norm."""
        normed_LD = hidden_LD if self.convention.recurrence == "post_norm" else self.body.norm(hidden_LD)
        return self.target.head(normed_LD)


def open_mtp(
    files: Files, target: Target, overrides: Mapping[str, object], device: torch.device, dtype: torch.dtype
) -> Mtp:
    """See `open_head`. Raises `ModelError` for more than one module, and for attention that is not grouped queries."""
    raw = Raw(files.config, files.config_file, nested=("text_config", "transformer_layer_config", "rope_parameters"))
    for key in MTP_COUNTS:
        if raw.get(key, int, 1) > 1:
            raise ModelError(f"{files.config_file}: {key} is {raw.get(key, int, 1)}, but only one module can be run")
    layout = _layout(files)
    files = _module(files, layout)
    model_type = raw.get("model_type", str, "")
    convention = MtpConvention(embed_first=layout.embed_first, norm_plus_one=model_type.startswith(_PLUS_ONE))
    convention = overridden(convention, overrides, "mtp")
    config = same_width(_config(files, raw, model_type), files, target)
    with torch.device("meta"):
        body = Body(config, _mixture(files, raw, config))
    for module in body.modules():
        if isinstance(module, Norm) and convention.norm_plus_one:
            module.offset = 1.0
    fill(body, unfused(files.read(list(files.tensors))), files.folder, device=device, dtype=dtype)
    taps = (target.num_layers + (convention.features == "after_norm"),)
    return Mtp(body, convention, target, layers=layer_shapes(config), taps=taps).eval()


def _layout(files: Files) -> Layout:
    """By the names; those of MiMo and of `speculators` are equal, the order of their halves is not."""
    if any(name.startswith("mtp_layers.") for name in files.tensors):
        return SPECULATORS if "speculators_model_type" in files.config else MIMO
    if any(name.startswith("mtp.") for name in files.tensors):
        return QWEN
    return DEEPSEEK


def _module(files: Files, layout: Layout) -> Files:
    """The tensors of the one module in our spelling, without those of the target around it."""
    found: dict[str, dict[str, Stored]] = {}
    for name, stored in files.tensors.items():
        if match := layout.pattern.fullmatch(name):
            number, rest = match[1] or "0", match[2]
            if rest not in layout.copies:
                inner = rest in _OUTER or rest in layout.names
                found.setdefault(number, {})[layout.names.get(rest, rest if inner else f"layers.0.{rest}")] = stored
        elif "speculators_model_type" in files.config and not _IGNORED.fullmatch(name):
            raise ModelError(f"{files.folder}: unexpected tensors: {name}")
    modules = {
        number: tensors for number, tensors in found.items() if "eh_proj.weight" in tensors or layout is not DEEPSEEK
    }
    if len(modules) != 1:
        shown = ", ".join(sorted(modules)) or "none"
        raise ModelError(f"{files.folder}: holds the modules {shown} for multi-token prediction, expected one")
    return replace(files, tensors=next(iter(modules.values())))


def _config(files: Files, raw: Raw, model_type: str) -> ModelConfig:
    """The layer's numbers; whether its queries bring a gate is seen by their size."""
    if foreign := [
        name for name in files.tensors if re.match(r"layers\.0\.(self_attn\.(kv_a|q_a)_|linear_attn\.)", name)
    ]:
        raise ModelError(
            f"{files.folder}: the module for multi-token prediction has {foreign[0]}: latent and linear "
            "attention cannot be run, only attention with keys and values of its own"
        )
    config = body_config(files, inside_target=True)
    gated = files.width("layers.0.self_attn.q_proj.weight", 0) == 2 * config.num_heads * config.head_dim
    usual = next((share for family, share in _ROTATED.items() if model_type.startswith(family)), 1.0)
    share = raw.number("partial_rotary_factor", usual)
    if share != 1 and any(rope.kind == "yarn" for rope in config.ropes.values()):
        raise ModelError(f"{files.config_file}: rope_type 'yarn' with partial_rotary_factor {share} is not supported")
    return replace(config, output_gate=gated, rotary_dim=round(config.head_dim * share))


def _mixture(files: Files, raw: Raw, config: ModelConfig) -> Mixture | None:
    """The layer's experts, if it has a router: how many and how wide is seen by the tensors."""
    mlp = "layers.0.mlp."
    if f"{mlp}gate.weight" not in files.tensors:
        return None

    def width(*names: str) -> int:
        name = next((mlp + name for name in names if mlp + name in files.tensors), None)
        return 0 if name is None else files.width(name, -1)

    visited = raw.get("num_experts_per_tok", int, 0)
    num_experts = files.width(f"{mlp}gate.weight", 0)
    if not 1 <= visited <= num_experts:
        raise ModelError(f"{files.config_file}: num_experts_per_tok must be 1 to {num_experts}, got {visited}")
    corrected = f"{mlp}gate.e_score_correction_bias" in files.tensors
    routing = Routing(
        num_experts,
        visited,
        normalise=raw.get("norm_topk_prob", bool, corrected),
        corrected=corrected,
        groups=raw.get("n_group", int, 1),
        kept_groups=raw.get("topk_group", int, 1),
        factor=raw.number("routed_scaling_factor", 1.0) if corrected else 1.0,
    )
    if num_experts % routing.groups:
        raise ModelError(f"{files.config_file}: n_group must divide the {num_experts} experts, got {routing.groups}")
    return Mixture(
        config,
        routing,
        width=width("experts.0.down_proj.weight", "experts.down_proj"),
        gated_width=width("shared_expert.down_proj.weight"),
        shared_width=width("shared_experts.down_proj.weight"),
    )
