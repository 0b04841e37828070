"""Models with random weights."""

from __future__ import annotations

import pytest
import torch

from specdec.models.config import ModelConfig
from specdec.models.weights import random_model
from tests.models.dense import dense_logits
from tests.tiny import GEMMA, LLAMA


@pytest.mark.parametrize("raw", [LLAMA, GEMMA])
def test_random_models_are_the_same_for_a_seed_and_tell_tokens_apart(raw: dict[str, object]) -> None:
    config = ModelConfig.from_dict(raw | {"vocab_size": 200}, "random")
    one, same, other = (dense_logits(random_model(config, seed=seed), [5, 9, 14, 3]) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.isfinite().all()
    assert one.std(1).min() > 1
