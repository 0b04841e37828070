"""From options to an engine: what was asked for is what is built, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.build import Options, build, engine_config
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


def test_where_the_pool_is_sized_later_it_is_first_the_least_that_will_do(checkpoint: Checkpoint) -> None:
    least = engine_config(checkpoint, Options(max_model_len=5), least=True)
    assert least.num_slots == 5 + 64
    assert engine_config(checkpoint, Options(max_model_len=5, kv_cache_tokens=99), least=True).num_slots == 99


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"device": "tpu"}, "device must be cpu or cuda, got 'tpu'"),
        ({"device": "cpu", "gpu_memory_utilization": 0.5}, "gpu_memory_utilization is for device cuda; this is cpu"),
        ({"device": "cpu", "enforce_eager": True}, "enforce_eager is for device cuda; this is cpu"),
        ({"device": "cpu", "gpu_memory_utilization": 0.0}, "must be above 0 and at most 1, got 0.0"),
        ({"device": "cuda", "gpu_memory_utilization": 1.5}, "must be above 0 and at most 1, got 1.5"),
        pytest.param(
            {"device": "cuda"},
            "device is cuda, but torch .*; leave it out to run on the CPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_options_of_a_gpu_are_refused_where_they_mean_nothing(
    options: dict[str, Any], complaint: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build(str(checkpoint.path), Options(**options))


def test_a_gpu_that_is_too_small_is_told_with_what_would_make_it_fit(checkpoint: Checkpoint) -> None:
    def filled(done: int, count: int) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    with pytest.raises(ConfigError, match=r"do not fit into the GPU's memory: .* or set enforce_eager: tried to allo"):
        build(str(checkpoint.path), Options(device="cpu"), progress=filled)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_for_which_triton_builds_nothing_is_refused_with_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint
) -> None:
    pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"triton launches, .* a C compiler and Python's headers .*: \w+Error: "):
        build(str(checkpoint.path), Options(device="cuda"))


@pytest.mark.parametrize("option", ["chat_template", "draft_ranks"])
def test_files_that_cannot_be_read_are_refused_before_the_model_is_loaded(option: str, checkpoint: Checkpoint) -> None:
    loaded: list[tuple[int, int]] = []
    files: dict[str, Any] = {option: "/no/such/file"}
    with pytest.raises(ConfigError, match=f"{option} /no/such/file"):
        options = Options(device="cpu", drafter="layer_skip", **files)
        build(str(checkpoint.path), options, progress=lambda *told: loaded.append(told))
    assert loaded == []
