"""Layers for multi-token prediction: their first step against transformers and `speculators`, what they draft on from
themselves against a dense re-implementation, and what their files may say."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from specdec.drafters.heads import Head
from specdec.drafters.heads.checkpoint import family_of, open_head
from specdec.drafters.heads.mtp import Mtp
from specdec.drafters.memory import Memory
from specdec.drafters.open import voice_of
from specdec.drafters.recurrent import Recurrent
from specdec.errors import ConfigError, ModelError
from specdec.kv import Pool
from specdec.models.llama import Layer
from tests.drafters.head_files import (
    LAYERS,
    RECORDED,
    VOCABULARY,
    WIDTH,
    Tensors,
    first_step,
    off_by,
    random_tensors,
    recorded,
    renamed,
    target,
    write,
)
from tests.drafters.reference import ReferenceLayer, rms
from tests.drafters.rows import Rows, causal
from tests.models.tiny import transformers_models
from tests.no_sync import Synchronises, no_sync

ROWS, LEVELS, HEADS, KV_HEADS, SIZE = 7, 3, 4, 2, 8
EMBEDDING, LM_HEAD = (random_tensors({"x": (VOCABULARY, WIDTH)}, seed)["x"] for seed in (1, 2))
NUMBERS = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "attn_implementation": "eager",
}
EXPERTS = {
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
    "experts_implementation": "eager",
}
GROUPS = {"n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
GLM = NUMBERS | EXPERTS | GROUPS | {"use_qk_norm": True, "attention_bias": True}
NEXT = NUMBERS | EXPERTS | {"num_experts": 6, "shared_expert_intermediate_size": 20, "layer_types": ["full_attention"]}
# A body: its folder in transformers, what its classes' names begin with, its config.
BODIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", NUMBERS),
    "qwen2": ("qwen2", "Qwen2", NUMBERS),
    "qwen3": ("qwen3", "Qwen3", NUMBERS),
    "glm4_moe": ("glm4_moe", "Glm4Moe", GLM),
    "qwen3_next": ("qwen3_next", "Qwen3Next", NEXT),
    "qwen3_next, dense": ("qwen3_next", "Qwen3Next", NEXT | {"num_experts": 0}),
}
# A publisher's spelling: renames of transformers' names, and what config.json says besides.
MIMO = [
    ("enorm.", "mtp_layers.0.token_layernorm."),
    ("hnorm.", "mtp_layers.0.hidden_layernorm."),
    ("eh_proj.", "mtp_layers.0.input_proj."),
    ("post_norm.", "mtp_layers.0.final_layernorm."),
    ("mtp_block.", "mtp_layers.0."),
]
SPELLINGS: dict[str, tuple[list[tuple[str, str]], dict[str, Any]]] = {
    "deepseek": (
        [("post_norm.", "shared_head.norm."), ("mtp_block.", ""), ("", f"model.layers.{LAYERS}.")],
        {"num_nextn_predict_layers": 1},
    ),
    "mimo": ([*MIMO, ("", "model.")], {"num_nextn_predict_layers": 1}),
    "qwen": (
        [
            ("enorm.", "mtp.pre_fc_norm_embedding."),
            ("hnorm.", "mtp.pre_fc_norm_hidden."),
            ("eh_proj.", "mtp.fc."),
            ("post_norm.", "mtp.norm."),
            ("mtp_block.", "mtp.layers.0."),
        ],
        {"mtp_num_hidden_layers": 1},
    ),
    "speculators": (MIMO, {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1}),
}


def made(body: str, spelling: str) -> tuple[Any, Any, dict[str, Any], Tensors]:
    """transformers' module with random weights, its rotary positions, and config.json and tensors in the spelling."""
    folder, prefix, numbers = BODIES[body]
    config = getattr(transformers_models, f"{prefix}Config")(**numbers)
    config.mtp_hidden_states_first = spelling == "mimo"
    classes: Any = import_module(f"transformers.models.{folder}.modeling_{folder}")
    layer, norm, rotary = (getattr(classes, prefix + name) for name in ("DecoderLayer", "RMSNorm", "RotaryEmbedding"))
    module = MtpLayer(config, layer, norm, 0).eval()
    generator = torch.Generator().manual_seed(sum((body + spelling).encode()))
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.25)
    names, says = SPELLINGS[spelling]
    inner = config.to_dict() | {"num_hidden_layers": LAYERS, "layer_types": ["linear_attention"] * LAYERS}
    raw = {"transformer_layer_config": inner} | says if spelling == "speculators" else inner | says
    return module, rotary(config), raw, renamed(module.state_dict(), *names)


