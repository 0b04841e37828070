"""Llama (Touvron et al., arXiv 2302.13971; grouped queries from arXiv 2307.09288). SmolLM2 is one. Qwen 2 adds biases
(arXiv 2407.10671), Qwen 3 norms of queries and keys (arXiv 2505.09388); gates of the output are Qwen3-Next's.

R rows, L logits rows, V vocabulary, D width, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import cast

import torch
from torch import Tensor, nn

from specdec.kernels.activation import swiglu
from specdec.kernels.head import wide_logits
from specdec.kernels.norm_rope import Rotary, rotary_table
from specdec.models.config import SLIDING, ModelConfig
from specdec.models.layers import Norm, frequencies
from specdec.protocols import Attend, LayerShape


class Attention(nn.Module):
    """`parts` says which rows of what is merged come from which tensor on disk. `width` is what it reads, D if None."""

    def __init__(self, config: ModelConfig, layer: int, width: int | None = None) -> None:
        super().__init__()
        H, G, K = config.num_heads, config.num_kv_heads, config.head_dim
        Q = 2 * H if config.output_gate else H
        self.layer, self.scale = layer, config.attention_scale
        self.window = config.sliding_window if config.layer_kinds[layer] == SLIDING else None
        self.heads, self.output_gate = (H, G, K), config.output_gate
        self.parts = {
            "qkv_proj": {"q_proj": Q * K, "k_proj": G * K, "v_proj": G * K},
            "qk_norm": {"q_norm": H, "k_norm": G},
        }
        self.qkv_proj = nn.Linear(width or config.hidden_size, (Q + 2 * G) * K, bias=config.attention_bias)
        self.qk_norm = Norm(K, config.rms_norm_eps, heads=H + G) if config.qk_norm else None
        self.o_proj = nn.Linear(H * K, config.hidden_size, bias=config.output_bias)

    def forward(self, x_RD: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        H, G, K = self.heads
        qkv, gate_RHK = self.qkv_proj(x_RD), None
        if self.output_gate:  # each head's query is followed by its gate
            q, kv = qkv.split_with_sizes((2 * H * K, 2 * G * K), -1)
            q, gate_RHK = q.view(-1, H, 2 * K).chunk(2, -1)
            qkv = torch.cat((q.flatten(1), kv), -1)
        qk, v = qkv.view(-1, H + 2 * G, K).split_with_sizes((H + G, G), 1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        mixed_RHK = attend(self.layer, qk, v, rotary, scale=self.scale, window=self.window)
        if gate_RHK is not None:
            mixed_RHK = mixed_RHK * gate_RHK.sigmoid()
        out: Tensor = self.o_proj(mixed_RHK.flatten(1))
        return out


class Mlp(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, width = config.hidden_size, config.intermediate_size
        self.parts = {"gate_up_proj": {"gate_proj": width, "up_proj": width}}
        self.gate_up_proj = nn.Linear(D, 2 * width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, D, bias=config.mlp_bias)

    def forward(self, x_RD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(swiglu(self.gate_up_proj(x_RD)))
        return out


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x_RD: Tensor, h_RD: Tensor, rotary: Rotary, attend: Attend) -> tuple[Tensor, Tensor]:
        """The stream in the middle of the layer, and what its second half adds, which is left to the norm that reads
        the sum next. `h_RD` is `x_RD`, which enters the layer, behind its first norm."""
        x_RD, h_RD = self.post_attention_layernorm.of_sum(x_RD, self.self_attn(h_RD, rotary, attend))
        return x_RD, self.mlp(h_RD)


class Body(nn.Module):
    """Everything below the head, under the name that files on disk use."""

    frequencies: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        V, D = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(V, D, _weight=torch.empty(V, D))
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        rope = next(iter(config.ropes.values()))  # one for all kinds of layers
        self.register_buffer("frequencies", frequencies(rope, config.head_dim), persistent=False)


class Llama(nn.Module):
    """Satisfies `protocols.Model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.layers = [LayerShape(config.num_kv_heads, config.head_dim)] * config.num_layers
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def embed(self, tokens_R: Tensor) -> Tensor:
        """See `protocols.Model.embed`."""
        x_RD: Tensor = self.model.embed_tokens(tokens_R)
        return x_RD

    def forward(
        self, tokens_R: Tensor, positions_R: Tensor, attend: Attend, taps: Sequence[int] = (), depth: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """See `protocols.Model.forward`."""
        layers = cast(list[Layer], list(islice(self.model.layers, depth)))
        norms = [*(layer.input_layernorm for layer in layers), self.model.norm]
        rotary = rotary_table(positions_R, self.model.frequencies)
        x_RD = self.embed(tokens_R)
        h_RD = norms[0](x_RD)
        streams = {0: x_RD}
        for index, (layer, norm) in enumerate(zip(layers, norms[1:], strict=True), 1):
            x_RD, h_RD = norm.of_sum(*layer(x_RD, h_RD, rotary, attend))
            if index in taps:
                streams[index] = x_RD
        streams[len(layers) + 1] = h_RD
        return h_RD, [streams[tap] for tap in taps]

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """fp32 logits `[L, V]`."""
        return wide_logits(self.lm_head, hidden_LD)
