"""Tiny heads for tests: a target to hang them on, folders in every layout, and what a head makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.drafters.heads import Head, Target
from tests.drafters.rows import Rows, causal

RECORDED = Path(__file__).parent / "recorded"
VOCABULARY, WIDTH, LAYERS = 40, 16, 8
Tensors = dict[str, Tensor]


def refusing(what: str) -> Callable[[Tensor], Tensor]:
    """A part of the target that a head with its own must not ask."""

    def ask(_: Tensor) -> Tensor:
        raise AssertionError(f"the head has its own {what}")

    return ask


def target(
    *,
    embedding: Tensor | None = None,
    head: Tensor | None = None,
    width: int = WIDTH,
    vocabulary: int = VOCABULARY,
    layers: int = LAYERS,
) -> Target:
    """A target made of an embedding `[V, D]` and a head `[V, D]`; one that is None must not be asked for."""
    return Target(
        layers,
        width,
        vocabulary,
        refusing("embedding") if embedding is None else lambda tokens: embedding[tokens],
        refusing("lm_head") if head is None else lambda hidden: (hidden @ head.T).float(),
    )


def recorded(case: str) -> tuple[dict[str, Any], Tensors, Tensors]:
    """config.json, the weights, and the inputs and logits of a recorded case."""
    folder = RECORDED / case
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors"), load_file(folder / "expected.safetensors")


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors, *, weights: str = "model.safetensors") -> Path:
    """A drafter's folder. `weights` is the file's name; "sharded" makes two files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if weights == "sharded":
        names = sorted(tensors)
        files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    elif weights.endswith(".safetensors"):
        save_file(tensors, folder / weights)
    else:
        torch.save(tensors, folder / weights)
    return folder


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    """With each name's beginning replaced."""
    for old, new in pairs:
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: x for name, x in tensors.items()}
    return tensors


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Tensors:
    """Random weights of a size that matters, biases and norms too, and that keeps values near 1 over some levels."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.25 for name, shape in shapes.items()}


def off_by(got: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest value expected where that is above 1: without norms between
    them, the values grow from level to level."""
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1))


def parts(features_RT: Tensor, width: int = WIDTH) -> list[Tensor]:
    """What was tapped, as one tensor a layer."""
    return list(features_RT.split_with_sizes([width] * (features_RT.shape[1] // width), 1))


@torch.inference_mode()
def first_step(head: Head, tokens_R: Tensor, taps: list[Tensor]) -> Tensor:
    """Logits `[R, W]` of one causal run over true features, at positions from 1."""
    rows = len(tokens_R)
    attend = Rows().see(causal(rows))
    return head.logits(head.forward(tokens_R, head.features(taps), 1 + torch.arange(rows), attend))
