"""Medusa's heads against their formula, in all layouts, and what their files may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafters.heads.checkpoint import family_of, open_head
from specdec.drafters.heads.medusa import Medusa
from specdec.errors import ConfigError, ModelError
from tests.drafters.head_files import (
    LAYERS,
    VOCABULARY,
    WIDTH,
    Tensors,
    off_by,
    random_tensors,
    target,
    write,
)

NUM_HEADS, KEPT = 3, 9
LM_HEAD = random_tensors({"x": (VOCABULARY, WIDTH)}, 1)["x"]
TOKEN_MAP = torch.tensor([3, 1, 4, 15, 9, 2, 6, 35, 8])


def weights(depth: int, *, matrix: bool = True, bias: bool = True, rows: int = VOCABULARY) -> Tensors:
    """In the authors' spelling."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(NUM_HEADS):
        for block in range(depth):
            shapes[f"{head}.{block}.linear.weight"] = (WIDTH, WIDTH)
            if bias:
                shapes[f"{head}.{block}.linear.bias"] = (WIDTH,)
        if matrix:
            shapes[f"{head}.{depth}.weight"] = (rows, WIDTH)
    return random_tensors(shapes, seed=depth + 10 * matrix)


def in_vllm_s(tensors: Tensors) -> Tensors:
    """In the spelling of old vLLM files."""
    turned = {}
    for name, tensor in tensors.items():
        head, block, rest = name.split(".", 2)
        if rest == "weight":
            turned[f"lm_heads.{head}.weight"] = tensor
        else:
            turned[f"blocks.{head}.layers.{block}.{rest.removeprefix('linear.')}"] = tensor
    return turned


def inside(tensors: Tensors) -> Tensors:
    """Within a whole model."""
    return {f"medusa_head.{name}": x for name, x in tensors.items()} | {
        "model.embed_tokens.weight": torch.ones(VOCABULARY, WIDTH),
        "model.layers.0.input_layernorm.weight": torch.ones(WIDTH),
        "lm_head.weight": LM_HEAD.clone(),
    }


WRONG = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
# Name: config, heads in the authors' spelling, tensors on disk, the weights' file, ids of the heads.
LAYOUTS: dict[str, tuple[dict[str, Any], Tensors, Tensors, str, Tensor | None]] = {
    "medusa 1, pickled, with a wrong number of heads": (WRONG, weights(1), weights(1), "medusa_lm_head.pt", None),
    "medusa 1, two blocks": (WRONG, weights(2), weights(2), "medusa_lm_head.safetensors", None),
    "medusa 2, inside a model that is silent": (
        {"model_type": "llama"},
        weights(1),
        inside(weights(1)),
        "sharded",
        None,
    ),
    "tgi 2: the target's own head": (
        WRONG,
        weights(1, matrix=False),
        weights(1, matrix=False),
        "medusa_lm_head.safetensors",
        None,
    ),
    "old vllm": (
        {"num_heads": NUM_HEADS, "num_hidden_layers": 1},
        weights(1, bias=False),
        in_vllm_s(weights(1, bias=False)),
        "model.safetensors",
        None,
    ),
    "old vllm, two blocks with biases, fewer tokens": (
        {"num_heads": NUM_HEADS, "num_hidden_layers": 2, "truncated_vocab_size": KEPT},
        weights(2, rows=KEPT),
        in_vllm_s(weights(2, rows=KEPT)) | {"token_map": TOKEN_MAP},
        "model.safetensors",
        TOKEN_MAP,
    ),
    "old vllm, the original head": (
        {"num_heads": NUM_HEADS, "original_lm_head": True},
        weights(2, matrix=False),
        in_vllm_s(weights(2, matrix=False)) | {"lm_head.weight": LM_HEAD.clone()},
        "pytorch_model.bin",
        None,
    ),
}


def opened(folder: Path, overrides: dict[str, Any] | None = None) -> Medusa:
    assert family_of(folder) == "medusa"
    head = open_head(folder, target(head=LM_HEAD), overrides)
    assert isinstance(head, Medusa)
    return head


