"""Drafters that are models: what they guess from is what a dense recomputation says, wherever the engine has been."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from specdec.config import EngineConfig
from specdec.drafters.heads import Head
from specdec.protocols import Model
from specdec.request import Request, Sampling, Stopping
from tests.drafters.heads import PairHead, causal, dense_draft, engine_with, watched
from tests.engine.test_same_tokens import (
    CONFIGS,
    SAMPLINGS,
    SPECS,
    TOKEN_BYTES,
    new_engine,
    requests,
    root_only,
)
from tests.fakes import run, texts
from tests.grammar.small_tokenizer import END_IDS, VOCAB_SIZE
from tests.tiny import tiny_model


@functools.cache
def target() -> Model:
    return tiny_model("llama", VOCAB_SIZE)


@functools.cache
def other() -> Model:
    """A model of another family, with the same vocabulary, that sees only a window."""
    return tiny_model("gemma3_text", VOCAB_SIZE)


def heads() -> dict[str, Head]:
    some = torch.arange(3, VOCAB_SIZE, 2)
    return {
        "copy": causal(target()),
        "draft_model": causal(other()),
        "layer_skip": causal(target(), "layer_skip", 1),
        "pair": PairHead(target(), 32, (0, 2, 3)),
        "reduced": PairHead(target(), 32, (1,), some),
    }


HEADS = ["copy", "draft_model", "layer_skip", "pair", "reduced"]


@pytest.mark.parametrize(
    ("config", "sampling"),
    list(zip(CONFIGS, ["filtered", "penalties", "greedy"] * 2, strict=True)),
)
@pytest.mark.parametrize("spec", ["free", "schema"])
@pytest.mark.parametrize("head", HEADS)
def test_same_tokens(head: str, spec: str, sampling: str, config: str) -> None:
    engine = engine_with(target(), heads()[head], CONFIGS[config], token_bytes=TOKEN_BYTES, end_tokens=END_IDS)
    assert texts(run(engine, requests(SPECS[spec], SAMPLINGS[sampling]))) == root_only("llama", spec, sampling)
    assert engine.metrics.drafter_errors == 0
    assert engine.scheduler.pool.usage == 0
    (drafter,) = engine.drafting.drafters
    assert drafter.num_kept == 0  # type: ignore[attr-defined]
    assert engine.metrics.acceptance.draft_tokens > 0


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_logit_is_that_of_a_dense_recomputation(head: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = heads()[head]
    engine = engine_with(target(), drafted, CONFIGS[config], token_bytes=TOKEN_BYTES, end_tokens=END_IDS)
    asked = requests(None, SAMPLINGS["filtered"])
    with watched(monkeypatch) as seen:
        run(engine, asked[:3])
        run(engine, asked)  # the prompts are cached now
    if CONFIGS[config].prefix_caching:
        assert engine.metrics.cached_prompt_tokens > 0
    sample = random.Random(3).sample(seen, min(150, len(seen)))
    assert max(len(row.path) for row in sample) > 1
    for row in sample:
        torch.testing.assert_close(
            row.logits_V, dense_draft(drafted, target(), row.tokens, row.path), atol=1e-4, rtol=0, msg=str(row)
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["draft_model", "layer_skip"])
def test_a_copy_of_the_target_accepts_everything(name: str, temperature: float) -> None:
    config = EngineConfig(256, 1024, max_drafts=62)
    engine = engine_with(target(), causal(target(), name), config, token_bytes=TOKEN_BYTES, end_tokens=())
    emissions = run(
        engine, [Request((5, 9, 3), Sampling(temperature=temperature, seed=4), Stopping(max_tokens=7 * 10 + 1))]
    )
    counts = [len(part.tokens) for part in emissions["r0", 0]]
    assert counts == [1, *[7] * 10]  # the prompt's step has nothing to guess from; then six levels and a bonus token


@pytest.mark.parametrize("config", ["plain", "chunked", "preempting"])
@pytest.mark.parametrize("head", HEADS)
def test_prefix_hits_are_those_without_drafts(head: str, config: str) -> None:
    asked = requests(None, SAMPLINGS["filtered"])
    engine = engine_with(target(), heads()[head], CONFIGS[config], token_bytes=TOKEN_BYTES, end_tokens=END_IDS)
    plain = new_engine("llama", [], CONFIGS[config])
    for one in (engine, plain):
        run(one, asked)
        run(one, asked)
    assert engine.metrics.cached_prompt_tokens == plain.metrics.cached_prompt_tokens > 0
