"""Two thousand requests that finish, are aborted and are preempted: nothing of them is kept anywhere afterwards."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from specdec.config import EngineConfig
from specdec.drafters.forced import ForcedDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.prediction import PredictionDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.engine import Engine
from specdec.protocols import Drafter
from specdec.request import PREDICTION, Request, Sampling, Speculative, Stopping
from specdec.sequence import Sequence
from tests.fakes import Automaton, BigramRunner, letters

VOCAB_SIZE = 24
CONFIG = EngineConfig(max_model_len=40, num_slots=104, block_size=4, max_rows=32, max_drafts=8, max_waiting=5000)
GRAMMAR = Automaton({0: {1: 1, 2: 3}, 1: {3: 2}, 2: {4: 0, 5: 0}, 3: {6: 4}, 4: {7: 0}}, {0: [0]})


def likely(token: int, count: int) -> tuple[int, ...]:
    """How `bigrams` would go on after a token."""
    tokens = [token]
    for _ in range(count):
        tokens.append((5 * tokens[-1] + 1) % VOCAB_SIZE)
    return tuple(tokens[1:])


def bigrams() -> BigramRunner:
    """Each token has one likely successor, so that texts repeat and guesses come true."""
    table_VV = np.random.default_rng(3).standard_normal((VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
    for token in range(VOCAB_SIZE):
        table_VV[token, likely(token, 1)] += 4.0
    return BigramRunner(table_VV)


def request(rng: random.Random, names: Seq[str]) -> Request:
    """Of any kind that drafters of these names can serve."""
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 24)))
    choices: list[bool | Speculative] = [True, True, True, False]
    choices += [Speculative(max_nodes=rng.randint(0, 8)), Speculative(rng.choice(names))]
    sampling = Sampling(temperature=rng.choice([0.0, 0.5, 1.0]), speculative=rng.choice(choices))
    guesses = sampling.guesses
    reads = PREDICTION in (guesses.methods or names) and guesses.limit
    return Request(
        prompt,
        sampling,
        Stopping(max_tokens=rng.randint(1, 15), ignore_eos=rng.random() < 0.5),
        GRAMMAR if rng.random() < 0.4 else None,
        n=rng.choice([1, 1, 1, 2]),
        cache_salt=rng.choice(["", "", "a", "b"]),
        prediction=likely(prompt[-1], 12) if reads and rng.random() < 0.5 else (),
    )


def sequences_alive() -> list[Sequence]:
    gc.collect()
    return [kept for kept in gc.get_objects() if type(kept) is Sequence]


SINGLE: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "prediction": PredictionDrafter,
    "forced": ForcedDrafter,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in SINGLE] + ["all of them"])
def test_two_thousand_requests_leave_no_sequence_behind(name: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    before = {id(kept) for kept in sequences_alive()}
    drafters = [make() for single, make in SINGLE.items() if name in (single, "all of them")]
    engine = Engine(bigrams(), drafters, CONFIG, new_text=letters, end_tokens=(0,))
    live: list[str] = []
    for number in range(2000):
        engine.add(request(rng, engine.drafting.names), f"r{number}")
        live.append(f"r{number}")
        if rng.random() < 0.15:
            engine.abort(live.pop(rng.randrange(max(0, len(live) - 12), len(live))))
        while len(engine.scheduler.waiting) > 6:
            engine.step()
    while engine.has_work:
        engine.step()
    metrics = engine.metrics
    assert metrics.finished["abort"] > 100
    assert metrics.preemptions > 20
    assert metrics.acceptance.accepted_tokens > 200
    assert metrics.drafter_errors == metrics.finished["error"] == 0
    assert engine.scheduler.pool.usage == 0
    engine.scheduler.pool.check([])
    assert [kept for kept in sequences_alive() if id(kept) not in before] == []
