"""Drafts never cost much more than they give: by the cost table at most 3% more than root-only decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest

from specdec.config import EngineConfig
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.policy import CostTable, Policy
from specdec.protocols import Drafter
from specdec.request import Request, Sampling, Stopping
from tests.drafters_for_tests import RandomDrafter
from tests.fakes import hash_engine, run

# Milliseconds as measured for int8 weights on two cores: rows are far from free.
COSTS = CostTable.measured([(1, 25.0), (2, 27.0), (4, 31.0), (8, 45.0), (16, 58.0), (32, 95.0), (63, 170.0)])
VOCAB_SIZE = 24
MOST = 1.03

DRAFTERS: dict[str, Callable[[], Seq[Drafter]]] = {
    "ngram": lambda: [NgramDrafter()],
    "suffix": lambda: [SuffixDrafter()],
    "suffix,ngram": lambda: [SuffixDrafter(), NgramDrafter()],
    "random": lambda: [RandomDrafter(3, VOCAB_SIZE)],
    "random,suffix": lambda: [RandomDrafter(4, VOCAB_SIZE), SuffixDrafter()],
}


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_cost_little_where_they_give_nothing(drafter: str, together: int) -> None:
    """Text that nothing predicts: every logit is a hash of all before it, and temperature is 1."""
    rng = random.Random(6)
    config = EngineConfig(max_model_len=256, num_slots=2048, block_size=16, max_drafts=16, max_num_seqs=together)
    engine = hash_engine(config, *DRAFTERS[drafter](), vocab_size=VOCAB_SIZE, end_tokens=())
    engine.policy = Policy(config.max_rows, COSTS)
    prompts = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(40)) for _ in range(8)]
    stopping = Stopping(max_tokens=120)
    run(engine, [Request(prompt, Sampling(seed=seed), stopping) for seed, prompt in enumerate(prompts)], check=False)
    ledger = engine.policy.ledger
    print(f"{drafter}, {together} together: {ledger.cost / ledger.plain_cost:.4f}")
    assert engine.metrics.acceptance.draft_tokens > 0
    assert ledger.cost <= MOST * ledger.plain_cost
