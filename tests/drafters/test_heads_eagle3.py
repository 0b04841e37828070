"""EAGLE-3 heads: their logits against those that the `speculators` library computed, and what their files may say."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafters.heads import Head
from specdec.drafters.heads.checkpoint import family_of, open_head
from specdec.drafters.heads.eagle3 import Eagle3
from specdec.errors import ConfigError, ModelError
from tests.drafters.head_files import (
    LAYERS,
    RECORDED,
    VOCABULARY,
    WIDTH,
    Tensors,
    first_step,
    parts,
    recorded,
    renamed,
    target,
    write,
)
from tests.drafters.rows import Rows, causal

CASES = sorted(folder.name for folder in RECORDED.glob("eagle3-*"))
D2T = "eagle3-qwen3"  # the case whose draft vocabulary is smaller


def eagle3(folder: Path, overrides: dict[str, Any] | None = None, **changes: Any) -> Eagle3:
    head = open_head(folder, target(**changes), overrides)
    assert isinstance(head, Head)
    assert isinstance(head, Eagle3)
    return head


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_three_steps_give_the_logits_of_speculators(case: str) -> None:
    """Step 1 is one causal run over true features. In the later ones each row goes on from its own hidden state with
    the next token, seeing the true rows up to its start and its own earlier steps."""
    config, _, expected = recorded(case)
    head = eagle3(RECORDED / case)
    tokens, rows = expected["tokens"], len(expected["tokens"])
    hidden = head.features(parts(expected["features"]))
    attend, seen, worst = Rows(), causal(rows), 0.0
    has_windows = "sliding_attention" in config["transformer_layer_config"].get("layer_types", [])
    for step in range(1 if has_windows else 3):
        fed = torch.cat((tokens[step:], tokens.new_zeros(step)))  # the library pads what is behind the last token
        hidden = head.forward(fed, hidden, 1 + step + torch.arange(rows), attend.see(seen))
        logits = head.logits(hidden)
        assert logits.dtype == torch.float32
        worst = max(worst, float((logits - expected[f"step{step}"])[: rows - step].abs().max()))
        seen = torch.cat((seen, torch.eye(rows, dtype=torch.bool)), 1)
    print(f"{case}: largest difference {worst:.2e}")
    assert worst < 1e-5


def plain(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The config as SpecForge and the authors of EAGLE write it: flat, in the spelling of transformers 4."""
    inner = config["transformer_layer_config"]
    rope = {"rope_theta": inner["rope_parameters"]["rope_theta"], "rope_scaling": None}
    flat = {key: value for key, value in inner.items() if key not in ("rope_parameters", "layer_types")} | rope
    return (
        flat | {"draft_vocab_size": config["draft_vocab_size"], "architectures": ["LlamaForCausalLMEagle3"]} | changes
    )


