"""The table of model families. A model file is imported only when a checkpoint of its family is built."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

from specdec.models.config import ModelConfig

FAMILIES = {
    "llama": ("specdec.models.llama", "Llama"),
    "qwen2": ("specdec.models.llama", "Llama"),
    "qwen3": ("specdec.models.llama", "Llama"),
    "gemma3_text": ("specdec.models.gemma3", "Gemma3"),
}


def build(config: ModelConfig) -> nn.Module:
    """The module of `config` on the meta device: shapes without memory (small tables of numbers are real)."""
    module, name = FAMILIES[config.model_type]
    with torch.device("meta"):
        model: nn.Module = getattr(import_module(module), name)(config)
    return model
