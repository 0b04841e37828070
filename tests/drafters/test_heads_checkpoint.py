"""Opening a drafter's folder: which family it is of, and what a damaged one is told."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.drafters.heads.checkpoint import FAMILIES as FAMILIES_HERE
from specdec.drafters.heads.checkpoint import family_of, open_head
from specdec.drafters.heads.eagle import EagleConvention
from specdec.drafters.heads.eagle3 import Eagle3Convention
from specdec.drafters.heads.medusa import MedusaConvention
from specdec.drafters.heads.mtp import MtpConvention
from specdec.drafters.heads.peagle import PEagleConvention
from specdec.errors import ModelError
from tests.drafters.head_files import RECORDED, recorded, target, write
from tests.models.tiny import tiny_llama

ROOT = Path(__file__).parents[2]
ONE = torch.ones(2, 2)
FAMILIES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "speculators says": ({"speculators_model_type": "eagle3"}, ["x"], "eagle3"),
    "midlayer": ({}, ["fc.weight", "midlayer.hidden_norm.weight"], "eagle3"),
    "layers.0.hidden_norm": ({"model_type": "qwen3"}, ["fc.weight", "layers.0.hidden_norm.weight"], "eagle3"),
    "d2t": ({}, ["fc.weight", "d2t"], "eagle3"),
    "fc alone": ({}, ["fc.weight", "layers.0.mlp.up_proj.weight"], "eagle"),
    "mtp beside a deepseek": (
        {"num_nextn_predict_layers": 1},
        ["model.layers.61.eh_proj.weight", "lm_head.weight"],
        "mtp",
    ),
    "mtp beside a mimo": ({"num_nextn_predict_layers": 1}, ["model.mtp_layers.0.input_proj.weight"], "mtp"),
    "mtp beside a qwen 3-next, which has no key": ({}, ["mtp.fc.weight", "model.norm.weight"], "mtp"),
    "mtp beside a qwen 3.5": ({"text_config": {"mtp_num_hidden_layers": 1}}, ["mtp.fc.weight"], "mtp"),
    "medusa by its key": ({"medusa_num_heads": 5}, ["x"], "medusa"),
    "medusa by its names": ({}, ["0.0.linear.weight"], "medusa"),
    "medusa inside a model": ({}, ["medusa_head.0.0.linear.weight", "model.embed_tokens.weight"], "medusa"),
    "medusa of old vllm": ({}, ["blocks.0.layers.0.weight"], "medusa"),
    "peagle": ({}, ["fc.weight", "midlayer.hidden_norm.weight", "mask_hidden"], "peagle"),
    "old speculators": ({"speculators_model_type": "eagle"}, ["fusion_fc.weight"], "eagle"),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_a_family_is_told_by_keys_and_names(case: str, tmp_path: Path) -> None:
    config, names, family = FAMILIES[case]
    assert family_of(write(tmp_path, config, {name: ONE.clone() for name in names})) == family


@pytest.mark.parametrize("shards", [False, True])
def test_a_whole_language_model_is_told_from_a_head(shards: bool, tmp_path: Path) -> None:
    tiny_llama(tmp_path, shards=shards)
    assert family_of(tmp_path) == "draft_model"
    with pytest.raises(ModelError, match="a whole language model, not a head: open it as a draft model"):
        open_head(tmp_path, target())


@pytest.mark.parametrize(
    ("config", "names", "family"),
    [
        ({"speculators_model_type": "dflash"}, ["x"], "dflash"),
        ({"speculators_model_type": "xpress"}, ["x"], "xpress"),
        ({"dflash_config": {"projector_type": "dspark"}}, ["layers.0.input_layernorm.weight", "fc.weight"], "dspark"),
        ({"dflash_config": {"mask_token_id": 3}}, ["layers.0.input_layernorm.weight", "fc.weight"], "dflash"),
        ({}, ["fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"], "dflash"),
        ({}, ["fc.weight", "hidden_norm.weight", "markov_head.markov_w1.weight"], "dspark"),
        ({"markov_rank": 256, "block_size": 7}, ["fc.weight", "hidden_norm.weight"], "dspark"),
        ({}, ["fc.weight", "hidden_norm.weight", "candidate_selector.predecessor_codebook"], "dflash2"),
        ({}, ["fc.weight", "layers.0.attention_conv.base_kernel"], "dflash2"),
        ({}, ["fc.weight", "hidden_norm.weight", "xpress_head.w1.weight"], "xpress"),
    ],
)
def test_a_family_that_cannot_be_run_is_refused_by_name(
    config: dict[str, Any], names: list[str], family: str, tmp_path: Path
) -> None:
    write(tmp_path, config, {name: ONE.clone() for name in names})
    for ask in (family_of, lambda path: open_head(path, target())):
        with pytest.raises(ModelError, match=rf"a {family} drafter, which is not supported; supported: eagle"):
            ask(tmp_path)


def test_what_is_no_drafter_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {}, {"encoder.weight": ONE, "pooler.weight": ONE.clone()})
    with pytest.raises(ModelError, match=r"no drafter that is known holds these tensors: encoder\.weight, pooler"):
        family_of(tmp_path)
    write(tmp_path, {"speculators_model_type": "hydra"}, {"x": ONE})
    with pytest.raises(ModelError, match=r"config\.json: speculators_model_type 'hydra' is not supported"):
        family_of(tmp_path)


class Malicious:
    """What a pickle may hold that must not run."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("true",)


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    truncated(folder / "config.json")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def half_of_the_weights(folder: Path) -> None:
    truncated(folder / "model.safetensors")


