"""P-EAGLE heads: their logits against those that the `speculators` library computed, and what their files may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.drafters.heads import Head
from specdec.drafters.heads.checkpoint import family_of, open_head
from specdec.drafters.heads.peagle import PEagle
from specdec.errors import ConfigError, ModelError
from tests.drafters.head_files import RECORDED, WIDTH, Tensors, off_by, parts, recorded, renamed, target, write
from tests.drafters.rows import Rows, causal

CASES = sorted(folder.name for folder in RECORDED.glob("peagle-*"))
MASK, AHEAD = 7, 3


def peagle(folder: Path, overrides: dict[str, Any] | None = None) -> PEagle:
    assert family_of(folder) == "peagle"
    head = open_head(folder, target(), overrides)
    assert isinstance(head, Head)
    assert isinstance(head, PEagle)
    return head


@torch.inference_mode()
def worst_difference(head: PEagle, expected: Tensors) -> float:
    """All recorded rows but those that begin before the text, with the true rows computed once and each rollout behind
    its anchor."""
    tokens, features = expected["tokens"], head.features(parts(expected["features"]))
    rows = len(tokens)
    recorded_rows = {
        (int(anchor), int(depth)): row
        for anchor, depth, row in zip(expected["anchors"], expected["depths"], expected["logits"], strict=True)
    }
    worst, compared = 0.0, 0
    for anchor in range(rows):
        attend = Rows()
        known = anchor + 1
        true = head.forward(tokens[:known], features[:known], torch.arange(known), attend.see(causal(known)))
        guessed = range(known, known + AHEAD - 1)
        seen = torch.cat((torch.ones(AHEAD - 1, known, dtype=torch.bool), causal(AHEAD - 1)), 1)
        masks = torch.full((AHEAD - 1,), head.mask_token)
        filled = head.mask_features().expand(AHEAD - 1, -1)
        after = head.forward(masks, filled, torch.tensor(guessed), attend.see(seen))
        got = head.logits(torch.cat((true[-1:], after)))
        for depth, row in enumerate(got):
            if (anchor, depth) in recorded_rows:
                worst, compared = max(worst, off_by(row, recorded_rows[anchor, depth])), compared + 1
    assert compared > rows + 3
    return worst


@pytest.mark.parametrize("case", CASES)
def test_one_forward_gives_all_rows_of_speculators(case: str) -> None:
    _, _, expected = recorded(case)
    head = peagle(RECORDED / case)
    assert (head.name, head.mask_token, head.ahead, len(head.layers)) == ("peagle", MASK, AHEAD, 2)
    worst = worst_difference(head, expected)
    print(f"{case}: largest difference {worst:.2e}")
    assert worst < 1e-5


def test_a_plain_file_in_the_other_spelling_is_the_same_head(tmp_path: Path) -> None:
    config, tensors, expected = recorded("peagle-llama")
    inner = config["transformer_layer_config"]
    plain = inner | {"draft_vocab_size": 24, "norm_before_residual": True, "pard_token": MASK}
    write(tmp_path, plain, renamed(tensors, ("layers.0.", "midlayer.")), weights="pytorch_model.bin")
    head = peagle(tmp_path)
    assert worst_difference(head, expected) < 1e-5
    assert head.ahead == 8
    turned = peagle(tmp_path, {"ahead": 4, "mask_token": 9, "norm_before_residual": False})
    assert (turned.ahead, turned.mask_token) == (4, 9)
    assert worst_difference(turned, expected) > 1e-2


def test_a_silent_speculators_file_means_the_plain_residual(tmp_path: Path) -> None:
    config, tensors, expected = recorded("peagle-qwen3")
    del config["norm_before_residual"]
    assert worst_difference(peagle(write(tmp_path, config, tensors)), expected) < 1e-5


@pytest.mark.parametrize(
    ("says", "change", "message"),
    [
        ({"mask_token_id": None}, {}, r"config\.json: the key mask_token_id is missing; name .* override mask_token"),
        ({"mask_token_id": 40}, {}, r"mask_token is 40, which is no id of the target's 40"),
        ({}, {"mask_hidden": None}, r"missing tensors: mask_hidden"),
        (
            {},
            {"mask_hidden": torch.ones(1, 1, WIDTH)},
            r"mask_hidden has the shape \[1, 1, 16\], expected \[1, 1, 48\]",
        ),
        ({}, {"layers.1.self_attn.v_proj.weight": None}, r"missing tensors: layers\.1\.self_attn\.v_proj\.weight"),
        ({}, {"mask_bias": torch.ones(2)}, r"unexpected tensors: mask_bias"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(
    says: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, tensors, _ = recorded("peagle-llama")
    kept = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    write(tmp_path, config | says, kept)
    with pytest.raises(ModelError, match=message) as caught:
        open_head(tmp_path, target())
    assert str(tmp_path) in str(caught.value)


def test_a_wrong_override_is_told_what_would_be_right() -> None:
    with pytest.raises(ConfigError, match="peagle has no override 'depth'; it has: mask_token, ahead, aux_layers, "):
        peagle(RECORDED / "peagle-llama", {"depth": 4})
    with pytest.raises(ConfigError, match=r"the override ahead of peagle: .*integer.*, got '4'"):
        peagle(RECORDED / "peagle-llama", {"ahead": "4"})
    with pytest.raises(ConfigError, match=r"the override norm_output of peagle: .*boolean"):
        peagle(RECORDED / "peagle-llama", {"norm_output": 1})
