"""Tiny random targets in fp32, with weights that we make here: real attention, real rotary positions, sharp logits."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.models import build
from specdec.models.config import ModelConfig
from specdec.protocols import Drafter, Model
from specdec.request import Stopping
from specdec.runner import TorchRunner
from specdec.text import Detokenizer

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# With norms of queries and keys, and heads that are wider than their share of the model.
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 16}
GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
}


@functools.cache
def tiny_model(family: str, vocab_size: int) -> Model:
    """A model of the family with random weights, the same each time. Its logits spread over ten nats or more."""
    raw = {"llama": LLAMA, "qwen3": QWEN3, "gemma3_text": GEMMA}[family] | {"vocab_size": vocab_size}
    return filled(build(ModelConfig.from_dict(raw, "tiny")), raw)


def filled(model: nn.Module, raw: Mapping[str, Any]) -> Model:
    """A module from `build`, made of `raw`, with random weights, the same each time."""
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(20)
    for name, parameter in model.named_parameters():
        spread = 1.0 if "norm" in name else 0.75 if "lm_head" in name else 0.3
        torch.nn.init.normal_(parameter, std=spread, generator=generator)
    fresh = build(ModelConfig.from_dict(raw, "tiny"))
    for (_, buffer), (_, source) in zip(model.named_buffers(), fresh.named_buffers(), strict=True):
        buffer.copy_(source)  # tables of numbers: to_empty has lost them
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return cast(Model, model.eval())


def tiny_engine(
    family: str,
    drafters: Sequence[Drafter],
    config: EngineConfig,
    *,
    token_bytes: list[bytes],
    end_tokens: tuple[int, ...],
) -> Engine:
    """An engine over a tiny model whose vocabulary is `token_bytes`."""

    def new_text(stopping: Stopping) -> Detokenizer:
        return Detokenizer(
            token_bytes.__getitem__,
            stop=stopping.stop,
            include_stop=stopping.include_stop,
            min_tokens=stopping.min_tokens,
        )

    runner = TorchRunner(
        tiny_model(family, len(token_bytes)), num_blocks=config.num_blocks, block_size=config.block_size
    )
    return Engine(runner, drafters, config, new_text=new_text, end_tokens=end_tokens)
