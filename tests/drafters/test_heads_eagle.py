"""EAGLE-1 heads against a dense re-implementation, and what their files may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafters.heads import Head
from specdec.drafters.heads.checkpoint import family_of, open_head
from specdec.drafters.heads.eagle import Eagle
from specdec.errors import ConfigError, ModelError
from tests.drafters.head_files import LAYERS, VOCABULARY, WIDTH, Tensors, off_by, random_tensors, renamed, target, write
from tests.drafters.reference import ReferenceLayer, rms
from tests.drafters.rows import Rows, causal

HEADS, KV_HEADS, SIZE, INNER, ROWS, LEVELS = 4, 2, 4, 24, 7, 3
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
}
EMBEDDING, LM_HEAD = (random_tensors({"x": (VOCABULARY, WIDTH)}, seed)["x"] for seed in (1, 2))


def layer_shapes(layer: int, width: int = WIDTH) -> dict[str, tuple[int, ...]]:
    """A Llama layer's tensors without the norm before its attention."""
    prefix = f"layers.{layer}."
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * SIZE, width),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * SIZE, width),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * SIZE, width),
        f"{prefix}self_attn.o_proj.weight": (WIDTH, HEADS * SIZE),
        f"{prefix}mlp.gate_proj.weight": (INNER, WIDTH),
        f"{prefix}mlp.up_proj.weight": (INNER, WIDTH),
        f"{prefix}mlp.down_proj.weight": (WIDTH, INNER),
        f"{prefix}post_attention_layernorm.weight": (WIDTH,),
    }


def biases(*parts: str) -> dict[str, tuple[int, ...]]:
    sizes = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}
    return {f"layers.0.self_attn.{part}_proj.bias": (sizes[part],) for part in parts}


BASE = {"fc.weight": (WIDTH, 2 * WIDTH)} | layer_shapes(0)
PARA = {"embedding_layernorm.weight": (WIDTH,), "hidden_states_layernorm.weight": (WIDTH,)}
SECOND = layer_shapes(1) | {"layers.1.input_layernorm.weight": (WIDTH,)}
# Name of the variant: its tensors besides BASE, changes of the config, renames on disk, the weights' file.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama 3: fc without a bias": {"config": {"bias": False}},
    "vicuna: fc with a bias that the config is silent about": {"more": {"fc.bias": (WIDTH,)}},
    "pickled": {"more": {"fc.bias": (WIDTH,)}, "weights": "pytorch_model.bin"},
    "an embedding of its own": {"embedding": True},
    "qwen 2: biases": {"more": biases("q", "k", "v"), "config": {"model_type": "qwen2", "qkv_bias": True}},
    "no kv heads named, another model_type": {
        "config": {"num_key_value_heads": None, "model_type": "mixtral", "num_local_experts": 8},
        "more": {f"layers.0.self_attn.{part}_proj.weight": (HEADS * SIZE, WIDTH) for part in "kv"},
    },
    "add_para_norm": {"more": PARA},
    "old speculators": {
        "more": {"fc.bias": (WIDTH,)},
        "config": {"speculators_model_type": "eagle", "transformer_layer_config": CONFIG},
        "names": [("fc.", "fusion_fc."), ("layers.0.", "transformer.")],
    },
    "two layers": {"more": SECOND, "config": {"num_hidden_layers": 2}},
    "sharded behind model.": {"names": [("", "model.")], "weights": "sharded"},
}  # fmt: skip


def tensors_of(variant: str) -> Tensors:
    return random_tensors(BASE | VARIANTS[variant].get("more", {}), seed=sum(variant.encode()))


def opened(variant: str, folder: Path, overrides: dict[str, Any] | None = None) -> Eagle:
    says = VARIANTS[variant]
    tensors = renamed(tensors_of(variant), *says.get("names", []))
    has_own = bool(says.get("embedding"))
    if has_own:
        tensors["embed_tokens.weight"] = EMBEDDING.clone()
    write(folder, CONFIG | says.get("config", {}), tensors, weights=says.get("weights", "model.safetensors"))
    assert family_of(folder) == "eagle"
    head = open_head(folder, target(head=LM_HEAD, embedding=None if has_own else EMBEDDING), overrides)
    assert isinstance(head, Head)
    assert isinstance(head, Eagle)
    return head


