"""Gemma 3, text only (Gemma Team, arXiv 2503.19786): five layers with a sliding window, then one without.

R rows, L logits rows, V vocabulary, D width, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import cast

import torch
from torch import Tensor, nn

from specdec.kernels.activation import geglu
from specdec.kernels.head import wide_logits
from specdec.kernels.norm_rope import Rotary, rotary_table
from specdec.models.config import SLIDING, ModelConfig
from specdec.models.layers import Norm, frequencies
from specdec.protocols import Attend, LayerShape


def norm(size: int, config: ModelConfig, heads: int | None = None) -> Norm:
    """Gemma's norms multiply by 1 + w."""
    return Norm(size, config.rms_norm_eps, offset=1.0, heads=heads)


@cache
def rounded(value: float, dtype: torch.dtype) -> float:
    """The number of `dtype` next to `value`, known to the host: a forward waits for none."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()


class Attention(nn.Module):
    """`parts` says which rows of what is merged come from which tensor on disk."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        H, G, K = config.num_heads, config.num_kv_heads, config.head_dim
        self.layer, self.scale = layer, config.attention_scale
        self.window = config.sliding_window if config.layer_kinds[layer] == SLIDING else None
        self.heads = (H, G, K)
        self.parts = {
            "qkv_proj": {"q_proj": H * K, "k_proj": G * K, "v_proj": G * K},
            "qk_norm": {"q_norm": H, "k_norm": G},
        }
        self.qkv_proj = nn.Linear(config.hidden_size, (H + 2 * G) * K, bias=config.attention_bias)
        self.qk_norm = norm(K, config, heads=H + G)
        self.o_proj = nn.Linear(H * K, config.hidden_size, bias=config.output_bias)

    def forward(self, x_RD: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        H, G, K = self.heads
        qk, v = self.qkv_proj(x_RD).view(-1, H + 2 * G, K).split_with_sizes((H + G, G), 1)
        mixed_RHK = attend(self.layer, self.qk_norm(qk), v, rotary, scale=self.scale, window=self.window)
        out: Tensor = self.o_proj(mixed_RHK.flatten(1))
        return out


class Mlp(nn.Module):
    """GeGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, width = config.hidden_size, config.intermediate_size
        self.parts = {"gate_up_proj": {"gate_proj": width, "up_proj": width}}
        self.gate_up_proj = nn.Linear(D, 2 * width, bias=False)
        self.down_proj = nn.Linear(width, D, bias=False)

    def forward(self, x_RD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(geglu(self.gate_up_proj(x_RD)))
        return out


class Layer(nn.Module):
    """Norms before and after each half."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        D = config.hidden_size
        self.input_layernorm, self.post_attention_layernorm = norm(D, config), norm(D, config)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(D, config), norm(D, config)
        self.self_attn = Attention(config, layer)
        self.mlp = Mlp(config)

    def forward(
        self, x_RD: Tensor, h_RD: Tensor, rotary: Rotary, attend: Attend, following: Norm
    ) -> tuple[Tensor, Tensor]:
        """The stream that leaves the layer, and that behind the norm that reads it next, `following`. `h_RD` is `x_RD`,
        which enters the layer, behind its first norm."""
        mixed_RD = self.self_attn(h_RD, rotary, attend)
        x_RD, h_RD = self.pre_feedforward_layernorm.of_normed_sum(x_RD, mixed_RD, self.post_attention_layernorm)
        return following.of_normed_sum(x_RD, self.mlp(h_RD), self.post_feedforward_layernorm)


class Body(nn.Module):
    """Everything below the head, under the name that files on disk use. One buffer of frequencies a kind of layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        V, D = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(V, D, _weight=torch.empty(V, D))
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = norm(config.hidden_size, config)
        for kind, rope in config.ropes.items():
            self.register_buffer(kind, frequencies(rope, config.head_dim), persistent=False)


class Gemma3(nn.Module):
    """Satisfies `protocols.Model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.layers = [LayerShape(config.num_kv_heads, config.head_dim)] * config.num_layers
        self.layer_kinds, self.embedding_scale = config.layer_kinds, config.hidden_size**0.5
        self.final_softcap = config.final_softcap
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def embed(self, tokens_R: Tensor) -> Tensor:
        """See `protocols.Model.embed`."""
        x_RD: Tensor = self.model.embed_tokens(tokens_R)
        # The scale is rounded to the dtype first, as it was in training.
        return x_RD * rounded(self.embedding_scale, x_RD.dtype)

    def forward(
        self, tokens_R: Tensor, positions_R: Tensor, attend: Attend, taps: Sequence[int] = (), depth: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """See `protocols.Model.forward`."""
        layers = cast(list[Layer], list(islice(self.model.layers, depth)))
        norms = [*(layer.input_layernorm for layer in layers), self.model.norm]
        tables = {kind: rotary_table(positions_R, self.model.get_buffer(kind)) for kind in set(self.layer_kinds)}
        x_RD = self.embed(tokens_R)
        h_RD = norms[0](x_RD)
        streams = {0: x_RD}
        for index, (layer, following) in enumerate(zip(layers, norms[1:], strict=True)):
            x_RD, h_RD = layer(x_RD, h_RD, tables[self.layer_kinds[index]], attend, following)
            if index + 1 in taps:
                streams[index + 1] = x_RD
        streams[len(layers) + 1] = h_RD
        return h_RD, [streams[tap] for tap in taps]

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """fp32 logits `[L, V]`."""
        logits_LV = wide_logits(self.lm_head, hidden_LD)
        if self.final_softcap is not None:
            logits_LV = torch.tanh(logits_LV / self.final_softcap) * self.final_softcap
        return logits_LV