def pickled(folder: Path, save: Callable[[Path], object]) -> None:
    no_weights(folder)
    save(folder / "pytorch_model.bin")


def half_of_a_pickle(folder: Path) -> None:
    pickled(folder, lambda file: torch.save({"fc.weight": torch.ones(100, 100)}, file))
    truncated(folder / "pytorch_model.bin")


def a_pickle_that_runs(folder: Path) -> None:
    pickled(folder, lambda file: file.write_bytes(pickle.dumps({"fc.weight": Malicious()})))


def a_pickle_of_a_list(folder: Path) -> None:
    pickled(folder, lambda file: torch.save([ONE], file))


def one_name_twice(folder: Path) -> None:
    config, tensors, _ = recorded("eagle3-llama")
    write(folder, config, tensors | {"model.norm.weight": tensors["norm.weight"].clone()})


def an_index_without_its_file(folder: Path) -> None:
    no_weights(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "part.safetensors"}}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_config, r"config\.json: no such file"),
        (broken_config, r"config\.json: cannot be read"),
        (no_weights, r"model\.safetensors: no such file"),
        (half_of_the_weights, r"model\.safetensors: cannot be read"),
        (half_of_a_pickle, r"pytorch_model\.bin: cannot be read"),
        (a_pickle_that_runs, r"pytorch_model\.bin: cannot be read"),
        (a_pickle_of_a_list, r"pytorch_model\.bin: must hold tensors by name, got list"),
        (one_name_twice, r"model\.norm\.weight and norm\.weight are the same tensor|norm\.weight and model\.norm"),
        (an_index_without_its_file, r"part\.safetensors: no such file"),
    ],
)
def test_a_damaged_folder_is_one_error_that_names_the_file(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    config, tensors, _ = recorded("eagle3-llama")
    write(tmp_path, config, tensors)
    damage(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        open_head(tmp_path, target())
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


ODD: tuple[Any, ...] = (None, -1, 0, 1, "x", "", [], [None], {}, {"a": []}, True, 1.5, float("nan"), 10**13)
ODD_KEYS = [
    ("eagle3-llama", ("draft_vocab_size",)),
    ("eagle3-llama", ("eagle_aux_hidden_state_layer_ids",)),
    ("eagle3-llama", ("logit_scale",)),
    ("eagle3-llama", ("transformer_layer_config",)),
    ("eagle3-llama", ("transformer_layer_config", "head_dim")),
    ("eagle3-llama", ("transformer_layer_config", "vocab_size")),
    ("peagle-llama", ("speculators_config",)),
    ("peagle-llama", ("speculators_config", "proposal_methods")),
    ("peagle-llama", ("mask_token_id",)),
]


@pytest.mark.parametrize(("case", "path"), ODD_KEYS)
def test_an_odd_value_in_a_config_is_at_most_an_error_of_one_line(
    case: str, path: tuple[str, ...], tmp_path: Path
) -> None:
    for odd in ODD:
        config, tensors, _ = recorded(case)
        inner = config
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = odd
        try:
            open_head(write(tmp_path, config, tensors), target())
        except ModelError as error:
            assert "\n" not in str(error), odd
            assert str(tmp_path) in str(error), odd


def test_a_folder_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: no such folder"):
        open_head(tmp_path / "nowhere", target())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_of_the_dtype_that_is_asked_for_but_norms(dtype: torch.dtype) -> None:
    head: Any = open_head(RECORDED / "eagle3-qwen3", target(), dtype=dtype)
    for name, parameter in head.named_parameters():
        assert parameter.dtype == (torch.float32 if "norm" in name else dtype)


CONVENTIONS = {
    "eagle": EagleConvention,
    "eagle3": Eagle3Convention,
    "peagle": PEagleConvention,
    "mtp": MtpConvention,
    "medusa": MedusaConvention,
}


def test_the_manual_lists_every_family_and_every_override() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (ROOT / "docs" / "drafter-models.md").read_text().splitlines()
        if line.startswith("|")
    ]
    assert {*FAMILIES_HERE, "draft_model"} == {row[0].strip("`") for row in rows if len(row) == 3} - {"family", "---"}
    listed: dict[str, list[str]] = {}
    family = ""
    for row in (row for row in rows if len(row) == 4 and row[0] not in ("family", "---")):
        family = row[0] or family
        for one in re.findall(r"`(\w+)`", family):
            listed.setdefault(one, []).append(row[1].strip("`"))
    expected = {family: [field.name for field in fields(kind)] for family, kind in CONVENTIONS.items()}
    expected["peagle"] = [*expected["eagle3"], *expected["peagle"]]
    assert listed == expected
