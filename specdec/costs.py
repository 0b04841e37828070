"""What a forward costs by its number of rows, and what a draft costs: measured once for a model on a machine, then
kept in a file, so that the choice of drafts is a function of tokens and counts. Knows no policy beyond its tables.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from specdec.batch import Batch
from specdec.engine import Engine
from specdec.free import FREE_TEXT
from specdec.policy import CostTable
from specdec.protocols import Drafter
from specdec.request import Request, Sampling, Stopping
from specdec.sequence import Grant, Sequence, Span
from specdec.text import Detokenizer
from specdec.tree import MAX_DRAFTS, DraftTree, chain

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 63)
CONTEXT = 256
ROUNDS = 5
DRAFTS = 50  # tokens of the text by which drafts are measured

Facts = Mapping[str, object]
Name = TypeVar("Name", int, str)


def cost_table(engine: Engine, facts: Facts, folder: Path) -> CostTable:
    """The table of an idle engine, in milliseconds: from `folder` where it was measured for the same `facts` (the model
    and all of the machine that changes its speed), else measured now, which takes some seconds, and kept there.

    A file that does not hold a table is measured anew; a folder that cannot be written to is only logged.
    """
    return CostTable.measured(_kept(folder, facts, int, lambda: measure(engine)).items())


def drafter_costs(engine: Engine, facts: Facts, folder: Path) -> dict[str, float]:
    """What a draft of each of an idle engine's drafters costs for one sequence, in milliseconds, by their first names:
    kept and measured as `cost_table` does. What they learn afterwards (`observe`) is part of it."""
    named = [drafter for drafter in engine.drafting.drafters if drafter.names]
    facts = {**facts, "measured": "draft and observe"}
    return _kept(folder, facts, str, lambda: {drafter.names[0]: measure_drafter(engine, drafter) for drafter in named})


def measure(engine: Engine) -> dict[int, float]:
    """Milliseconds by rows: medians over rounds in which all numbers of rows take turns, one sequence with 256 tokens
    (or what fits) before its rows. The engine must be idle; nothing is left behind."""
    config, pool = engine.config, engine.scheduler.pool
    context = min(CONTEXT, config.max_model_len - 1)
    counts = [count for count in ROWS if count <= config.max_rows]
    blocks = pool.take(-(-(context + max(counts)) // config.block_size))
    assert blocks is not None, "the engine is not idle"
    seq = _sequence([0] * (context + 1), blocks)
    seq.num_computed = context
    times: dict[int, list[float]] = {count: [] for count in counts}
    try:
        for _ in range(ROUNDS + 1):
            for count in counts:
                span = Span(seq, 1, chain(0, [0] * (count - 1), "costs"), 0, 0, context)
                start = time.perf_counter()
                batch = Batch.build([span], config.block_size)
                # With the engine's taps, for graphs are captured with these. One number waits for all; copying the
                # logits would be most of the time where they are far away.
                engine.runner.forward(batch, engine.drafting.taps).logits_LV[-1, -1].cpu()
                times[count].append((time.perf_counter() - start) * 1e3)
    finally:
        pool.release(blocks)
    # The first round warms caches, threads and allocators.
    return {count: statistics.median(taken[1:]) for count, taken in times.items()}


def measure_drafter(engine: Engine, drafter: Drafter) -> float:
    """Milliseconds of one draft: the median over the draws of a text that the target writes after a prompt that often
    repeats itself. The engine must be idle; nothing is left behind."""
    timed = _Timed(drafter)
    config = engine.config
    length = min(CONTEXT, max(1, config.max_model_len - 2))
    alone = Engine(
        engine.runner, [timed], replace(config, prefix_caching=False), new_text=lambda _: _no_text(), end_tokens=()
    )
    draw = random.Random(0)
    prompt = tuple(draw.randrange(min(6, engine.runner.vocab_size)) for _ in range(length))
    (seq,) = alone.add(
        Request(prompt, Sampling(temperature=0.0), Stopping(max_tokens=DRAFTS + MAX_DRAFTS + 1)), "costs"
    )
    while alone.has_work and seq.num_output < DRAFTS:
        timed.seconds.append(0.0)
        alone.step()
    alone.abort("costs")  # not to its end where there is room: drafters may keep texts that come to it
    times = timed.seconds[-(-length // config.max_rows) :]  # without the chunks of the prompt
    return statistics.median(times[1:] or times or [0.0]) * 1e3


class _Timed:
    """A drafter and the time that it takes, step by step."""

    def __init__(self, drafter: Drafter) -> None:
        self.names, self.taps = drafter.names, drafter.taps
        self.seconds: list[float] = []
        self._drafter = drafter

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        start = time.perf_counter()
        trees = self._drafter.draft(grants)
        self.seconds[-1] += time.perf_counter() - start
        return trees

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        start = time.perf_counter()
        self._drafter.observe(spans, batch, taps, paths)
        self.seconds[-1] += time.perf_counter() - start

    def forget(self, seq: Sequence) -> None:
        self._drafter.forget(seq)


def _sequence(tokens: list[int], blocks: Seq[int] = ()) -> Sequence:
    return Sequence(
        "costs", 0, Request((0,)), 0, tokens, FREE_TEXT, _no_text(), len(tokens), frozenset(), blocks=list(blocks)
    )


def _no_text() -> Detokenizer:
    return Detokenizer(lambda token: b"")


def _kept(
    folder: Path, facts: Facts, name_of: Callable[[str], Name], measured: Callable[[], dict[Name, float]]
) -> dict[Name, float]:
    """The costs in the file for `facts`; where there is none, those measured now, which it then holds."""
    name = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()
    path = folder / f"{name}.json"
    costs = _read(path, name_of)
    if costs is not None:
        return costs
    costs = measured()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        draft.write_text(json.dumps({"facts": dict(facts), "ms": costs}), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        logger.warning("costs are measured at every start: %s", error)
    return costs


def _read(path: Path, name_of: Callable[[str], Name]) -> dict[Name, float] | None:
    try:
        return {name_of(name): float(cost) for name, cost in json.loads(path.read_text(encoding="utf-8"))["ms"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("measuring costs again, as %s cannot be read: %s", path, error)
        return None
