"""Drafters with files, from options to text: found by what is in their folder, run with the target, refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.build import Options, build, drafter_names
from specdec.errors import ConfigError, ModelError
from specdec.request import Request, Sampling, Stopping
from tests.fakes import run, texts
from tests.server.conftest import write_model

COMMON: dict[str, Any] = {"policy": "fixed", "max_drafts": 8, "threads": 1, "max_model_len": 64}
SAMPLING = Sampling(temperature=0.7, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def other(model: Path, folder: Path) -> Path:
    """A model with the same tokenizer and other weights."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    for tensor in tensors.values():
        tensor += torch.randn(tensor.shape, generator=generator) * 0.02
    save_file(tensors, folder / "model.safetensors")
    return folder


def eagle(model: Path, folder: Path) -> Path:
    config = json.loads((model / "config.json").read_text())
    D, inner = config["hidden_size"], config["intermediate_size"]
    K = D // config["num_attention_heads"]
    pairs = config["num_key_value_heads"] * K
    shapes = {
        "fc.weight": (D, 2 * D),
        "layers.0.self_attn.q_proj.weight": (D, D),
        "layers.0.self_attn.k_proj.weight": (pairs, D),
        "layers.0.self_attn.v_proj.weight": (pairs, D),
        "layers.0.self_attn.o_proj.weight": (D, D),
        "layers.0.mlp.gate_proj.weight": (inner, D),
        "layers.0.mlp.up_proj.weight": (inner, D),
        "layers.0.mlp.down_proj.weight": (D, inner),
        "layers.0.post_attention_layernorm.weight": (D,),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "bias": False}))
    generator = torch.Generator().manual_seed(4)
    save_file(
        {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return folder


def outputs(model: Path, **options: Any) -> tuple[Any, Any]:
    loaded = build(str(model), Options(**{**COMMON, **options}))
    requests = [Request(prompt, SAMPLING, Stopping(max_tokens=24)) for prompt in ((5, 6, 7), (8,), tuple(range(5, 40)))]
    return texts(run(loaded.engine, requests)), loaded.engine


@pytest.fixture(scope="module")
def plain(model: Path) -> Any:
    return outputs(model, drafter="none")[0]


@pytest.mark.parametrize("kind", ["the target", "another model", "eagle", "layer_skip:1", "layer_skip"])
def test_the_text_is_the_targets(kind: str, model: Path, plain: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "the target": lambda: {"draft_model": str(model), "drafter": "suffix"},
        "another model": lambda: {"draft_model": str(other(model, tmp_path / "other")), "drafter": "draft_model"},
        "eagle": lambda: {"draft_model": str(eagle(model, tmp_path / "eagle")), "drafter": "forced,suffix"},
    }.get(kind, lambda: {"drafter": kind})()
    told, engine = outputs(model, **options)
    assert told == plain
    assert engine.metrics.drafter_errors == 0
    name = {"the target": "draft_model", "another model": "draft_model"}.get(kind, kind.partition(":")[0])
    assert engine.metrics.acceptance.by_source[name].draft_tokens > 0
    assert name in engine.drafting.names


def test_trees_have_the_shape_that_a_file_of_ranks_gives(model: Path, plain: Any, tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    file.write_text(json.dumps({"rank_accuracy": [[0.6, 0.5], [0.9]]}))
    told, engine = outputs(model, drafter="layer_skip:1", draft_ranks=str(file), max_drafts=3)
    assert told == plain
    for number in range(3):  # rank 0 and its child are worth .6 and .54, rank 1 .5, its child .45
        engine.add(Request((9, number), SAMPLING, Stopping(max_tokens=9)), f"s{number}")
    drafts = set()
    while engine.has_work:
        drafts |= {emission.num_drafts for emission in engine.step()}
    assert max(drafts) == 3


BAD: dict[str, tuple[Mapping[str, Any], type[Exception], str]] = {
    "no files": ({"drafter": "eagle3"}, ConfigError, "eagle3 needs files of its own"),
    "a draft model without files": ({"drafter": "draft_model"}, ConfigError, "draft_model needs files of its own"),
    "no such folder": ({"draft_model": "/no/such/folder"}, ModelError, "/no/such/folder"),
    "too many layers": ({"drafter": "layer_skip:9"}, ConfigError, "layer_skip takes 1 to"),
    "no number": ({"drafter": "layer_skip:x"}, ConfigError, "layer_skip takes 1 to"),
    "a number for one without": ({"drafter": "suffix:3"}, ConfigError, "suffix takes no number"),
    "no levels": ({"draft_depth": 0}, ConfigError, "draft_depth must be between 1 and 62, got 0"),
    "no file of ranks": ({"drafter": "layer_skip", "draft_ranks": "/no/file"}, ConfigError, "draft_ranks /no/file"),
    "no module in the target": ({"drafter": "mtp"}, ConfigError, "holds no module for multi-token prediction; name"),
    "one drafter twice": ({"drafter": "layer_skip:1,layer_skip:2"}, ConfigError, "layer_skip is named twice"),
    "more digits than a number": ({"drafter": f"layer_skip:{'9' * 5000}"}, ConfigError, "layer_skip takes 1 to"),
    "a colon and no files": ({"drafter": "eagle:"}, ConfigError, "eagle: needs files of its own: name them with"),
    "a name longer than names are": ({"draft_model": "a" * 5000}, ModelError, "no such file or folder"),
    "no name": ({"draft_model": ""}, ModelError, "no such file or folder"),
    "overrides without a head": ({"draft_overrides": {"x": 1}}, ConfigError, "draft_overrides are for heads, got x"),
    "overrides of the target's layers": (
        {"drafter": "layer_skip", "draft_overrides": {"x": 1}}, ConfigError, "draft_overrides are for heads, got x"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_by_name(case: str, model: Path) -> None:
    options, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        build(str(model), Options(**{**COMMON, **options}))


def test_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    folder = other(model, tmp_path / "other")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, two = list(vocab)[20:22]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="its tokenizer is not the target's"):
        build(str(model), Options(**COMMON, draft_model=str(folder)))


@pytest.mark.parametrize(
    "text",
    [
        '{"rank_accuracy": []}',
        '{"rank_accuracy": [[]]}',
        '{"rank_accuracy": [[2.0]]}',
        '{"rank_accuracy": [[NaN]]}',
        '{"rank_accuracy": ["11"]}',
        "[]",
        "{",
        "[" * 100_000,
        '{"rank_accuracy": 3}',
    ],
)
def test_a_file_that_holds_no_ranks_is_refused(text: str, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="draft_ranks"):
        build(str(model), Options(**COMMON, drafter="layer_skip", draft_ranks=str(file)))


def test_ranks_that_shape_no_tree_are_refused(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    file.write_text('{"rank_accuracy": [[0.5]]}')
    with pytest.raises(ConfigError, match="draft_ranks are for drafters that are models"):
        build(str(model), Options(**COMMON, drafter="suffix", draft_ranks=str(file)))


def test_files_name_their_drafter() -> None:
    assert drafter_names("suffix", "eagle3") == ("prediction", "suffix", "eagle3")
    assert drafter_names("eagle3,suffix", "eagle3") == ("prediction", "eagle3", "suffix")
    with pytest.raises(ConfigError, match="drafter medusa needs files of its own: those of --draft-model are a eagle3"):
        drafter_names("medusa", "eagle3")
    with pytest.raises(ConfigError, match="drafter mtp needs files of its own: those of --draft-model are a eagle3"):
        drafter_names("mtp", "eagle3")
    assert drafter_names("eagle3:", "eagle3") == ("prediction", "eagle3:")
