"""Our models against transformers, in fp32, on the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from specdec.errors import ModelError
from specdec.loader import load, open_checkpoint
from specdec.models.llama import Attention, Llama
from tests.models.dense import Dense, dense_logits
from tests.models.tiny import transformers_models

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
TINY = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "pad_token_id": 0}
TINY_GEMMA = TINY | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "num_key_value_heads": 2}

TINY_QWEN = TINY | {"num_hidden_layers": 3, "num_key_value_heads": 2}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def llama(**changes: Any) -> Any:
    return transformers_models.LlamaForCausalLM(LlamaConfig(**(TINY | {"num_hidden_layers": 3} | changes)))


def gemma3(**changes: Any) -> Any:
    return transformers_models.Gemma3ForCausalLM(Gemma3TextConfig(**(TINY_GEMMA | {"num_hidden_layers": 6} | changes)))


def qwen2(**changes: Any) -> Any:
    return transformers_models.Qwen2ForCausalLM(Qwen2Config(**(TINY_QWEN | changes)))


def qwen3(**changes: Any) -> Any:
    return transformers_models.Qwen3ForCausalLM(Qwen3Config(**(TINY_QWEN | {"head_dim": 16} | changes)))


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (llama, {}),
    "llama with grouped queries": (llama, {"num_key_value_heads": 2}),
    "llama with one kv head and wide heads": (llama, {"num_key_value_heads": 1, "head_dim": 20}),
    "llama with biases": (llama, {"attention_bias": True, "mlp_bias": True}),
    "llama tied": (llama, {"tie_word_embeddings": True}),
    "llama with llama3 rope": (llama, {"rope_parameters": LLAMA3_ROPE}),
    "llama with linear rope": (
        llama,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    "llama with yarn": (llama, {"rope_parameters": YARN}),
    "llama with a yarn of its own": (
        llama,
        {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 0.8}},
    ),
    "qwen3 with the yarn of deepseek": (qwen3, {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.4}}),
    "llama with another epsilon": (llama, {"rms_norm_eps": 0.5}),
    "qwen2": (qwen2, {}),
    "qwen2 with windows, tied": (qwen2, WINDOWS | {"tie_word_embeddings": True}),
    "qwen3": (qwen3, {}),
    "qwen3 with biases and windows": (qwen3, WINDOWS | {"attention_bias": True}),
    "gemma3": (gemma3, {}),
    "gemma3 with every layer full": (gemma3, {"layer_types": ["full_attention"] * 6}),
    "gemma3 untied": (gemma3, {"tie_word_embeddings": False}),
    "gemma3 with biases and a softcap": (gemma3, {"attention_bias": True, "final_logit_softcapping": 3.0}),
    "gemma3 with a linear global rope": (
        gemma3,
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
}


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model.eval()(torch.tensor([tokens])).logits[0]
        return logits.float()


def randomise(model: Any, seed: int) -> None:
    """Every parameter random and of a size that matters, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)


