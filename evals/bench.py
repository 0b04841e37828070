"""How long an engine step takes, by the number of rows it verifies, and how fast a prompt is read. Prints nothing.

One sequence; under its root hangs a chain of drafts of which none is ever accepted, so that every step emits one token
and the KV stays where it is wanted. Row counts take turns step by step, so that a slow second hits all of them.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from statistics import median
from types import MappingProxyType
from typing import Any

from torch import Tensor

from specdec.batch import Batch
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.evals.profile import Profile
from specdec.grammar.spec import JsonSchema
from specdec.llm import LLM
from specdec.policy import Policy
from specdec.request import Request, Sampling, Stopping
from specdec.sequence import Emission, Grant, Sequence, Span
from specdec.tokenizer import Tokenizer
from specdec.tree import EMPTY, DraftTree, chain

PREFILL_TOKENS = 512
WARM_STEPS = 12  # of each sequence; under the schema they also get past `{"text":"`
TEXT = (
    "The harbour was quiet before the first ferry came in. Nets hung in the morning wind, and a boy counted crates of "
    "herring while his sister wrote the numbers into a blue book. Later the merchants would come down the hill, taste "
    "the air as if it could tell them the price of fish, and argue until the church bell called everybody to lunch. "
)
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}

_ids = count()
Step = Callable[[], list[Emission]]
Measure = Callable[[Step], tuple[list[Emission], float]]


def timed(step: Step) -> tuple[list[Emission], float]:
    """What a step emits, and its seconds."""
    started = time.perf_counter()
    emissions = step()
    return emissions, time.perf_counter() - started


class WrongChain:
    """A drafter that guesses one token over and over, `num_drafts` deep: one that the request's bias rules out."""

    names: tuple[str, ...] = ("wrong",)
    taps: tuple[int, ...] = ()

    def __init__(self, token: int) -> None:
        self.token = token
        self.num_drafts = 0

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """The chain, as long as was asked for."""
        return [
            chain(grant.seq.tokens[-1], [self.token] * self.num_drafts, "wrong") if grant.at_frontier else EMPTY
            for grant in grants
        ]

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """Learns nothing."""

    def forget(self, seq: Sequence) -> None:
        """Keeps nothing."""