def opened(folder: Path, overrides: dict[str, Any] | None = None) -> Mtp:
    assert family_of(folder) == "mtp"
    head = open_head(folder, target(embedding=EMBEDDING, head=LM_HEAD), overrides)
    assert isinstance(head, Head)
    assert isinstance(head, Mtp)
    return head


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("body", BODIES)
@torch.inference_mode()
def test_the_first_step_gives_the_logits_of_transformers(body: str, spelling: str, tmp_path: Path) -> None:
    module, rotary, raw, tensors = made(body, spelling)
    write(tmp_path, raw, tensors)
    generator = torch.Generator().manual_seed(5)
    tokens, hidden = (
        torch.randint(VOCABULARY, (ROWS,), generator=generator),
        torch.randn(ROWS, WIDTH, generator=generator),
    )
    positions = 1 + torch.arange(ROWS)[None]
    mask = torch.where(causal(ROWS), 0.0, -torch.inf)[None, None]
    out = module(EMBEDDING[tokens][None], hidden[None], rotary(hidden[None], positions), mask, positions, None)
    expected = out[0] @ LM_HEAD.T
    worst = off_by(first_step(opened(tmp_path), tokens, [hidden]), expected)
    print(f"{body}, {spelling}: largest difference {worst:.2e}")
    assert worst < 1e-5