@pytest.mark.parametrize("shard", ["10GB", "30KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("case", CASES)
def test_a_tiny_model_gives_the_logits_of_transformers(case: str, shard: str, tmp_path: Path) -> None:
    make, changes = CASES[case]
    oracle = make(**changes)
    randomise(oracle, seed=1)
    oracle.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "30KB")
    tokens = torch.randint(1, 97, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = reference_logits(oracle, tokens)
    got = dense_logits(load(open_checkpoint(tmp_path)), tokens)
    torch.testing.assert_close(got, expected, atol=2e-4 * float(expected.abs().max()), rtol=0)


V4_GEMMA = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}


@pytest.mark.parametrize(
    ("case", "old"),
    [
        ("llama", {"rope_theta": 10000.0, "rope_scaling": None, "head_dim": None, "num_key_value_heads": None}),
        ("llama with llama3 rope", {"rope_scaling": LLAMA3_ROPE}),
        (
            "llama with linear rope",
            {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        ),
        ("qwen3 with biases and windows", {"layer_types": None, "rope_theta": 10000.0}),
        ("llama with yarn", {"rope_theta": 10000.0, "rope_scaling": {**YARN, "type": "yarn", "rope_type": None}}),
        ("gemma3 with a linear global rope", V4_GEMMA | {"sliding_window_pattern": 6, "layer_types": None}),
    ],
)
def test_both_spellings_of_a_config_mean_the_same(case: str, old: dict[str, Any], tmp_path: Path) -> None:
    make, changes = CASES[case]
    make(**changes).save_pretrained(tmp_path)
    new = open_checkpoint(tmp_path).config
    file = tmp_path / "config.json"
    raw = {key: value for key, value in json.loads(file.read_text()).items() if key != "rope_parameters"}
    file.write_text(json.dumps(raw | old))
    assert open_checkpoint(tmp_path).config == new


def test_norms_of_queries_and_keys_are_one_row_on_disk_for_all_their_heads(tmp_path: Path) -> None:
    oracle = qwen3()
    randomise(oracle, seed=1)
    oracle.save_pretrained(tmp_path)
    found = load(open_checkpoint(tmp_path))
    assert isinstance(found, Llama)
    attention, theirs = found.model.layers[1].self_attn, oracle.model.layers[1].self_attn
    assert isinstance(attention, Attention)
    assert attention.qk_norm is not None
    rows = torch.cat((theirs.q_norm.weight.expand(4, 16), theirs.k_norm.weight.expand(2, 16)))
    assert torch.equal(attention.qk_norm.weight, rows)
    file = tmp_path / "model.safetensors"
    name = "model.layers.1.self_attn.k_norm.weight"
    save_file(load_file(file) | {name: torch.ones(2, 16)}, file)
    with pytest.raises(ModelError, match=r"k_norm\.weight has the shape \[2, 16\], expected \[16\]"):
        load(open_checkpoint(tmp_path))
    save_file({key: tensor for key, tensor in load_file(file).items() if key != name}, file)
    with pytest.raises(ModelError, match=f"missing tensors: {name}$"):
        load(open_checkpoint(tmp_path))


def test_a_wrapper_gives_its_text_model(tmp_path: Path) -> None:
    """Gemma 3 from 4B on comes inside a model of images and text; only the text model is loaded."""
    gemma3().save_pretrained(tmp_path)
    tokens = list(range(1, 30))
    expected = dense_logits(load(open_checkpoint(tmp_path)), tokens)
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text(json.dumps({"model_type": "gemma3", "text_config": json.loads(config.read_text())}))
    weights = load_file(file)
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in weights.items()}
        save_file(renamed | {"vision_tower.patches.weight": torch.ones(2)}, file)
        assert torch.equal(dense_logits(load(open_checkpoint(tmp_path)), tokens), expected)


def test_the_window_and_the_local_rope_matter(tmp_path: Path) -> None:
    """The tiny Gemma is a witness: past the window its logits are not those of a model without one."""
    oracle = gemma3()
    randomise(oracle, seed=1)
    oracle.save_pretrained(tmp_path)
    tokens = torch.randint(1, 97, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    windowed = dense_logits(load(open_checkpoint(tmp_path)), tokens)
    whole = gemma3(sliding_window=64)
    whole.load_state_dict(oracle.state_dict())
    difference = (reference_logits(whole, tokens) - windowed).abs().amax(-1)
    assert difference[:8].max() < 1e-2 < difference[12:].max()


def real_llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )


def real_gemma3() -> Gemma3TextConfig:
    return Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        query_pre_attn_scalar=256,
        max_position_embeddings=32768,
        pad_token_id=0,
    )


@pytest.mark.weights
@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("smollm2-135m", 200),
        pytest.param("gemma3-270m", 200, marks=pytest.mark.slow),
        pytest.param("gemma3-270m", 700, marks=pytest.mark.slow),
    ],
)
def test_a_real_model_gives_the_logits_of_transformers(name: str, length: int) -> None:
    """The oracle's configuration is written here by hand, so what we read from the file is checked too."""
    checkpoint = open_checkpoint(name)
    oracle = (
        transformers_models.LlamaForCausalLM(real_llama())
        if name == "smollm2-135m"
        else transformers_models.Gemma3ForCausalLM(real_gemma3())
    )
    missing, unexpected = oracle.load_state_dict(dict(checkpoint.weights()), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model = load(checkpoint)
    tokens = torch.randint(10, 40000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    worst = biggest = 0.0
    with torch.inference_mode():
        expected_RD = oracle.eval().model(torch.tensor([tokens])).last_hidden_state[0]
        hidden_RD, _ = model.forward(torch.tensor(tokens), torch.arange(length), Dense())
        for start in range(0, length, 100):  # Gemma's vocabulary is too wide for all rows at once
            expected_LV = oracle.lm_head(expected_RD[start : start + 100])
            logits_LV = model.logits(hidden_RD[start : start + 100])
            assert torch.equal(logits_LV.argmax(-1), expected_LV.argmax(-1))
            worst = max(worst, float((logits_LV - expected_LV).abs().max()))
            biggest = max(biggest, float(expected_LV.abs().max()))
    print(f"{name}, {length} tokens: logits differ by at most {worst:.2e} (they reach {biggest:.1f})")
    assert worst < 2e-3
