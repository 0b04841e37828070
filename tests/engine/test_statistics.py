"""A second witness of the law: what is emitted over many seeds, against the exact probabilities of a bigram model.

Seeds are fixed, so each test has one outcome for ever: p-values are those of a chi-squared test.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from specdec.config import EngineConfig
from specdec.drafters.none import NoDrafter
from specdec.engine import Engine
from specdec.protocols import Drafter
from specdec.request import Request, Sampling, Stopping
from specdec.sequence import Grant
from specdec.tree import DraftTree
from tests.fakes import Automaton, BigramRunner, letters

VOCAB_SIZE = 8
NUM_SEEDS = 20_000
END = 0
PROMPT = (3, 5)
TABLE_VV = (np.random.default_rng(8).standard_normal((VOCAB_SIZE, VOCAB_SIZE)) * 1.5).astype(np.float32)
CONFIG = EngineConfig(16, 250 * 16, block_size=8, max_num_seqs=250, max_rows=4000, max_drafts=12, prefix_caching=False)
GRAMMAR = Automaton({0: {1: 1, 2: 0, 5: 1, 7: 2}, 1: {0: 0, 3: 2, 4: 1}, 2: {6: 2, 1: 0}}, {1: [END], 2: [END]})
Law = dict[tuple[int, ...], float]


class FixedTrees:
    """One tree for each last token, whatever the text is."""

    names: tuple[str, ...] = ("test",)
    taps: tuple[int, ...] = ()

    def __init__(self) -> None:
        rng = random.Random(1)
        parents = (-1, 0, 0, 0, 1, 2, 2, 3, 0, 4, 4, 6)  # four guesses for the next token, two levels below them
        self.trees = {}
        for last in range(VOCAB_SIZE):
            below = {parent: rng.sample(range(VOCAB_SIZE), 4) for parent in parents}
            tokens = (last, *(below[parent].pop() for parent in parents[1:]))
            self.trees[last] = DraftTree(tokens, parents, (1.0,) * len(parents), ("",) * len(parents))

    def draft(self, grants: Sequence[Grant]) -> list[DraftTree]:
        return [self.trees[grant.seq.tokens[-1]] for grant in grants]

    def observe(self, *_: Any) -> None:
        pass

    def forget(self, *_: Any) -> None:
        pass


def draw_law(history: Sequence[int], sampling: Sampling, allowed: set[int] | None) -> list[float]:
    """The exact probabilities of the next token, from the definitions, in fp64 and plain Python."""
    row = [float(value) for value in TABLE_VV[history[-1]]]
    output = list(history[len(PROMPT) :])
    for token in range(VOCAB_SIZE):
        if token in history:
            factor = sampling.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= sampling.presence_penalty * (token in output) + sampling.frequency_penalty * output.count(token)
        row[token] += sampling.logit_bias.get(token, 0.0)
        if allowed is not None and token not in allowed:
            row[token] = -math.inf
    weights = [math.exp(value / sampling.temperature) for value in row]
    order = sorted(range(VOCAB_SIZE), key=lambda token: (-weights[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, kept, mass = sum(weights[token] for token in order), set(), 0.0
    for token in order:
        if mass >= sampling.top_p or weights[token] < sampling.min_p * weights[order[0]]:
            break
        kept.add(token)
        mass += weights[token] / total
    norm = sum(weights[token] for token in kept)
    return [weights[token] / norm if token in kept else 0.0 for token in range(VOCAB_SIZE)]


def law_of(sampling: Sampling, length: int, grammar: Automaton | None) -> Law:
    """The probability of every text: up to `length` tokens, shorter where it ends."""
    law: Law = {}

    def follow(output: tuple[int, ...], probability: float, state: int) -> None:
        if len(output) == length or output[-1:] == (END,):
            law[output] = probability
            return
        edges: Mapping[int, int] = grammar.edges[state] if grammar else dict.fromkeys(range(VOCAB_SIZE), 0)
        allowed = {*edges, *grammar.ends.get(state, ())} if grammar else None
        for token, share in enumerate(draw_law((*PROMPT, *output), sampling, allowed)):
            if share:
                follow((*output, token), probability * share, edges.get(token, 0))

    follow((), 1.0, 0)
    assert math.isclose(sum(law.values()), 1.0, rel_tol=1e-9)
    return law


def emitted(
    drafter: Drafter, sampling: Mapping[str, Any], length: int, grammar: Automaton | None
) -> tuple[Counter[tuple[int, ...]], int]:
    """How often each text came, and how many drafts were accepted, over the seeds."""
    engine = Engine(BigramRunner(TABLE_VV), [drafter], CONFIG, new_text=letters, end_tokens=(END,))
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, NUM_SEEDS, 250):
        for seed in range(first, first + 250):
            request = Request(PROMPT, Sampling(seed=seed, **sampling), Stopping(max_tokens=length), grammar)
            engine.add(request, str(seed))
        while engine.has_work:
            for part in engine.step():
                if part.finish_reason:
                    counts[tuple(part.seq.tokens[len(PROMPT) :])] += 1
    assert sum(counts.values()) == NUM_SEEDS
    assert engine.metrics.drafter_errors == 0
    return counts, engine.metrics.acceptance.accepted_tokens


def p_value(counts: Counter[tuple[int, ...]], law: Law) -> float:
    """Pearson's chi-squared test; cells that expect fewer than 5 are one cell."""
    assert set(counts) <= set(law), "nothing impossible is emitted"
    rare = [text for text in law if law[text] * NUM_SEEDS < 5]
    cells = [(counts[text], law[text] * NUM_SEEDS) for text in law if text not in set(rare)]
    cells.append((sum(counts[text] for text in rare), sum(law[text] for text in rare) * NUM_SEEDS))
    cells = [cell for cell in cells if cell[1] > 0]
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    print(f"chi-squared {statistic:.1f} over {len(cells)} cells")
    return float(chi2.sf(statistic, len(cells) - 1))


@functools.cache
def without_drafts() -> Counter[tuple[int, ...]]:
    counts, accepted = emitted(NoDrafter(), {}, 2, None)
    assert accepted == 0
    return counts


def test_the_emitted_law_is_the_exact_one_without_drafts() -> None:
    assert p_value(without_drafts(), law_of(Sampling(), 2, None)) > 1e-4


def test_the_witness_would_notice() -> None:
    """The same counts against a law that is a little warmer are refused: these tests can fail."""
    assert p_value(without_drafts(), law_of(Sampling(temperature=1.05), 2, None)) < 1e-4


@pytest.mark.parametrize(
    ("sampling", "length", "grammar"),
    [
        pytest.param({}, 2, None, id="free"),
        pytest.param({}, 3, GRAMMAR, id="grammar"),
        pytest.param({"temperature": 0.7, "top_p": 0.97}, 3, None, id="filtered", marks=pytest.mark.slow),
        pytest.param(
            {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.4, "logit_bias": {2: 1.0}},
            3,
            None,
            id="penalties",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"temperature": 1.3, "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.3},
            3,
            GRAMMAR,
            id="all at once",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_emitted_law_is_the_exact_one_with_trees(
    sampling: dict[str, Any], length: int, grammar: Automaton | None
) -> None:
    counts, accepted = emitted(FixedTrees(), sampling, length, grammar)
    assert accepted > NUM_SEEDS // 10
    assert p_value(counts, law_of(Sampling(**sampling), length, grammar)) > 1e-4
