"""Gemma 3, text only (Gemma Team, arXiv 2503.19786): five layers with a sliding window, then one without.

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


def norm(size: int, config: ModelConfig) -> Norm:
    """Gemma's norms multiply by 1 + w."""
    return Norm(size, config.rms_norm_eps, offset=1.0)


class Attention(nn.Module):
    """`parts` says which rows of a merged linear come from which one on disk."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        H, G, K = config.num_heads, config.num_kv_heads, config.head_dim
        self.layer, self.scale = layer, config.attention_scale
        self.window = config.sliding_window if config.layer_kinds[layer] == SLIDING else None
        self.heads = (H, G, K)
        self.parts = {"qkv_proj": {"q_proj": H * K, "k_proj": G * K, "v_proj": G * K}}
        self.qkv_proj = nn.Linear(config.hidden_size, (H + 2 * G) * K, bias=config.attention_bias)
        self.q_norm, self.k_norm = norm(K, config), norm(K, config)
        self.o_proj = nn.Linear(H * K, config.hidden_size, bias=config.output_bias)

    def forward(self, x_RD: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        H, G, K = self.heads
        q, k, v = self.qkv_proj(x_RD).view(-1, H + 2 * G, K).split_with_sizes((H, G, G), 1)
        qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        mixed_RHK = attend(self.layer, qk, v, rotary, scale=self.scale, window=self.window)
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
        gate, up = self.gate_up_proj(x_RD).chunk(2, -1)
        out: Tensor = self.down_proj(F.gelu(gate, approximate="tanh") * up)
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

    def forward(self, x_RD: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        mixed_RD = self.self_attn(self.input_layernorm(x_RD), rotary, attend)
        x_RD = x_RD + self.post_attention_layernorm(mixed_RD)
        out: Tensor = x_RD + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_RD)))
        return out


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
        return x_RD * torch.tensor(self.embedding_scale, dtype=x_RD.dtype, device=x_RD.device)

    def forward(
        self, tokens_R: Tensor, positions_R: Tensor, attend: Attend, taps: Sequence[int] = (), depth: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """See `protocols.Model.forward`."""
        x_RD = self.embed(tokens_R)
        tables = {
            kind: rotary_table(positions_R, self.model.get_buffer(kind), x_RD.dtype) for kind in set(self.layer_kinds)
        }
        streams = []
        for kind, layer in islice(zip(self.layer_kinds, self.model.layers, strict=True), depth):
            streams.append(x_RD)
            x_RD = layer(x_RD, tables[kind], attend)
        hidden_RD = self.model.norm(x_RD)
        streams += [x_RD, hidden_RD]
        return hidden_RD, [streams[tap] for tap in taps]

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """fp32 logits `[L, V]`."""
        logits_LV: Tensor = self.lm_head(hidden_LD).to(torch.float32)
        if self.final_softcap is not None:
            logits_LV = torch.tanh(logits_LV / self.final_softcap) * self.final_softcap
        return logits_LV