def bench_decode(
    llm: LLM,
    rows: Seq[int],
    *,
    context: int = 256,
    rounds: int = 8,
    samples: int = 6,
    profile: bool = False,
    progress: Callable[[int, int], None] | None = None,
    measure: Measure = timed,
) -> dict[str, Any]:
    """Medians in ms of whole steps with `rows` rows (root and drafts) of one sequence, its KV held at `context`, over
    `rounds` sequences of `samples` steps a row count: greedy (`rows_ms`), at temperature 0.8 and top-p 0.95
    (`rows_ms_sampled`), and inside a JSON string under a schema (`rows_ms_schema`); tokens/s of a prompt of 512.

    The engine's drafters are replaced by `WrongChain` and its policy by one that takes every guess; its `max_drafts`
    must allow the largest tree. Raises `ConfigError` for what the engine cannot hold.
    """
    engine = llm.loaded.engine
    _check(engine, rows, context, samples)
    token = unlikely_token(llm.loaded.tokenizer, engine.runner.vocab_size)
    drafter = WrongChain(token)
    engine.drafting.drafters = (drafter,)
    engine.policy = Policy(engine.config.max_rows)  # without costs: every row that is asked for is computed
    bias = MappingProxyType({token: -100.0})
    prompt = _prompt(llm, context - (WARM_STEPS + samples * len(rows)) // 2)
    greedy = Sampling(temperature=0.0, logit_bias=bias)
    warm = Sampling(temperature=0.8, top_p=0.95, seed=0, logit_bias=bias)
    endless = Stopping(ignore_eos=True)
    requests = {
        "rows_ms": llm.request(prompt, greedy, endless),
        "rows_ms_sampled": llm.request(prompt, warm, endless),
        "rows_ms_schema": llm.request(prompt, greedy, constraint=JsonSchema(SCHEMA, whitespace="compact")),
    }
    times: dict[str, dict[int, list[float]]] = {name: {row: [] for row in rows} for name in requests}
    for done in range(rounds):
        for name, request in requests.items():
            order = (list(rows) if done % 2 == 0 else list(rows)[::-1]) * samples
            for row, seconds in _steps(engine, drafter, request, order, measure):
                times[name][row].append(seconds)
        if progress is not None:
            progress(done + 1, rounds)
    medians = {
        name: {str(row): round(1000 * median(found), 3) for row, found in by_row.items()}
        for name, by_row in times.items()
    }
    report = {"context": context, "samples": rounds * samples, **medians, **_prefill(llm, rounds, measure)}
    if profile:
        report["profile"] = {
            name: {str(row): _profile(engine, drafter, request, row, samples) for row in rows}
            for name, request in requests.items()
        }
    return report


def unlikely_token(tokenizer: Tokenizer, vocab_size: int) -> int:
    """The last id whose text is plain letters only: a JSON string may hold it at any place. Raises `ConfigError`."""
    table = tokenizer.token_bytes_table()[:vocab_size]
    for token in range(len(table) - 1, -1, -1):
        if re.fullmatch(rb"[a-z]+", table[token]):
            return token
    raise ConfigError("the vocabulary holds no token of plain letters a to z to guess")


def _check(engine: Engine, rows: Seq[int], context: int, samples: int) -> None:
    config = engine.config
    if max(rows) - 1 > config.max_drafts:
        raise ConfigError(f"rows must be at most max_drafts + 1 = {config.max_drafts + 1}, got {max(rows)}")
    if max(rows) > config.max_rows:
        raise ConfigError(f"rows must be at most max_rows = {config.max_rows}, got {max(rows)}")
    steps = WARM_STEPS + samples * len(rows)
    if not steps < context <= config.max_model_len - steps - max(rows):
        raise ConfigError(
            f"context must be above {steps} and at most {config.max_model_len - steps - max(rows)}, got {context}"
        )


def _prompt(llm: LLM, length: int) -> list[int]:
    """`length` tokens of ordinary prose."""
    once = llm.loaded.tokenizer.encode(TEXT)
    return (once * math.ceil(length / len(once)))[:length]


def _steps(
    engine: Engine, drafter: WrongChain, request: Request, order: Seq[int], measure: Measure
) -> Iterator[tuple[int, float]]:
    """(rows, seconds) of one step for each entry of `order`, in this order. A sequence that ends is begun again."""
    pending = list(reversed(order))
    while pending:
        request_id = f"bench-{next(_ids)}"
        (seq,) = engine.add(request, request_id)
        try:
            drafter.num_drafts = 0
            while not seq.finished and seq.num_output < WARM_STEPS:
                engine.step()
            while pending and not seq.finished:
                drafter.num_drafts = pending[-1] - 1
                (emission,), seconds = measure(engine.step)
                if _is_sample(emission, pending[-1]):
                    yield pending.pop(), seconds
        finally:
            engine.abort(request_id)


def _is_sample(emission: Emission, rows: int) -> bool:
    """Whether the step had exactly the rows that were asked for: under a schema the last step of a string has not."""
    assert emission.num_accepted == 0, "a draft that is ruled out was accepted"
    return emission.num_drafts == rows - 1


def _prefill(llm: LLM, rounds: int, measure: Measure) -> dict[str, Any]:
    """Tokens/s of the steps that read a prompt of which nothing is cached and draw its first token."""
    engine = llm.loaded.engine
    length = min(PREFILL_TOKENS, engine.config.max_model_len - 2)
    request = llm.request(_prompt(llm, length), Sampling(temperature=0.0), Stopping(max_tokens=1))
    readings = []
    for _ in range(rounds):
        request_id = f"bench-{next(_ids)}"
        engine.add(replace(request, cache_salt=request_id), request_id)
        reading = 0.0
        while engine.has_work:
            _, seconds = measure(engine.step)
            reading += seconds
        readings.append(reading)
    return {"prefill_tokens": length, "prefill_tokens_per_s": round(length / median(readings), 1)}


def _profile(engine: Engine, drafter: WrongChain, request: Request, rows: int, samples: int) -> dict[str, float]:
    """Milliseconds of a step by area, over `samples` steps; the profiler's own cost is in them."""
    profile = Profile()
    for _ in _steps(engine, drafter, request, [rows] * samples, lambda step: (profile.call(step), 0.0)):
        pass
    return {area: round(1000 * seconds / samples, 3) for area, seconds in profile.areas().items()}
