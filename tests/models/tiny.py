"""Tiny random checkpoints for tests, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

transformers_models: Any = transformers  # its constructors have no types


def tiny_llama(folder: Path, *, shards: bool = False, tied: bool = False, seed: int = 0) -> Any:
    """A random Llama of two layers, saved to `folder`; the model itself is returned."""
    torch.manual_seed(seed)
    model = transformers_models.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=[2, 5],
            pad_token_id=0,
        )
    )
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    return model
