"""Reading .gguf files: what converters did is undone, and broken files are told so."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils

from specdec.errors import ModelError
from specdec.gguf import read_gguf, tokenizer_metadata, weights
from specdec.loader import load, open_checkpoint
from specdec.pull import pull
from tests.models.dense import dense_logits
from tests.models.tiny import transformers_models

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
}
LLAMA_NAMES = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def converted_name(name: str, family: str) -> str:
    """The name that a converter gives a Hugging Face tensor."""
    for old, new in (NAMES | (LLAMA_NAMES if family == "llama" else GEMMA_NAMES)).items():
        name = name.replace(old, new)
    return name


def write_gguf(path: Path, model: Any, family: str, kind: gguf.GGMLQuantizationType, **extra: Any) -> None:
    """Convert as the usual converter does: reorder q and k of a Llama, store 1 + w of Gemma's norms."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family == "llama":
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    else:
        writer.add_key_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{token}" for token in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(6)
    writer.add_chat_template("hello")
    for name, values in extra.items():
        writer.add_tensor(name.replace("__", "."), np.asarray(values, np.float32))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
            values = values.swapaxes(1, 2).reshape(tensor.shape)
        if family == "gemma3" and "norm" in name:
            values = values + 1
        if values.ndim == 2 and kind is not gguf.GGMLQuantizationType.F32:
            writer.add_tensor(converted_name(name, family), gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(converted_name(name, family), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def oracle(family: str) -> Any:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    if family == "llama":
        sizes |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "attention_bias": True, "rms_norm_eps": 1e-5}
        model = transformers_models.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        sizes |= {"num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8}
        sizes |= {"query_pre_attn_scalar": 256, "pad_token_id": 0}
        model = transformers_models.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25)
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_converted_model_gives_the_logits_it_had(family: str, tmp_path: Path) -> None:
    model, path = oracle(family), tmp_path / "tiny.gguf"
    write_gguf(path, model, family, gguf.GGMLQuantizationType.F32)
    checkpoint = open_checkpoint(path)
    assert checkpoint.name == "tiny"
    assert (checkpoint.end_ids, checkpoint.chat_template) == ((2, 6), "hello")
    tokens = torch.randint(1, 64, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(dense_logits(load(checkpoint), tokens), expected, atol=1e-4, rtol=1e-4)


def test_frequencies_divided_in_the_file_are_llama3_scaling(tmp_path: Path) -> None:
    """Converters write Llama 3's rotary scaling as a tensor of divisors."""
    model, path = oracle("llama"), tmp_path / "tiny.gguf"
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        **(model.config.to_dict() | {"rope_parameters": scaling | {"original_max_position_embeddings": 16}})
    )
    scaled = transformers_models.LlamaForCausalLM(config).eval()
    scaled.load_state_dict(model.state_dict())
    plain, divided = (m.model.rotary_emb.inv_freq for m in (model, scaled))
    write_gguf(path, model, "llama", gguf.GGMLQuantizationType.F32, rope_freqs__weight=(plain / divided).numpy())
    tokens = list(range(1, 41))
    with torch.inference_mode():
        expected = scaled(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(dense_logits(load(open_checkpoint(path)), tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_block_types_are_what_the_gguf_package_makes_of_them(kind: str, tmp_path: Path) -> None:
    model, path, code = oracle("gemma3"), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind]
    write_gguf(path, model, "gemma3", code)
    got = dict(weights(read_gguf(path)))
    names = {name for name in model.state_dict() if name != "lm_head.weight"}
    assert set(got) == names
    for name in names:
        values = model.state_dict()[name].numpy()
        expected = gguf.dequantize(gguf.quantize(values, code), code) if values.ndim == 2 else (values + 1) - 1
        assert got[name].dtype is torch.float32
        assert np.array_equal(got[name].numpy(), expected), name


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "TQ2_0"])
def test_other_block_types_do_not_care_how_rows_are_cut(kind: str, tmp_path: Path) -> None:
    """These cannot be written by the package, so random bytes stand for their blocks."""
    code = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[code]
    raw = np.random.default_rng(5).integers(0, 60, (6, 1024 // block * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_head_count(4)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    [(name, tensor)] = weights(read_gguf(tmp_path / "tiny.gguf"))
    assert (name, tuple(tensor.shape)) == ("model.embed_tokens.weight", (6, 1024))
    assert np.array_equal(tensor.numpy(), gguf.dequantize(raw, code))


def test_metadata_is_plain_values_and_float32_the_shortest_decimal(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, oracle("llama"), "llama", gguf.GGMLQuantizationType.F32)
    file = read_gguf(path)
    assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5
    values = tokenizer_metadata(file)
    assert values["tokenizer.ggml.tokens"][:2] == ["t0", "t1"]
    assert values["tokenizer.ggml.token_type"] == [1] * 64
    assert type(values["tokenizer.ggml.bos_token_id"]) is int


def patched(data: bytes, at: int, code: str, value: int) -> bytes:
    return data[:at] + struct.pack(code, value) + data[at + struct.calcsize(code) :]


def first(data: bytes, text: bytes, code: str, value: int, skip: int = 0) -> bytes:
    """With a number put behind the first occurrence of `text` and `skip` bytes."""
    return patched(data, data.index(text) + len(text) + skip, code, value)


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "cannot be read"),
    "a few bytes": (lambda data: data[:3], "not a GGUF file"),
    "another format": (lambda data: b"PK\3\4" + data[4:], "not a GGUF file (it begins with b'PK"),
    "version 1": (lambda data: patched(data, 4, "<I", 1), "GGUF version 1 is not supported"),
    "big endian": (lambda data: patched(data, 4, ">I", 3), "GGUF version 50331648 is not supported"),
    "half the header": (lambda data: data[:300], "truncated or corrupt: the header"),
    "half the file": (lambda data: data[: len(data) // 2], "truncated: "),
    "last byte missing": (lambda data: data[:-33], "truncated: "),
    "2**60 tensors": (lambda data: patched(data, 8, "<Q", 2**60), "corrupt"),
    "2**60 values": (lambda data: patched(data, 16, "<Q", 2**60), "corrupt"),
    "a key of 2**60 bytes": (lambda data: patched(data, 24, "<Q", 2**60), "corrupt: a name of"),
    "2**60 tokens": (lambda data: first(data, b"tokenizer.ggml.tokens", "<Q", 2**60, skip=8), "corrupt: an array of"),
    "2**60 token types": (
        lambda data: first(data, b"tokenizer.ggml.token_type", "<Q", 2**60, skip=8),
        "truncated or corrupt",
    ),
    "a value type of 99": (
        lambda data: first(data, b"tokenizer.ggml.bos_token_id", "<I", 99),
        "corrupt: unknown value type 99",
    ),
    "another family": (lambda data: data.replace(b"llama", b"falco"), "general.architecture 'falco' is not supported"),
    "2**61 rows": (lambda data: first(data, b"blk.0.attn_q.weight", "<Q", 2**61, skip=12), "truncated: "),
    "9 dimensions": (lambda data: first(data, b"blk.0.attn_q.weight", "<I", 9), "corrupt: blk.0.attn_q.weight has 9"),
    "a block type of 99": (
        lambda data: first(data, b"blk.0.attn_q.weight", "<I", 99, skip=20),
        "blk.0.attn_q.weight has the unknown block type 99",
    ),
    "an unknown tensor": (
        lambda data: data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_z.weight"),
        "unexpected tensor blk.0.attn_z.weight",
    ),
    "no such layer": (
        lambda data: data.replace(b"blk.1.ffn_norm", b"blk.7.ffn_norm"),
        "missing tensors: model.layers.1.post_attention_layernorm.weight",
    ),
    "a tensor twice": (
        lambda data: data.replace(b"blk.1.ffn_norm", b"blk.0.ffn_norm"),
        "corrupt: blk.0.ffn_norm.weight is there twice",
    ),
    "no embedding": (lambda data: data.replace(b"token_embd", b"token_embe"), "token_embd.weight is missing"),
    "no tokens": (lambda data: data.replace(b"ggml.tokens", b"ggml.tokenz"), "tokenizer.ggml.tokens is missing"),
    "no width": (lambda data: data.replace(b"embedding_length", b"embedding_lengte"), "hidden_size is missing"),
    "other heads": (
        lambda data: first(data, b"llama.attention.head_count_kv", "<I", 3, skip=4),
        "num_key_value_heads must be a divisor",
    ),
    "heads that do not divide rows": (
        lambda data: first(first(data, b"head_count_kv", "<I", 1, skip=4), b"attention.head_count", "<I", 5, skip=4),
        "blk.0.attn_q.weight has 64 rows, which 5 heads cannot share",
    ),
    "other width": (
        lambda data: first(data, b"llama.feed_forward_length", "<I", 95, skip=4),
        "has the shape [96, 64], expected [95, 64]",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_line_that_names_it(case: str, tmp_path: Path) -> None:
    damage, message = BROKEN[case]
    path = tmp_path / "tiny.gguf"
    write_gguf(path, oracle("llama"), "llama", gguf.GGMLQuantizationType.F32)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError) as caught:
        load(open_checkpoint(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_random_damage_is_a_model_error_or_harmless(tmp_path: Path) -> None:
    """Bytes of the header changed at random: never another exception, never a hang."""
    seed = 11
    print("seed", seed)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, oracle("llama"), "llama", gguf.GGMLQuantizationType.Q8_0)
    whole, random = path.read_bytes(), np.random.default_rng(seed)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for at in random.integers(0, 4000, 4):
            data[at] = int(random.integers(256))
        path.write_bytes(data)
        try:
            load(open_checkpoint(path))
        except ModelError:
            refused += 1
    assert refused > 50


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_weights_are_those_that_transformers_reads(name: str) -> None:
    path = pull(name)
    config = open_checkpoint(path).config
    sizes: dict[str, Any] = {"num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads}
    with torch.device("meta"):  # only its names and heads are looked at
        if name == "smollm2-135m":
            model = transformers_models.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=576, **sizes))
        else:
            model = transformers_models.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes))
    reader: Any = modeling_gguf_pytorch_utils
    expected = reader.load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    got = dict(weights(read_gguf(path)))
    assert set(got) == set(expected)
    for key, tensor in got.items():
        assert torch.equal(tensor, torch.as_tensor(expected[key])), key
