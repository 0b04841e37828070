"""Watched runs: what counts as decoding, and that pairs are fair."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from specdec.config import EngineConfig
from specdec.drafters.none import NoDrafter
from specdec.engine import Engine
from specdec.errors import InvalidRequest
from specdec.evals.runs import watch, watch_pair
from specdec.request import Request, Sampling, Stopping
from tests.drafters_for_tests import OracleDrafter
from tests.fakes import hash_engine

VOCAB = 24
CONFIG = EngineConfig(max_model_len=128, num_slots=512, block_size=4, max_rows=8)
PROMPT = tuple(range(1, 21))


def ticking() -> Iterator[float]:
    """A clock that advances one second a reading: a step timed by two readings takes one."""
    yield from map(float, count())


def request(max_tokens: int = 30, temperature: float = 0.9) -> Request:
    return Request(PROMPT, Sampling(temperature=temperature, seed=4), Stopping(max_tokens=max_tokens, ignore_eos=True))


def with_oracle() -> Engine:
    truth = watch(hash_engine(CONFIG, NoDrafter(), vocab_size=VOCAB), request()).tokens
    return hash_engine(CONFIG, OracleDrafter({PROMPT: truth}, VOCAB, mistake_rate=0.2, seed=3), vocab_size=VOCAB)


def test_decoding_is_all_after_the_first_emission() -> None:
    """20 tokens of prompt in chunks of 8 rows take three steps, the last of which draws; 29 more follow."""
    clock = ticking()
    run = watch(hash_engine(CONFIG, NoDrafter(), vocab_size=VOCAB), request(), clock.__next__)
    assert len(run.tokens) == 30
    assert run.num_decoded == 29
    assert run.seconds == 29.0
    assert run.acceptance.draws == 30


def test_drafted_and_plain_runs_draw_the_same_and_take_turns() -> None:
    engine = with_oracle()
    clock = ticking()
    pair = watch_pair(engine, request(), repeats=3, clock=clock.__next__)
    assert pair.plain.tokens == pair.drafted.tokens
    assert pair.plain.text == pair.drafted.text
    assert pair.plain.acceptance.drafts == 0
    assert pair.drafted.acceptance.accepted_tokens > 10
    assert pair.drafted_seconds < pair.plain_seconds == 29.0


def test_both_runs_of_a_pair_find_the_same_prefix_cached() -> None:
    pair = watch_pair(with_oracle(), request())
    assert pair.plain.seq.num_cached == pair.drafted.seq.num_cached > 0


def test_no_run_of_a_pair_may_know_the_answer_of_another() -> None:
    """What a drafter remembers of finished texts goes by salt."""
    engine = with_oracle()
    first, second = watch_pair(engine, request()), watch_pair(engine, request())
    salts = [run.seq.request.cache_salt for pair in (first, second) for run in (pair.plain, pair.drafted)]
    assert len(set(salts)) == 4


def test_a_pair_at_a_temperature_needs_a_seed() -> None:
    with pytest.raises(AssertionError):
        watch_pair(with_oracle(), Request(PROMPT, Sampling(temperature=1.0)))


def test_a_refused_request_leaves_the_engine_idle() -> None:
    engine = hash_engine(CONFIG, NoDrafter(), vocab_size=VOCAB)
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        watch(engine, Request((VOCAB,)))
    assert not engine.has_work
