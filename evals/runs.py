"""One request run to its end and watched: its tokens, its target forwards, its time. And pairs of runs, with drafts and
without, on one engine that does nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from statistics import median

from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.metrics import Acceptance
from specdec.request import Request, Stopping
from specdec.sequence import Emission, Sequence

_ids = count()
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Run:
    """A finished text. Its first emission ends the reading of the prompt and is not counted as decoding: `seconds` are
    those of all later steps, and `num_decoded` the tokens that these emitted. `cost` and `plain_cost` are, by the
    engine's cost table, those of its forwards and of root-only ones for the same tokens."""

    seq: Sequence
    text: str
    seconds: float
    num_decoded: int
    cost: float
    plain_cost: float

    @property
    def tokens(self) -> tuple[int, ...]:
        """The output, an end token included."""
        return tuple(self.seq.tokens[self.seq.num_prompt :])

    @property
    def acceptance(self) -> Acceptance:
        """What drafts gave."""
        return self.seq.acceptance

    @property
    def error(self) -> SpecdecError | None:
        """What ended it early, if anything did."""
        return self.seq.error


def watch(engine: Engine, request: Request, clock: Clock = time.perf_counter) -> Run:
    """Run a request of one choice on an engine without other work. Raises `InvalidRequest` as `Engine.add` does."""
    assert request.n == 1 and not engine.has_work, "a watched run has the engine to itself"
    request_id = f"watch-{next(_ids)}"
    (seq,) = engine.add(request, request_id)
    emissions: list[Emission] = []
    seconds = 0.0
    ledger = engine.policy.ledger
    cost, plain_cost = ledger.cost, ledger.plain_cost
    try:
        while not seq.finished:
            started = clock()
            new = engine.step()
            if emissions:
                seconds += clock() - started
            emissions += new
    finally:
        engine.abort(request_id)
    decoded = sum(len(emission.tokens) for emission in emissions[1:])
    text = "".join(emission.text for emission in emissions)
    return Run(seq, text, seconds, decoded, ledger.cost - cost, ledger.plain_cost - plain_cost)


@dataclass(frozen=True, slots=True)
class Pair:
    """One request with and without drafts. The runs are the first of each kind, the seconds medians over all."""

    plain: Run
    drafted: Run
    plain_seconds: float
    drafted_seconds: float


def watch_pair(engine: Engine, request: Request, *, repeats: int = 1, clock: Clock = time.perf_counter) -> Pair:
    """Run a request root-only and with drafts, in turns, `repeats` times each.

    Before each, a run of one token, not counted, reads the prompt, so that all find the same prefix cached. Each has a
    cache salt of its own: a drafter that remembers finished texts must not find the answer of an earlier run. The
    request must have a seed where its temperature is above zero.
    """
    assert request.sampling.seed is not None or request.sampling.temperature == 0.0
    plain = replace(request, prediction=(), sampling=replace(request.sampling, speculative=False))
    drafted = replace(request, sampling=replace(request.sampling, speculative=True))
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for repeat in range(repeats):
        for with_drafts in (False, True) if repeat % 2 == 0 else (True, False):
            asked = replace(drafted if with_drafts else plain, cache_salt=f"watch-{next(_ids)}")
            watch(engine, replace(asked, stopping=Stopping(max_tokens=1)))
            runs[with_drafts].append(watch(engine, asked, clock))
    return Pair(
        runs[False][0],
        runs[True][0],
        median(run.seconds for run in runs[False]),
        median(run.seconds for run in runs[True]),
    )
