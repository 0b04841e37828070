"""EAGLE (Li et al., arXiv 2401.15077): one layer over the next token and the target's last hidden state, which guesses
the hidden state that follows. EAGLE-2 (arXiv 2406.16858) and HASS (arXiv 2408.15766) are other trees and another
training of the same model.

R rows, L logits rows, D width.
"""

from __future__ import annotations

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
from specdec.drafters.heads.conventions import overridden
from specdec.drafters.heads.files import Files
from specdec.kernels.norm_rope import Rotary, rotary_table
from specdec.models.config import ModelConfig
from specdec.models.layers import Norm
from specdec.models.llama import Attention, Layer, Mlp
from specdec.protocols import Attend, LayerShape


@dataclass(frozen=True, slots=True)
class EagleConvention:
    """`features` says whether the target's last hidden state is taken "before_norm" or "after_norm"; `add_para_norm`
    whether both halves are normed before `fc`."""

    features: Literal["before_norm", "after_norm"] = "after_norm"
    embed_first: bool = True
    add_para_norm: bool = False


class FirstLayer(nn.Module):
    """A Llama layer whose attention reads its input without a norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, 0)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x_RD: Tensor, rotary: Rotary, attend: Attend) -> tuple[Tensor, Tensor]:
        """See `Layer.forward`."""
        x_RD, h_RD = self.post_attention_layernorm.of_sum(x_RD, self.self_attn(x_RD, rotary, attend))
        return x_RD, self.mlp(h_RD)


class Body(nn.Module):
    """Everything but the embedding, under the names that files use."""

    frequencies: Tensor

    def __init__(self, config: ModelConfig, convention: EagleConvention, *, fc_bias: bool) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.embedding_layernorm = Norm(D, eps) if convention.add_para_norm else None
        self.hidden_states_layernorm = Norm(D, eps) if convention.add_para_norm else None
        self.fc = nn.Linear(2 * D, D, bias=fc_bias)
        later = (Layer(config, layer) for layer in range(1, config.num_layers))
        self.layers = nn.ModuleList([FirstLayer(config), *later])
        self.register_buffer("frequencies", rotary_frequencies(config), persistent=False)


class Eagle(nn.Module):
    """Satisfies `Head`."""

    def __init__(
        self,
        body: Body,
        ends: Ends,
        convention: EagleConvention,
        *,
        layers: Sequence[LayerShape],
        taps: tuple[int, ...],
        targets: Tensor | None,
    ) -> None:
        super().__init__()
        self.name, self.layers, self.taps, self.targets = "eagle", layers, taps, targets
        self.body, self.ends, self.convention = body, ends, convention

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """See `Head.features`: the target's hidden state as it is."""
        return taps[0]

    def forward(self, tokens_R: Tensor, features_RD: Tensor | None, positions_R: Tensor, attend: Attend) -> Tensor:
        """See `Head.forward`: the hidden state that the target is guessed to have next."""
        assert features_RD is not None
        e_RD, f_RD = self.ends.embed(tokens_R), features_RD
        if self.body.embedding_layernorm is not None and self.body.hidden_states_layernorm is not None:
            e_RD, f_RD = self.body.embedding_layernorm(e_RD), self.body.hidden_states_layernorm(f_RD)
        x_RD: Tensor = self.body.fc(torch.cat((e_RD, f_RD) if self.convention.embed_first else (f_RD, e_RD), -1))
        rotary = rotary_table(positions_R, self.body.frequencies)
        first, later = self.body.layers[0], cast(list[Layer], [*self.body.layers][1:])
        x_RD, delta_RD = first(x_RD, rotary, attend)
        for layer in later:
            x_RD, h_RD = layer.input_layernorm.of_sum(x_RD, delta_RD)
            x_RD, delta_RD = layer(x_RD, h_RD, rotary, attend)
        out: Tensor = x_RD + delta_RD
        return out

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """See `Head.logits`: the target's head, with no norm before it."""
        return self.ends.logits(hidden_LD)


def open_eagle(
    files: Files, target: Target, overrides: Mapping[str, object], device: torch.device, dtype: torch.dtype
) -> Eagle:
    """See `open_head`. Whether `fc` has a bias is read off the tensors: configs are silent, and publishers differ."""
    convention = EagleConvention(add_para_norm="embedding_layernorm.weight" in files.tensors)
    convention = overridden(convention, overrides, "eagle")
    config = same_width(body_config(files), files, target)
    draft_vocab_size = files.width(HEAD, 0) if HEAD in files.tensors else target.vocab_size
    with torch.device("meta"):
        body = Body(config, convention, fc_bias="fc.bias" in files.tensors)
        ends = Ends(config, target, draft_vocab_size, files)
    fill_head(files, body, ends, device, dtype)
    return Eagle(
        body,
        ends,
        convention,
        layers=layer_shapes(config),
        taps=(target.num_layers + (convention.features == "after_norm"),),
        targets=target_ids(files, config, draft_vocab_size, target, device),
    ).eval()
