"""Opening and filling models: what a checkpoint says, and what a broken one is told."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.errors import ModelError
from specdec.loader import load, open_checkpoint
from specdec.models.llama import Llama
from tests.models.dense import Dense, dense_logits
from tests.models.tiny import tiny_llama


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def test_a_folder_tells_its_ids_template_and_defaults(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.end_ids, checkpoint.chat_template) == ((2, 5), None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7, 5], "temperature": 0.6}')
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default", "template": "T"}]}')
    checkpoint = open_checkpoint(str(tmp_path))
    assert (checkpoint.end_ids, checkpoint.chat_template) == ((5, 7), "T")
    assert checkpoint.generation["temperature"] == 0.6
    assert checkpoint.tokenizer == tmp_path / "tokenizer.json"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert open_checkpoint(tmp_path).chat_template == "J"


def test_taps_are_the_streams_that_enter_layers(tmp_path: Path) -> None:
    oracle = tiny_llama(tmp_path)
    tokens = torch.arange(1, 20)
    with torch.inference_mode():
        hidden, taps = load(open_checkpoint(tmp_path)).forward(tokens, torch.arange(19), Dense(), taps=(2, 0, 1))
        expected = oracle(tokens[None], output_hidden_states=True).hidden_states
        norm = oracle.model.norm(taps[0])
    torch.testing.assert_close(taps[1], expected[0][0])
    torch.testing.assert_close(taps[2], expected[1][0])
    torch.testing.assert_close(hidden, expected[2][0])  # transformers gives the last one after the norm
    torch.testing.assert_close(norm, hidden)


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"])
def test_drafters_that_came_with_the_model_are_left_alone(key: str, tmp_path: Path) -> None:
    oracle = tiny_llama(tmp_path)
    tokens = list(range(1, 20))
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    one = torch.ones(3)
    names = [
        "mtp.fc.weight",
        "model.mtp_layers.0.input_proj.weight",
        "model.mtp.layers.0.enorm.weight",
        "medusa_head.0.1.weight",
    ]
    edit_json(tmp_path / "config.json", **{key: 1})
    numbered = ["model.layers.2.eh_proj.weight", "model.layers.2.self_attn.q_proj.weight"]
    edit_weights(tmp_path / "model.safetensors", lambda w: w.update({n: one.clone() for n in (*names, *numbered)}))
    torch.testing.assert_close(dense_logits(load(open_checkpoint(tmp_path)), tokens), expected)
    edit_json(tmp_path / "config.json", **{key: 0})
    with pytest.raises(ModelError, match=r"unexpected tensors: model\.layers\.2\.eh_proj"):
        load(open_checkpoint(tmp_path))
    edit_json(tmp_path / "config.json", **{key: "one"})
    with pytest.raises(ModelError, match=f"{key} must be a positive integer, got 'one'"):
        open_checkpoint(tmp_path)


def test_a_tied_head_is_one_tensor_and_its_copy_on_disk_is_ignored(tmp_path: Path) -> None:
    tiny_llama(tmp_path, tied=True)
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(64, 32)}
    edit_weights(tmp_path / "model.safetensors", lambda weights: weights.update(rotary))
    model = load(open_checkpoint(tmp_path))
    assert isinstance(model, Llama)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())


def test_bf16_rounds_weights_and_keeps_norms(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    model = load(open_checkpoint(tmp_path), dtype=torch.bfloat16)
    assert isinstance(model, Llama)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float32}
    assert model.model.norm.weight.dtype is torch.float32
    logits = dense_logits(model, list(range(1, 20)))
    assert logits.dtype is torch.float32
    torch.testing.assert_close(
        logits, dense_logits(load(open_checkpoint(tmp_path)), list(range(1, 20))), atol=0.05, rtol=0
    )


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    seen: list[tuple[int, int]] = []
    load(open_checkpoint(tmp_path), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 21) for done in range(1, 22)]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def huge_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])


Break = Callable[[Path], object]
BROKEN: dict[str, tuple[Break, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read"),
    "config is not UTF-8": (lambda f: (f / "config.json").write_bytes(b"{\xff}"), "config.json: cannot be read"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json: must hold an object, got list"),
    "config nests without end": (
        lambda f: (f / "config.json").write_text("[" * 100_000),
        "config.json: cannot be read",
    ),
    "family is a list": (
        lambda f: edit_json(f / "config.json", model_type=["llama"]),
        "config.json: model_type ['llama'] is not supported",
    ),
    "layers without end": (
        lambda f: edit_json(f / "config.json", num_hidden_layers=10**9),
        "config.json: num_hidden_layers must be at most 1024, got 1000000000",
    ),
    "template is a number": (
        lambda f: (f / "tokenizer_config.json").write_text('{"chat_template": 5}'),
        "tokenizer_config.json: chat_template must be a string or a list of named ones, got 5",
    ),
    "template is not UTF-8": (
        lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"),
        "chat_template.jinja: cannot be read",
    ),
    "named template without text": (
        lambda f: (f / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default", "template": 1}]}'),
        "tokenizer_config.json: chat_template must be a string",
    ),
    "end is true": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": true}'),
        "must be integers, got True",
    ),
    "unknown family": (
        lambda f: edit_json(f / "config.json", model_type="bert"),
        "config.json: model_type 'bert' is not supported; supported: llama, qwen2, qwen3, gemma3_text",
    ),
    "no layers": (
        lambda f: edit_json(f / "config.json", num_hidden_layers=0),
        "config.json: num_hidden_layers must be a positive integer, got 0",
    ),
    "width missing": (lambda f: edit_json(f / "config.json", hidden_size=None), "the key hidden_size is missing"),
    "heads do not divide": (
        lambda f: edit_json(f / "config.json", num_key_value_heads=3),
        "num_key_value_heads must be a divisor of num_attention_heads (4), got 3",
    ),
    "activation": (
        lambda f: edit_json(f / "config.json", hidden_act="relu"),
        "config.json: hidden_act must be silu, got 'relu'",
    ),
    "longrope": (
        lambda f: edit_json(f / "config.json", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        "rope_parameters: rope_type 'longrope' is not supported; supported: default, linear, llama3, yarn",
    ),
    "yarn without the original length": (
        lambda f: edit_json(f / "config.json", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}),
        "rope_parameters: the key original_max_position_embeddings is missing",
    ),
    "linear without factor": (
        lambda f: edit_json(f / "config.json", rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        "rope_parameters: the key factor is missing",
    ),
    "partial rotary": (
        lambda f: edit_json(f / "config.json", partial_rotary_factor=0.5),
        "partial_rotary_factor 0.5 is not supported",
    ),
    "experts": (lambda f: edit_json(f / "config.json", num_local_experts=8), "num_local_experts 8 is not supported"),
    "softcap in a Llama": (
        lambda f: edit_json(f / "config.json", final_logit_softcapping=30.0),
        "final_logit_softcapping 30.0 is not supported",
    ),
    "quantised": (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "awq"}),
        "config.json: quantization_config",
    ),
    "end ids": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}'),
        "token ids in config.json or generation_config.json must be integers",
    ),
    "generation config": (
        lambda f: (f / "generation_config.json").write_text("?"),
        "generation_config.json: cannot be read",
    ),
    "chat template in Latin-1": (
        lambda f: (f / "chat_template.jinja").write_bytes(b"\xe9"),
        "chat_template.jinja: cannot be read",
    ),
    "chat template of another kind": (
        lambda f: (f / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default", "template": 1}]}'),
        "tokenizer_config.json: chat_template must be a string or a list of named ones, got 1",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: no such file"),
    "pickle only": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "pytorch_model.bin: pickled weights are not read",
    ),
    "truncated": (lambda f: truncate(f / "model.safetensors"), "model.safetensors: cannot be read"),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors: cannot be read"),
    "header of 2**60 bytes": (lambda f: huge_header(f / "model.safetensors"), "model.safetensors: cannot be read"),
    "missing tensor": (
        lambda f: edit_weights(f / "model.safetensors", lambda w: w.pop("model.layers.1.self_attn.k_proj.weight")),
        "missing tensors: model.layers.1.self_attn.k_proj.weight",
    ),
    "no head": (
        lambda f: edit_weights(f / "model.safetensors", lambda w: w.pop("lm_head.weight")),
        "missing tensors: lm_head.weight",
    ),
    "extra tensors": (
        lambda f: edit_weights(f / "model.safetensors", lambda w: w.update(extra=torch.ones(1), more=torch.ones(1))),
        "unexpected tensors: extra, more",
    ),
    "wrong shape": (
        lambda f: edit_weights(f / "model.safetensors", lambda w: w.update({"model.norm.weight": torch.ones(31)})),
        "model.norm.weight has the shape [31], expected [32]",
    ),
    "whole numbers": (
        lambda f: edit_weights(
            f / "model.safetensors", lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})
        ),
        "model.norm.weight is int8",
    ),
}
BROKEN_SHARDS: dict[str, tuple[Break, str]] = {
    "missing shard": (
        lambda f: (f / "model-00002-of-00006.safetensors").unlink(),
        "model-00002-of-00006.safetensors: no such file, but model.safetensors.index.json names it",
    ),
    "truncated shard": (
        lambda f: truncate(f / "model-00002-of-00006.safetensors"),
        "model-00002-of-00006.safetensors: cannot be read",
    ),
    "shard without its tensor": (
        lambda f: save_file({}, f / "model-00002-of-00006.safetensors"),
        "is missing, but the index says it is here",
    ),
    "shard elsewhere": (
        lambda f: edit_json(f / "model.safetensors.index.json", weight_map={"a": "../model.safetensors"}),
        "model.safetensors.index.json: weight_map.a must be the name of a file in this folder",
    ),
    "empty index": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "model.safetensors.index.json: the key weight_map must be an object",
    ),
}


@pytest.mark.parametrize("case", [*BROKEN, *BROKEN_SHARDS])
def test_a_broken_folder_is_one_line_that_names_the_file(case: str, tmp_path: Path) -> None:
    tiny_llama(tmp_path, shards=case in BROKEN_SHARDS)
    load(open_checkpoint(tmp_path))
    damage, message = (BROKEN | BROKEN_SHARDS)[case]
    damage(tmp_path)
    with pytest.raises(ModelError) as caught:
        load(open_checkpoint(tmp_path))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["nothing.gguf", "no such model", "a/b/c", ""])
def test_a_source_that_is_nowhere_says_what_would_be_right(source: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no such file or folder, no hub id .*smollm2-135m") as caught:
        open_checkpoint(f"{tmp_path}/{source}/x" if source != "no such model" else source)
    assert "\n" not in str(caught.value)


def test_a_hub_id_offline_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="nobody/no-such-model: not in the local cache") as caught:
        open_checkpoint("nobody/no-such-model")
    assert "\n" not in str(caught.value)


def test_a_hub_id_in_the_local_cache_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    commit = "0123456789012345678901234567890123456789"
    repository = tmp_path / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    tiny_llama(repository / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    checkpoint = open_checkpoint("someone/tiny")
    assert checkpoint.name == "someone/tiny"
    assert load(checkpoint).vocab_size == 64


@pytest.mark.weights
def test_smollm2_knows_the_capital_of_france() -> None:
    checkpoint = open_checkpoint("smollm2-135m")
    assert (checkpoint.name, checkpoint.end_ids) == ("smollm2-135m", (2,))
    assert checkpoint.chat_template is not None
    assert isinstance(checkpoint.tokenizer, dict)
    vocabulary = checkpoint.tokenizer["tokenizer.ggml.tokens"]
    tokens = [vocabulary.index(piece) for piece in ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")]
    assert vocabulary[int(dense_logits(load(checkpoint), tokens)[-1].argmax())] == "ĠParis"