@pytest.mark.parametrize("body", BODIES)
def test_graphs_are_captured_of_no_mixture_as_it_reads_back_which_experts_run(body: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")
    _, _, raw, tensors = made(body, "deepseek")
    write(tmp_path, raw, tensors)
    head = opened(tmp_path)
    layer = cast(Layer, head.body.layers[0])
    with torch.inference_mode(), no_sync():
        if head.has_experts:
            with pytest.raises(Synchronises):
                layer.mlp(torch.ones(3, WIDTH))
        else:
            layer.mlp(torch.ones(3, WIDTH))
    voice = voice_of(head, Pool(9, 4, "cpu", torch.float32, captured_blocks=50), WIDTH)
    assert isinstance(voice, Recurrent)
    assert isinstance(voice._context, Memory)
    assert (voice._context._forwards._steps is None) == head.has_experts


@pytest.mark.parametrize("case", sorted(folder.name for folder in RECORDED.glob("mtp-*")))
def test_the_first_step_gives_the_logits_of_speculators(case: str) -> None:
    _, _, expected = recorded(case)
    head = open_head(RECORDED / case, target(embedding=expected["embedding"], head=expected["head"]))
    assert isinstance(head, Mtp)
    rows = len(expected["step0"])
    got = first_step(head, expected["tokens"][1 : rows + 1], [expected["hidden"][:rows]])
    worst = off_by(got, expected["step0"])
    print(f"{case}: largest difference {worst:.2e}")
    assert worst < 1e-5


def reference(
    weights: Tensors, tokens: list[int], features: Tensor, *, body: str, hidden_first: bool, pre_norm: bool
) -> list[Tensor]:
    """Logits of all true rows and of the levels below the last: each level's output is the next one's feature."""
    is_next = body.startswith("qwen3_next")
    layer = ReferenceLayer(
        weights,
        "mtp_block.",
        HEADS,
        KV_HEADS,
        offset=1.0 if is_next else 0.0,
        gated=is_next,
        share=0.25 if is_next else 1.0,
    )
    logits, out = [], torch.zeros(WIDTH)
    for index, token in enumerate(tokens):
        e = rms(EMBEDDING[token].double(), weights["enorm.weight"].double() + layer.offset)
        f = features[index].double() if index < len(features) else out
        h = rms(f, weights["hnorm.weight"].double() + layer.offset)
        x = weights["eh_proj.weight"].double() @ torch.cat((h, e) if hidden_first else (e, h))
        x = layer.row(layer.norm("input_layernorm", x), index, range(index), residual=x)
        normed = rms(x, weights["post_norm.weight"].double() + layer.offset)
        out = x if pre_norm else normed
        logits.append(LM_HEAD.double() @ normed)
    return logits


@pytest.mark.parametrize("recurrence", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("body", ["llama", "qwen2", "qwen3", "qwen3_next, dense"])
@torch.inference_mode()
def test_it_drafts_on_from_what_it_put_out(body: str, spelling: str, recurrence: str, tmp_path: Path) -> None:
    module, _, raw, tensors = made(body, spelling)
    write(tmp_path, raw, tensors)
    head = opened(tmp_path, {} if recurrence == "post_norm" else {"recurrence": recurrence})
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(VOCABULARY, (ROWS + LEVELS,), generator=generator)
    true = torch.randn(ROWS, WIDTH, generator=generator)
    expected = reference(
        module.state_dict(),
        tokens.tolist(),
        true,
        body=body,
        hidden_first=spelling == "mimo",
        pre_norm=recurrence == "pre_norm",
    )
    attend = Rows()
    hidden = head.forward(tokens[:ROWS], head.features([true]), torch.arange(ROWS), attend.see(causal(ROWS)))
    got = [*head.logits(hidden)]
    for level in range(ROWS, ROWS + LEVELS):
        seen = attend.see(torch.ones(1, level + 1, dtype=torch.bool))
        hidden = head.forward(tokens[level, None], hidden[-1:], torch.tensor([level]), seen)
        got.append(head.logits(hidden)[0])
    worst = max(off_by(one, other) for one, other in zip(got, expected, strict=True))
    print(f"{body}, {spelling}, {recurrence}: largest difference {worst:.2e}")
    assert worst < 1e-5


def test_what_is_not_the_module_s_is_left_to_the_target(tmp_path: Path) -> None:
    _, _, raw, tensors = made("llama", "deepseek")
    stem = f"model.layers.{LAYERS}."
    around = {
        "model.embed_tokens.weight": EMBEDDING.clone(),
        "model.layers.0.input_layernorm.weight": torch.ones(WIDTH),
        f"{stem}embed_tokens.weight": EMBEDDING.clone(),
        f"{stem}shared_head.head.weight": LM_HEAD.clone(),
        "lm_head.weight": LM_HEAD.clone(),
    }
    write(tmp_path, raw, tensors | around, weights="sharded")
    head = opened(tmp_path)
    assert (head.name, head.taps, head.targets, len(head.layers)) == ("mtp", (LAYERS + 1,), None, 1)
    assert opened(tmp_path, {"features": "before_norm"}).taps == (LAYERS,)


@torch.inference_mode()
def test_experts_may_lie_one_by_one_or_together(tmp_path: Path) -> None:
    _, _, raw, tensors = made("qwen3_next", "qwen")
    stem = "mtp.layers.0.mlp.experts."
    both, down = tensors[f"{stem}gate_up_proj"], tensors[f"{stem}down_proj"]
    apart = {name: tensor for name, tensor in tensors.items() if not name.startswith(stem)}
    for expert in range(len(down)):
        gate, up = both[expert].chunk(2)
        apart |= {
            f"{stem}{expert}.gate_proj.weight": gate,
            f"{stem}{expert}.up_proj.weight": up,
            f"{stem}{expert}.down_proj.weight": down[expert],
        }
    write(tmp_path / "together", raw, tensors)
    write(tmp_path / "apart", {"text_config": raw}, apart)
    tokens, hidden = torch.arange(ROWS), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
    one, other = (first_step(opened(tmp_path / name), tokens, [hidden]) for name in ("together", "apart"))
    torch.testing.assert_close(one, other)


@torch.inference_mode()
@pytest.mark.parametrize("change", [{"embed_first": False}, {"norm_plus_one": True}])
def test_every_knob_turns_something(change: dict[str, Any], tmp_path: Path) -> None:
    _, _, raw, tensors = made("qwen3", "qwen")
    write(tmp_path, raw, tensors)
    tokens, hidden = torch.arange(ROWS), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(8))
    usual, turned = (first_step(opened(tmp_path, knobs), tokens, [hidden]) for knobs in ({}, change))
    assert not torch.allclose(usual, turned, atol=1e-2)
    with pytest.raises(
        ConfigError, match="mtp has no override 'aux_layers'; it has: features, recurrence, embed_first"
    ):
        opened(tmp_path, {"aux_layers": [1]})


BLOCK = f"model.layers.{LAYERS}."
LATENT = {f"{BLOCK}self_attn.kv_a_proj_with_mqa.weight": torch.ones(2, WIDTH)}
SECOND = {f"model.layers.{LAYERS + 1}.eh_proj.weight": torch.ones(WIDTH, 2 * WIDTH)}


@pytest.mark.parametrize(
    ("says", "more", "lacks", "message"),
    [
        (
            {"num_nextn_predict_layers": 3},
            {},
            None,
            r"config\.json: num_nextn_predict_layers is 3, but only one module",
        ),
        ({}, SECOND, None, r"holds the modules 8, 9 for multi-token prediction, expected one"),
        ({}, LATENT, None, r"kv_a_proj_with_mqa\.weight: latent and linear attention cannot be run"),
        ({}, {f"{BLOCK}self_attn.sinks": torch.ones(4)}, None, r"unexpected tensors: layers\.0\.self_attn\.sinks"),
        ({}, {}, "mlp.up_proj.weight", r"missing tensors: layers\.0\.mlp\.up_proj\.weight"),
        ({"hidden_size": 32}, {}, None, r"config\.json: hidden_size is 32, the target's is 16"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, None, r"config\.json: quantization_config .*fp8"),
    ],
)
def test_a_module_that_cannot_be_run_is_told_why(
    says: dict[str, Any], more: Tensors, lacks: str | None, message: str, tmp_path: Path
) -> None:
    _, _, raw, tensors = made("llama", "deepseek")
    tensors = {name: tensor for name, tensor in tensors.items() if name != f"{BLOCK}{lacks}"}
    write(tmp_path, raw | says, tensors | more)
    with pytest.raises(ModelError, match=message) as caught:
        opened(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_mixture_says_how_many_experts_a_row_visits(tmp_path: Path) -> None:
    _, _, raw, tensors = made("glm4_moe", "deepseek")
    write(tmp_path, raw | {"num_experts_per_tok": 9}, tensors)
    with pytest.raises(ModelError, match=r"config\.json: num_experts_per_tok must be 1 to 8, got 9"):
        opened(tmp_path)
    write(tmp_path, raw | {"n_group": 3}, tensors)
    with pytest.raises(ModelError, match=r"config\.json: n_group must divide the 8 experts, got 3"):
        opened(tmp_path)