LAYOUTS: dict[str, dict[str, Any]] = {
    "one file": {},
    "midlayer": {"names": [("layers.0.", "midlayer.")]},
    "a leading model.": {"names": [("", "model.")]},
    "midlayer behind a leading model., pickled": {
        "names": [("layers.0.", "midlayer."), ("", "model.")],
        "weights": "pytorch_model.bin",
    },
    "sharded": {"weights": "sharded"},
    "ids in eagle_config": {"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}},
    "ids at the top": {"config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}},
    "ids of outputs": {"config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
    "ids of outputs, as target_layer_ids": {"config": {"target_layer_ids": [1, 3, 4]}},
    "rope_parameters": {"config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}},
    "keys left over from a target with experts": {"config": {"num_experts": 128, "max_position_embeddings": 16}},
    "without t2d": {"drop": ["t2d"]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_same_head_is_the_same_head(layout: str, tmp_path: Path) -> None:
    config, tensors, expected = recorded(D2T)
    says = LAYOUTS[layout]
    kept = {name: tensor for name, tensor in tensors.items() if name not in says.get("drop", [])}
    write(
        tmp_path,
        plain(config, **says.get("config", {})),
        renamed(kept, *says.get("names", [])),
        weights=says.get("weights", "model.safetensors"),
    )
    assert family_of(tmp_path) == "eagle3"
    head = eagle3(tmp_path)
    assert head.taps == (2, 4, 5)
    logits = first_step(head, expected["tokens"], parts(expected["features"]))
    torch.testing.assert_close(logits, expected["step0"], atol=1e-5, rtol=0)


def test_draft_ids_are_offsets_from_the_target_s() -> None:
    _, tensors, _ = recorded(D2T)
    head = eagle3(RECORDED / D2T)
    assert head.targets is not None
    assert head.targets.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    assert eagle3(RECORDED / "eagle3-llama").targets is None


def logits_of(head: Head, expected: Tensors) -> Tensor:
    return first_step(head, expected["tokens"], parts(expected["features"]))


def test_what_a_file_lacks_at_both_ends_is_the_target_s(tmp_path: Path) -> None:
    config, tensors, expected = recorded("eagle3-llama")
    ends = {name: tensors.pop(f"{name}.weight") for name in ("embed_tokens", "lm_head")}
    write(tmp_path, plain(config), tensors)
    head = eagle3(tmp_path, embedding=ends["embed_tokens"], head=ends["lm_head"])
    torch.testing.assert_close(logits_of(head, expected), expected["step0"], atol=1e-5, rtol=0)


def test_a_target_may_be_padded_further_than_its_head(tmp_path: Path) -> None:
    config, tensors, expected = recorded("eagle3-llama")
    head = eagle3(write(tmp_path / "own", plain(config), tensors), vocabulary=VOCABULARY + 8)
    assert head.targets is not None
    assert head.targets.tolist() == list(range(VOCABULARY))
    torch.testing.assert_close(logits_of(head, expected), expected["step0"], atol=1e-5, rtol=0)
    past = expected | {"tokens": expected["tokens"].clone().fill_(VOCABULARY + 7)}
    assert logits_of(head, past).isfinite().all()
    padded = torch.cat((tensors.pop("lm_head.weight"), torch.ones(8, WIDTH)))
    head = eagle3(write(tmp_path / "target", plain(config), tensors), vocabulary=VOCABULARY + 8, head=padded)
    assert head.targets is None
    assert logits_of(head, expected).shape == (len(expected["tokens"]), VOCABULARY + 8)
    with pytest.raises(ModelError, match=r"missing tensors: d2t \(the head's vocabulary has 40 ids, the target's 36\)"):
        eagle3(RECORDED / "eagle3-llama", vocabulary=36)


def test_a_tied_head_without_lm_head_uses_its_own_embedding(tmp_path: Path) -> None:
    config, tensors, expected = recorded("eagle3-llama")
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    write(tmp_path / "whole", plain(config), tensors)
    del tensors["lm_head.weight"]
    write(tmp_path / "tied", plain(config, tie_word_embeddings=True), tensors)
    whole, short = (logits_of(eagle3(tmp_path / name), expected) for name in ("whole", "tied"))
    torch.testing.assert_close(short, whole)


def test_a_head_may_be_narrower_than_its_target(tmp_path: Path) -> None:
    config, tensors, expected = recorded("eagle3-llama")
    tensors["fc.weight"] = tensors["fc.weight"].repeat(1, 2)
    write(tmp_path, plain(config, target_hidden_size=2 * WIDTH), tensors)
    head = eagle3(tmp_path, width=2 * WIDTH)
    halves = torch.cat([torch.cat((x, torch.zeros_like(x)), 1) for x in parts(expected["features"])], 1)
    taps = parts(halves, 2 * WIDTH)
    assert head.features(taps).shape == (len(halves), WIDTH)
    assert first_step(head, expected["tokens"], taps).shape == expected["step0"].shape
    del tensors["lm_head.weight"]
    write(tmp_path, plain(config), tensors)
    with pytest.raises(ModelError, match=r"lm_head\.weight; the target's do not fit"):
        eagle3(tmp_path, width=2 * WIDTH)


@pytest.mark.parametrize(
    ("named", "speculators", "taps"),
    [
        (None, False, (2, 4, 5)),
        ([2, 4, 5], False, (2, 4, 5)),
        ([1, 3, 6], False, (2, 4, 7)),
        ([1, 3, 8], False, (1, 3, 8)),
        ([1, 3, 6], True, (1, 3, 6)),
        ([3, 4, 6], False, (3, 4, 6)),
    ],
)
def test_layer_ids_are_boundaries_or_outputs(
    named: list[int] | None,
    speculators: bool,
    taps: tuple[int, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, tensors, _ = recorded("eagle3-llama")
    config = (config if speculators else plain(config)) | {"eagle_aux_hidden_state_layer_ids": named}
    write(tmp_path, config, tensors)
    with caplog.at_level(logging.WARNING):
        assert eagle3(tmp_path).taps == taps
    assert ("aux_convention" in caplog.text) == (taps == (3, 4, 6))
    assert eagle3(tmp_path, {"aux_layers": [0, 3, 7], "aux_convention": "output"}).taps == (1, 4, 8)
    assert eagle3(tmp_path, {"aux_layers": (0, 3, 8), "aux_convention": "boundary"}).taps == (0, 3, 8)


def test_a_head_without_fc_reads_one_feature(tmp_path: Path) -> None:
    config, tensors, expected = recorded("eagle3-llama")
    del tensors["fc.weight"]
    write(tmp_path, plain(config, eagle_config={"use_aux_hidden_state": False}), tensors)
    head = eagle3(tmp_path)
    assert head.taps == (LAYERS + 1,)
    assert eagle3(tmp_path, {"features": "before_norm"}).taps == (LAYERS,)
    feature = expected["features"][:, :WIDTH]
    torch.testing.assert_close(head.features([feature]), feature)
    write(tmp_path, plain(config), tensors)
    with pytest.raises(ModelError, match=r"missing tensors: fc\.weight"):
        eagle3(tmp_path)


def test_a_norm_in_the_file_is_used_though_the_config_is_silent(tmp_path: Path) -> None:
    config, tensors, expected = recorded("eagle3-qwen3-before-fc")
    assert config["norm_before_fc"]
    write(tmp_path, plain(config, norm_before_residual=True), tensors)
    torch.testing.assert_close(logits_of(eagle3(tmp_path), expected), expected["step0"], atol=1e-5, rtol=0)
    config, tensors, expected = recorded("eagle3-llama-norm-output")
    old = renamed(tensors, *((f"fc_norm.{i}.", f"aux_norm_{x}.") for i, x in enumerate(("low", "mid", "high"))))
    write(tmp_path, plain(config, norm_output=True, use_aux_norm=True), old)
    torch.testing.assert_close(logits_of(eagle3(tmp_path), expected), expected["step0"], atol=1e-5, rtol=0)


def test_old_speculators_files_that_are_silent_mean_the_normed_residual(tmp_path: Path) -> None:
    config, tensors, expected = recorded("eagle3-llama-residual-d2t")
    del config["norm_before_residual"]
    write(tmp_path, config, tensors)
    torch.testing.assert_close(logits_of(eagle3(tmp_path), expected), expected["step0"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "change", [{"norm_before_residual": True}, {"embed_first": False}, {"logit_scale": 0.5}, {"norm_output": True}]
)
def test_every_knob_turns_something(change: dict[str, Any]) -> None:
    _, _, expected = recorded("eagle3-llama")
    usual, turned = eagle3(RECORDED / "eagle3-llama"), eagle3(RECORDED / "eagle3-llama", change)
    if "norm_output" in change:  # of one step it changes what the next one reads, not the logits
        torch.testing.assert_close(logits_of(turned, expected), logits_of(usual, expected))
        features = usual.features(parts(expected["features"]))
        first, other = (
            head.forward(expected["tokens"], features, torch.arange(9), Rows().see(causal(9)))
            for head in (usual, turned)
        )
        torch.testing.assert_close(usual.body.norm(first), other)
    else:
        assert not torch.allclose(logits_of(turned, expected), logits_of(usual, expected), atol=1e-2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"norm_outputs": True}, r"eagle3 has no override 'norm_outputs'; it has: aux_layers, .*logit_scale"),
        ({"norm_output": "yes"}, r"the override norm_output of eagle3: .*boolean.*, got 'yes'"),
        ({"aux_convention": "A"}, r"the override aux_convention of eagle3: .*'boundary' or 'output', got 'A'"),
        ({"aux_layers": [2, 4.5, 5]}, r"the override aux_layers of eagle3: .*integer"),
    ],
)
def test_a_wrong_override_is_told_what_would_be_right(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        eagle3(RECORDED / "eagle3-llama", overrides)


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def with_(name: str, tensor: Tensor) -> Any:
    return lambda tensors: tensors.update({name: tensor})


BROKEN: dict[str, tuple[dict[str, Any], Any, str]] = {
    "a missing norm": ({}, without("layers.0.hidden_norm.weight"), r"missing tensors: layers\.0\.hidden_norm\.weight"),
    "a missing projection": ({}, without("layers.0.mlp.up_proj.weight"), r"missing tensors: .*up_proj"),
    "an unknown tensor": ({}, with_("layers.0.gate.weight", torch.ones(3)), r"unexpected tensors: layers\.0\.gate"),
    "a lone bias": ({}, with_("layers.0.self_attn.q_proj.bias", torch.ones(16)), r"missing tensors: .*k_proj\.bias"),
    "a wrong shape": (
        {},
        with_("norm.weight", torch.ones(15)),
        r"norm\.weight has the shape \[15\], expected \[16\]",
    ),
    "experts": ({}, with_("layers.0.mlp.experts.0.w1.weight", torch.ones(3)), r"unexpected tensors: .*experts"),
    "no d2t": ({}, without("d2t"), r"missing tensors: d2t \(the head's vocabulary has 24 ids, the target's 40\)"),
    "d2t of floats": ({}, with_("d2t", torch.ones(24)), r"d2t is float32 \[24\], expected integers \[24\]"),
    "d2t of another size": ({}, with_("d2t", torch.ones(7, dtype=torch.long)), r"d2t is int64 \[7\], expected"),
    "d2t out of range": ({}, with_("d2t", torch.full((24,), 17)), r"d2t must give 24 different ids"),
    "d2t that repeats": ({}, with_("d2t", -torch.arange(24)), r"d2t must give 24 different ids"),
    "fc of another target": (
        {},
        with_("fc.weight", torch.ones(16, 40)),
        r"fc\.weight reads 40 numbers.*hidden_size 16",
    ),
    "five layers, none named": (
        {"eagle_aux_hidden_state_layer_ids": None},
        with_("fc.weight", torch.ones(16, 80)),
        r"fc\.weight reads 5 layers of the target, but \[\] are named; .*aux_layers",
    ),
    "a layer that the target lacks": (
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
        lambda _: None,
        r"the layers \[2, 4, 9\] \(by boundary\) are not all among the target's 8",
    ),
    "ids that are no list": (
        {"eagle_aux_hidden_state_layer_ids": "2,4,5"},
        lambda _: None,
        r"config\.json: eagle_aux_hidden_state_layer_ids: .*tuple.*, got '2,4,5'",
    ),
    "a flag that is a number": (
        {"norm_output": 1},
        lambda _: None,
        r"config\.json: norm_output: .*boolean.*, got 1",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong(case: str, tmp_path: Path) -> None:
    changes, change, message = BROKEN[case]
    config, tensors, _ = recorded(D2T)
    change(tensors)
    write(tmp_path, config | changes, tensors)
    with pytest.raises(ModelError, match=message) as caught:
        eagle3(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", None, r"config\.json: the key hidden_size is missing"),
        ("num_key_value_heads", 3, r"config\.json: num_key_value_heads must be a divisor"),
        ("hidden_act", "gelu", r"config\.json: hidden_act must be silu, got 'gelu'"),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 4.0}, r"rope_type 'dynamic' is not supported"),
    ],
)
def test_a_wrong_body_names_the_file_and_the_key(key: str, value: Any, message: str, tmp_path: Path) -> None:
    config, tensors, _ = recorded("eagle3-llama")
    config["transformer_layer_config"][key] = value
    write(tmp_path, config, tensors)
    with pytest.raises(ModelError, match=message):
        eagle3(tmp_path)
