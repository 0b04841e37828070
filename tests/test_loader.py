"""Opening and filling models."""

from __future__ import annotations

import pytest
import torch

from specdec.loader import load, open_checkpoint
from specdec.models.llama import Llama
from tests.models.dense import dense_logits


@pytest.mark.weights
def test_smollm2_knows_the_capital_of_france() -> None:
    checkpoint = open_checkpoint("smollm2-135m")
    assert (checkpoint.end_ids, checkpoint.bos_id) == ((2,), 1)
    assert isinstance(checkpoint.tokenizer, dict)
    vocabulary = checkpoint.tokenizer["tokenizer.ggml.tokens"]
    model = load(checkpoint)
    assert isinstance(model, Llama)
    tokens = [vocabulary.index(piece) for piece in ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")]
    assert vocabulary[int(dense_logits(model, tokens)[-1].argmax())] == "ĠParis"


def test_a_source_that_is_nowhere_is_one_line(tmp_path: object) -> None:
    with pytest.raises(Exception, match="no such file or folder") as caught:
        open_checkpoint(f"{tmp_path}/nothing.gguf")
    assert "\n" not in str(caught.value)
    assert torch.get_default_dtype() is torch.float32
