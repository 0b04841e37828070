"""Drafters that are models: what they guess from is what a dense recomputation says, wherever the engine has been."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.config import EngineConfig
from specdec.drafters.draft_model import CausalHead
from specdec.drafters.grow import Growth
from specdec.drafters.heads import Head
from specdec.policy import CostTable, Policy
from specdec.protocols import Model
from specdec.request import Request, Sampling, Stopping
from specdec.sequence import Grant
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


# Every configuration in free text, two of them under a schema; samplings take turns.
CASES = [
    (head, spec, sampling, config)
    for head in HEADS
    for spec in ("free", "schema")
    for config, sampling in zip(CONFIGS, ["filtered", "penalties", "greedy"] * 2, strict=True)
    if spec == "free" or (config in ("chunked", "preempting") and head in ("draft_model", "reduced"))
]


@pytest.mark.parametrize(("head", "spec", "sampling", "config"), CASES)
def test_same_tokens(head: str, spec: str, sampling: str, config: str) -> None:
    engine = engine_with(target(), heads()[head], CONFIGS[config], token_bytes=TOKEN_BYTES, end_tokens=END_IDS)
    assert texts(run(engine, requests(SPECS[spec], SAMPLINGS[sampling]))) == root_only("llama", spec, sampling)
    assert engine.metrics.drafter_errors == 0
    assert engine.scheduler.pool.usage == 0
    (drafter,) = engine.drafting.drafters
    assert drafter.num_kept == 0  # type: ignore[attr-defined]
    assert engine.metrics.acceptance.draft_tokens > 0


@pytest.mark.parametrize("config", ["plain", "chunked", "preempting", "blocks of 1"])
@pytest.mark.parametrize("head", ["draft_model", "layer_skip", "pair", "reduced"])
def test_every_logit_is_that_of_a_dense_recomputation(head: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = heads()[head]
    engine = engine_with(
        target(), drafted, CONFIGS[config], token_bytes=TOKEN_BYTES, end_tokens=END_IDS, growth=Growth(4, 3, 3, 0.0)
    )
    asked = [replace(one, stopping=Stopping(max_tokens=14)) for one in requests(None, SAMPLINGS["filtered"])]
    with watched(monkeypatch) as seen:
        run(engine, asked[:3])
        run(engine, asked)  # the prompts are cached now
    if CONFIGS[config].prefix_caching:
        assert engine.metrics.cached_prompt_tokens > 0
    sample = random.Random(3).sample(seen, min(60, len(seen)))
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


@pytest.mark.parametrize("config", ["plain", "preempting"])
@pytest.mark.parametrize("head", ["draft_model", "layer_skip", "pair"])
def test_prefix_hits_are_those_without_drafts(head: str, config: str) -> None:
    asked = requests(None, SAMPLINGS["filtered"])
    engine = engine_with(target(), heads()[head], CONFIGS[config], token_bytes=TOKEN_BYTES, end_tokens=END_IDS)
    plain = new_engine("llama", [], CONFIGS[config])
    for one in (engine, plain):
        run(one, asked)
        run(one, asked)
    assert engine.metrics.cached_prompt_tokens == plain.metrics.cached_prompt_tokens > 0


@pytest.mark.parametrize("size", [VOCAB_SIZE - 60, VOCAB_SIZE + 60])
def test_a_draft_model_of_another_width_guesses_only_tokens_of_both(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head = CausalHead("draft_model", tiny_model("llama", size), VOCAB_SIZE)
    engine = engine_with(target(), head, CONFIGS["plain"], token_bytes=TOKEN_BYTES, end_tokens=END_IDS)
    with watched(monkeypatch) as seen:
        assert texts(run(engine, requests(None, SAMPLINGS["filtered"]))) == root_only("llama", "free", "filtered")
    assert engine.metrics.drafter_errors == 0
    assert engine.metrics.acceptance.draft_tokens > 0
    assert {len(row.logits_V) for row in seen} == {min(size, VOCAB_SIZE)}


def test_the_drafters_own_context_ends_its_guesses_and_not_the_text() -> None:
    config = EngineConfig(96, 1024, max_drafts=16)
    engine = engine_with(target(), causal(target()), config, token_bytes=TOKEN_BYTES, end_tokens=(), max_length=40)
    emissions = run(engine, [Request((5, 9, 3), Sampling(temperature=0.0), Stopping(max_tokens=70))])["r0", 0]
    assert sum(len(part.tokens) for part in emissions) == 70
    length = 3
    for part in emissions:
        assert part.num_drafts == 0 or length < 40
        length += len(part.tokens)
        assert part.num_accepted == 0 or length <= 41  # a bonus token comes behind the last guess
    engine.add(Request(tuple(range(3, 43)), Sampling(temperature=0.0), Stopping(max_tokens=20)), "long")
    (drafter,) = engine.drafting.drafters
    while engine.has_work:
        engine.step()
        assert drafter.num_kept == 0  # type: ignore[attr-defined]  # nothing is read of what is too long from the start


def test_a_draft_model_that_was_not_asked_catches_up_in_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    head = causal(other())
    engine = engine_with(target(), head, CONFIGS["plain"], token_bytes=TOKEN_BYTES, end_tokens=())
    ask, steps, rows = engine.policy.ask, 0, []
    forward = head.forward

    def deaf(grants: Seq[Grant]) -> list[Grant]:
        nonlocal steps
        steps += 1
        return [replace(grant, muted=frozenset(["draft_model"])) for grant in ask(grants)] if steps % 9 else ask(grants)

    def counting(tokens_R: Tensor, *rest: Any) -> Tensor:
        rows.append((steps, len(tokens_R)))
        return forward(tokens_R, *rest)

    monkeypatch.setattr(engine.policy, "ask", deaf)
    (drafter,) = engine.drafting.drafters
    forwards = drafter._voice._context._forwards  # type: ignore[attr-defined]
    monkeypatch.setattr(forwards, "_model", counting)
    with watched(monkeypatch) as seen:
        run(engine, [Request((5, 9, 3), SAMPLINGS["filtered"], Stopping(max_tokens=30))])
    asked = [step for step, _ in rows if step > 1]
    assert set(asked) == {9, 18, 27}  # nothing is computed where nobody asks
    assert next(count for step, count in rows if step == 9) > 7  # all that was drawn since, at once
    for row in seen:
        torch.testing.assert_close(
            row.logits_V, dense_draft(head, target(), row.tokens, row.path), atol=1e-4, rtol=0, msg=str(row)
        )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("head", ["draft_model", "pair"])
def test_nothing_that_befalls_texts_and_blocks_gets_into_the_guesses(
    head: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared beginnings, a pool too small for all, aborts, requests without drafts, pauses: blocks change hands, and
    what a drafter reads in them is still what belongs there."""
    rng = random.Random(seed)
    drafted = heads()[head]
    config = EngineConfig(48, 48 + 64, block_size=4, max_rows=24, max_drafts=10)
    engine = engine_with(
        target(), drafted, config, token_bytes=TOKEN_BYTES, end_tokens=(), growth=Growth(depth=3, width=2, branch=3)
    )
    stems = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(12)) for _ in range(3)]
    ask = engine.policy.ask

    def moody(grants: Seq[Grant]) -> list[Grant]:
        deaf = frozenset(engine.drafting.names)
        return [replace(grant, muted=deaf) if rng.random() < 0.3 else grant for grant in ask(grants)]

    monkeypatch.setattr(engine.policy, "ask", moody)
    asked = 0
    with watched(monkeypatch) as seen:
        while asked < 60 or engine.has_work:
            if asked < 60 and rng.random() < 0.8:
                stem = rng.choice(stems)[: rng.randint(1, 12)]
                prompt = stem + tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 6)))
                sampling = Sampling(temperature=0.9, seed=asked % 4, speculative=rng.random() < 0.8)
                engine.add(Request(prompt, sampling, Stopping(max_tokens=rng.randint(4, 29))), f"r{asked}")
                asked += 1
            if rng.random() < 0.03:
                engine.abort(f"r{rng.randrange(max(1, asked))}")
            engine.step()
    assert engine.metrics.drafter_errors == 0
    assert engine.metrics.preemptions > 3
    assert engine.metrics.cached_prompt_tokens > 50
    (drafter,) = engine.drafting.drafters
    assert drafter.num_kept == 0  # type: ignore[attr-defined]
    assert len(seen) > 200
    for row in rng.sample(seen, 120):
        torch.testing.assert_close(
            row.logits_V, dense_draft(drafted, target(), row.tokens, row.path), atol=1e-4, rtol=0, msg=str(row)
        )


@pytest.mark.parametrize("cost", [1.0, 20.0, 45.0])
def test_a_draft_model_that_is_right_is_heard_though_it_is_dear(cost: float) -> None:
    """A forward costs 10 and six right guesses save 60: whatever the prompt's end and requests without drafts cost."""
    table = CostTable.measured([(1, 10.0), (63, 20.0)])
    config = EngineConfig(96, 1024, max_drafts=62)
    engine = engine_with(target(), causal(target()), config, token_bytes=TOKEN_BYTES, end_tokens=())
    engine.policy = Policy(config.max_rows, table, {"draft_model": cost})
    off = Sampling(temperature=0.0, speculative=False)
    run(engine, [Request((5, 9, 3), off, Stopping(max_tokens=30))])
    emissions = run(engine, [Request((4, 9, 3), Sampling(temperature=0.0), Stopping(max_tokens=71))])["r0", 0]
    assert len(emissions) < 71 / 4
