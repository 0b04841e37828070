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
from pathlib import Path
from typing import TypeVar

from specdec.batch import Batch
from specdec.engine import Engine
from specdec.free import FREE_TEXT
from specdec.policy import CostTable
from specdec.protocols import Drafter
from specdec.request import Request
from specdec.sequence import Grant, Sequence, Span
from specdec.text import Detokenizer
from specdec.tree import MAX_DRAFTS, chain

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 63)
CONTEXT = 256
ROUNDS = 5
DRAFTS = 50

Facts = Mapping[str, object]
Name = TypeVar("Name", int, str)


def cost_table(engine: Engine, facts: Facts, folder: Path) -> CostTable:
    """The table of an idle engine, in milliseconds: from `folder` where it was measured for the same `facts` (the model
    and all of the machine that changes its speed), else measured now, which takes some seconds, and kept there.

    A file that does not hold a table is measured anew; a folder that cannot be written to is only logged.
    """
    return CostTable.measured(_kept(folder, facts, int, lambda: measure(engine)).items())


def drafter_costs(drafters: Seq[Drafter], facts: Facts, folder: Path) -> dict[str, float]:
    """What a draft for one sequence costs, in milliseconds, by the drafters' first names: kept and measured as
    `cost_table` does."""
    named = [drafter for drafter in drafters if drafter.names]
    facts = {**facts, "drafters": [drafter.names[0] for drafter in named]}
    return _kept(folder, facts, str, lambda: {drafter.names[0]: measure_drafter(drafter) for drafter in named})


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
                engine.runner.forward(Batch.build([span], config.block_size)).logits_LV.cpu()
                times[count].append((time.perf_counter() - start) * 1e3)
    finally:
        pool.release(blocks)
    # The first round warms caches, threads and allocators.
    return {count: statistics.median(taken[1:]) for count, taken in times.items()}


def measure_drafter(drafter: Drafter) -> float:
    """Milliseconds of one draft: the median over a text that grows by a token each time and often repeats itself.
    Nothing is left behind."""
    draw = random.Random(0)
    seq = _sequence([draw.randrange(6) for _ in range(CONTEXT)])
    times = []
    for _ in range(DRAFTS):
        grant = Grant(seq, seq.num_pending, MAX_DRAFTS, MAX_DRAFTS)
        start = time.perf_counter()
        drafter.draft([grant])
        times.append((time.perf_counter() - start) * 1e3)
        seq.tokens.append(draw.randrange(6))
    drafter.forget(seq)
    return statistics.median(times[1:])


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