def reference(weights: Tensors, tokens: list[int], features: Tensor) -> list[Tensor]:
    """Logits of the last true row and of the levels below it: x = fc([embedding, feature]), a layer without its first
    norm, the target's head; then the output is the next feature."""
    kv_heads = weights["layers.0.self_attn.k_proj.weight"].shape[0] // SIZE
    count = 1 + any(name.startswith("layers.1.") for name in weights)
    layers = [ReferenceLayer(weights, f"layers.{layer}.", HEADS, kv_heads) for layer in range(count)]
    logits, out = [], torch.zeros(WIDTH)
    for index, token in enumerate(tokens):
        e, f = EMBEDDING[token].double(), features[index].double() if index < len(features) else out
        if "embedding_layernorm.weight" in weights:
            e, f = rms(e, weights["embedding_layernorm.weight"]), rms(f, weights["hidden_states_layernorm.weight"])
        x = weights["fc.weight"].double() @ torch.cat((e, f))
        if "fc.bias" in weights:
            x = x + weights["fc.bias"].double()
        for layer in layers:
            x = layer.row(layer.norm("input_layernorm", x), index, range(index), residual=x)
        out = x
        logits.append(LM_HEAD.double() @ out)
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_a_chain_of_drafts_equals_a_dense_recomputation(variant: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (ROWS + LEVELS,), generator=generator)
    true = torch.randn(ROWS, WIDTH, generator=generator)
    expected = reference(tensors_of(variant), tokens.tolist(), true)
    head = opened(variant, tmp_path)
    attend = Rows()
    hidden = head.forward(tokens[:ROWS], head.features([true]), torch.arange(ROWS), attend.see(causal(ROWS)))
    got = [*head.logits(hidden)]
    for level in range(ROWS, ROWS + LEVELS):
        seen = attend.see(torch.ones(1, level + 1, dtype=torch.bool))
        hidden = head.forward(tokens[level, None], hidden[-1:], torch.tensor([level]), seen)
        got.append(head.logits(hidden)[0])
    worst = max(off_by(one, other) for one, other in zip(got, expected, strict=True))
    print(f"{variant}: largest difference {worst:.2e}")
    assert worst < 1e-5


def test_features_are_the_target_s_hidden_state_after_its_norm(tmp_path: Path) -> None:
    head = opened("add_para_norm", tmp_path)
    assert (head.name, head.taps, head.targets) == ("eagle", (LAYERS + 1,), None)
    assert len(head.layers) == 1
    assert open_head(tmp_path, target(head=LM_HEAD, embedding=EMBEDDING), {"features": "before_norm"}).taps == (LAYERS,)


@torch.inference_mode()
def test_the_order_of_embedding_and_feature_is_a_knob(tmp_path: Path) -> None:
    tokens, true = torch.arange(ROWS), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(4))
    names = "llama 3: fc without a bias"
    first = opened(names, tmp_path)
    turned = tensors_of(names)
    turned["fc.weight"] = turned["fc.weight"].roll(WIDTH, 1)
    write(tmp_path, CONFIG, turned)
    last = open_head(tmp_path, target(head=LM_HEAD, embedding=EMBEDDING), {"embed_first": False})
    one, other = (head.forward(tokens, true, torch.arange(ROWS), Rows().see(causal(ROWS))) for head in (first, last))
    torch.testing.assert_close(one, other)


def test_a_wrong_file_or_override_is_named(tmp_path: Path) -> None:
    names = "llama 3: fc without a bias"
    with pytest.raises(ConfigError, match="eagle has no override 'norm_output'; it has: features, embed_first, add_pa"):
        opened(names, tmp_path, {"norm_output": True})
    for change, message in (
        ({"layers.0.mlp.up_proj.weight": None}, r"missing tensors: layers\.0\.mlp\.up_proj\.weight"),
        ({"norm.weight": torch.ones(WIDTH)}, r"unexpected tensors: norm\.weight"),
        ({"embedding_layernorm.weight": torch.ones(WIDTH)}, r"missing tensors: hidden_states_layernorm\.weight"),
        ({"fc.weight": torch.ones(WIDTH, WIDTH)}, r"fc\.weight has the shape \[16, 16\], expected \[16, 32\]"),
        ({"lm_head.weight": torch.ones(7, WIDTH)}, r"missing tensors: d2t \(the head's vocabulary has 7 ids"),
    ):
        tensors = {name: x for name, x in (tensors_of(names) | change).items() if x is not None}
        write(tmp_path, CONFIG, tensors)
        with pytest.raises(ModelError, match=message):
            open_head(tmp_path, target(head=LM_HEAD, embedding=EMBEDDING))
    write(tmp_path, CONFIG, tensors_of(names))
    with pytest.raises(ModelError, match=r"config\.json: hidden_size is 16, the target's is 32"):
        open_head(tmp_path, target(width=32))
