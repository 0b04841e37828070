"""Memory for a module that `build` made on the meta device; and random weights. Knows no files."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import nn

from specdec.errors import ModelError
from specdec.models import build
from specdec.models.config import ModelConfig
from specdec.protocols import Model


def random_model(
    config: ModelConfig, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Model:
    """A model with random weights, for measuring and checking machines: its logits spread over about three nats.
    Raises `ModelError` where there is no memory for it."""
    model = build(config)
    materialise(model, torch.device(device), dtype, Path(f"random {config.model_type}"))
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or "norm" in name:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            spread = 3.0 if "lm_head" in name or "embed_tokens" in name else 1.0
            parameter.normal_(std=spread * parameter.shape[-1] ** -0.5, generator=generator)
    return cast(Model, model.eval())


def materialise(model: nn.Module, device: torch.device, dtype: torch.dtype, where: Path) -> None:
    """Give every parameter memory (uninitialised), once where it is shared. Buffers hold values already. Raises
    `ModelError` where there is too little: a damaged config may ask for more than any machine has."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                wanted = parameter.dtype if hasattr(module, "offset") else dtype
                try:
                    empty = torch.empty(parameter.shape, dtype=wanted, device=device)
                except RuntimeError as error:
                    shape = list(parameter.shape)
                    raise ModelError(f"{where}: no memory for {name} of the shape {shape} in its config") from error
                made[parameter] = nn.Parameter(empty, requires_grad=False)
            setattr(module, name, made[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