def reference(tensors: Tensors, hidden: Tensor, head: int) -> Tensor:
    """x + SiLU(W x + b), some times; then a matrix, the target's if there is none."""
    x, block = hidden.double(), 0
    while f"{head}.{block}.linear.weight" in tensors:
        inner = x @ tensors[f"{head}.{block}.linear.weight"].double().T
        if f"{head}.{block}.linear.bias" in tensors:
            inner = inner + tensors[f"{head}.{block}.linear.bias"].double()
        x, block = x + inner / (1 + (-inner).exp()), block + 1
    return x @ tensors.get(f"{head}.{block}.weight", LM_HEAD).double().T


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_every_head_gives_the_logits_of_the_formula(layout: str, tmp_path: Path) -> None:
    config, tensors, on_disk, file, ids = LAYOUTS[layout]
    medusa = opened(write(tmp_path, config, on_disk, weights=file))
    assert (medusa.name, medusa.num_heads, medusa.taps) == ("medusa", NUM_HEADS, (LAYERS + 1,))
    assert (None if medusa.targets is None else medusa.targets.tolist()) == (None if ids is None else ids.tolist())
    hidden = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2))
    worst = 0.0
    for head in range(NUM_HEADS):
        logits = medusa.logits(hidden, head)
        assert logits.dtype == torch.float32
        worst = max(worst, off_by(logits, reference(tensors, hidden, head)))
    print(f"{layout}: largest difference {worst:.2e}")
    assert worst < 1e-5


def test_the_tap_is_a_knob_and_the_only_one(tmp_path: Path) -> None:
    write(tmp_path, WRONG, weights(1))
    assert opened(tmp_path, {"features": "before_norm"}).taps == (LAYERS,)
    with pytest.raises(ConfigError, match="medusa has no override 'num_heads'; it has: features"):
        opened(tmp_path, {"num_heads": 2})


@pytest.mark.parametrize(
    ("more", "lacks", "message"),
    [
        ({}, "1.0.linear.weight", r"missing tensors: 1\.0\.linear\.weight"),
        ({}, "2.1.weight", r"missing tensors: 2\.1\.weight"),
        ({}, "2.0.linear.bias", r"missing tensors: 2\.0\.linear\.bias"),
        ({"0.1.bias": torch.ones(VOCABULARY)}, None, r"unexpected tensors: 0\.1\.bias"),
        ({"extra.weight": torch.ones(2)}, None, r"unexpected tensors: extra\.weight"),
        ({"1.1.weight": torch.ones(VOCABULARY + 1, WIDTH)}, None, r"1\.1\.weight has the shape \[41, 16\]"),
        ({"token_map": torch.arange(KEPT)}, None, r"has the shape \[40, 16\], expected \[9, 16\]"),
        ({"token_map": torch.zeros(KEPT, dtype=torch.long)}, None, r"token_map must give 9 different ids"),
        ({"token_map": torch.ones(KEPT)}, None, r"token_map is float32 \[9\], expected one axis of integers"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_with_what_is_wrong(
    more: Tensors, lacks: str | None, message: str, tmp_path: Path
) -> None:
    tensors = {name: tensor for name, tensor in weights(1).items() if name != lacks}
    write(tmp_path, WRONG, tensors | more)
    with pytest.raises(ModelError, match=message) as caught:
        opened(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_map_needs_matrices_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, WRONG, weights(1, matrix=False) | {"token_map": TOKEN_MAP})
    with pytest.raises(ModelError, match="token_map without head matrices"):
        opened(tmp_path)


def test_a_config_that_speaks_of_heads_that_are_not_there_is_told(tmp_path: Path) -> None:
    write(tmp_path, WRONG, {"extra.weight": torch.ones(2)})
    with pytest.raises(ModelError, match=r"no Medusa head is in these tensors: extra\.weight"):
        opened(tmp_path)
