"""Llama (Touvron et al., arXiv 2302.13971; grouped queries from arXiv 2307.09288). SmolLM2 is one. Qwen 2 adds biases
(arXiv 2407.10671), Qwen 3 norms of queries and keys (arXiv 2505.09388); gates of the output are Qwen3-Next's.

R rows, L logits rows, V vocabulary, D width, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.norm_rope import Rotary, rotary_table
from specdec.models.config import SLIDING, ModelConfig
from specdec.models.layers import Norm, frequencies
from specdec.protocols import Attend, LayerShape


class Attention(nn.Module):
    """`parts` says which rows of a merged linear come from which one on disk. `width` is what it reads, D if None."""

    def __init__(self, config: ModelConfig, layer: int, width: int | None = None) -> None:
        super().__init__()
        H, G, K = config.num_heads, config.num_kv_heads, config.head_dim
        Q = 2 * H if config.output_gate else H
        self.layer, self.scale = layer, config.attention_scale
        self.window = config.sliding_window if config.layer_kinds[layer] == SLIDING else None
        self.heads, self.output_gate = (H, G, K), config.output_gate
        self.parts = {"qkv_proj": {"q_proj": Q * K, "k_proj": G * K, "v_proj": G * K}}
        self.qkv_proj = nn.Linear(width or config.hidden_size, (Q + 2 * G) * K, bias=config.attention_bias)
        self.q_norm = Norm(K, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = Norm(K, config.rms_norm_eps) if config.qk_norm else None
        self.o_proj = nn.Linear(H * K, config.hidden_size, bias=config.output_bias)

    def forward(self, x_RD: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        H, G, K = self.heads
        qkv, gate_RHK = self.qkv_proj(x_RD), None
        if self.output_gate:  # each head's query is followed by its gate
            q, kv = qkv.split_with_sizes((2 * H * K, 2 * G * K), -1)
            q, gate_RHK = q.view(-1, H, 2 * K).chunk(2, -1)
            qkv = torch.cat((q.flatten(1), kv), -1)
        qk, v = qkv.view(-1, H + 2 * G, K).split_with_sizes((H + G, G), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split_with_sizes((H, G), 1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
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
        gate, up = self.gate_up_proj(x_RD).chunk(2, -1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x_RD: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        x_RD = x_RD + self.self_attn(self.input_layernorm(x_RD), rotary, attend)
        out: Tensor = x_RD + self.mlp(self.post_attention_layernorm(x_RD))
        return out


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
        x_RD = self.embed(tokens_R)
        rotary = rotary_table(positions_R, self.model.frequencies, x_RD.dtype)
        streams = []
        for layer in islice(self.model.layers, depth):
            streams.append(x_RD)
            x_RD = layer(x_RD, rotary, attend)
        hidden_RD = self.model.norm(x_RD)
        streams += [x_RD, hidden_RD]
        return hidden_RD, [streams[tap] for tap in taps]

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """fp32 logits `[L, V]`."""
        out: Tensor = self.lm_head(hidden_LD)
        return out.to(torch.float32)
