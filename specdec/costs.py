"""What a forward costs by its number of rows: measured once for a model on a machine, then kept in a file, so that the
choice of drafts is a function of tokens and counts. Knows no drafter and no policy beyond the table it fills."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

from specdec.batch import Batch
from specdec.engine import Engine
from specdec.free import FREE_TEXT
from specdec.policy import CostTable
from specdec.request import Request
from specdec.sequence import Sequence, Span
from specdec.text import Detokenizer
from specdec.tree import chain

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 63)
CONTEXT = 256
ROUNDS = 5


def cost_table(engine: Engine, facts: Mapping[str, object], folder: Path) -> CostTable:
    """The table of an idle engine, in milliseconds: from `folder` where it was measured for the same `facts` (the model
    and all of the machine that changes its speed), else measured now, which takes some seconds, and kept there.

    A file that does not hold a table is measured anew; a folder that cannot be written to is only logged.
    """
    name = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()
    path = folder / f"{name}.json"
    table = _read(path)
    if table is not None:
        return table
    table = measure(engine)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        draft.write_text(json.dumps({"facts": dict(facts), "rows": table.rows, "ms": table.costs}), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        logger.warning("the cost table is measured at every start: %s", error)
    return table


def measure(engine: Engine) -> CostTable:
    """Medians over rounds in which all numbers of rows take turns, one sequence with 256 tokens (or what fits) before
    its rows. The engine must be idle; nothing is left behind."""
    config, pool = engine.config, engine.scheduler.pool
    context = min(CONTEXT, config.max_model_len - 1)
    counts = [count for count in ROWS if count <= config.max_rows]
    blocks = pool.take(-(-(context + max(counts)) // config.block_size))
    assert blocks is not None, "the engine is not idle"
    seq = Sequence(
        "costs", 0, Request((0,)), 0, [0] * (context + 1), FREE_TEXT, _no_text(), 1, frozenset(), blocks=blocks
    )
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
    return CostTable.measured((count, statistics.median(taken[1:])) for count, taken in times.items())


def _no_text() -> Detokenizer:
    return Detokenizer(lambda token: b"")


def _read(path: Path) -> CostTable | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return CostTable.measured(
            (int(count), float(cost)) for count, cost in zip(kept["rows"], kept["ms"], strict=True)
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("measuring the cost table again, as %s cannot be read: %s", path, error)
        return None
