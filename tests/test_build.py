"""From options to an engine: what was asked for is what is built, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.build import Options, engine_config
from specdec.errors import ConfigError
from specdec.loader import Checkpoint, open_checkpoint
from tests.server.conftest import write_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.parametrize("option", ["max_model_len", "kv_cache_tokens", "block_size", "max_num_seqs", "max_rows"])
def test_a_size_of_zero_is_refused_by_name_and_not_taken_for_the_default(option: str, checkpoint: Checkpoint) -> None:
    zero: dict[str, Any] = {option: 0}
    with pytest.raises(ConfigError, match=option):
        engine_config(checkpoint, Options(**zero))


def test_the_context_is_the_models_own_unless_asked_otherwise(checkpoint: Checkpoint) -> None:
    assert engine_config(checkpoint, Options()).max_model_len == checkpoint.config.max_position_embeddings
    assert engine_config(checkpoint, Options(max_model_len=5)).max_model_len == 5
