"""Guesses with the target's own noise: how often they are right is a formula, and how likely they are is learned."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.config import EngineConfig
from specdec.drafters.grow import Growth
from specdec.drafters.memory import Memory
from specdec.drafters.model_drafter import ModelDrafter
from specdec.drafters.recurrent import Recurrent
from specdec.drafters.survival import Draws, Guesses, Survival
from specdec.engine import Engine
from specdec.kernels.guess import TEMPERS
from specdec.kernels.sample import best
from specdec.kv import Pool
from specdec.protocols import Attend, LayerShape
from specdec.request import Request, Sampling, Stopping
from specdec.sampling import compared, scores
from specdec.sequence import Sequence
from tests.drafters.sequences import new_sequence
from tests.fakes import Automaton, BigramRunner, letters

VOCAB_SIZE = 8
TABLE_VV = (np.random.default_rng(8).standard_normal((VOCAB_SIZE, VOCAB_SIZE)) * 1.5).astype(np.float32)
DRAFT_VV = (TABLE_VV + np.random.default_rng(9).standard_normal(TABLE_VV.shape) * 0.7).astype(np.float32)


class BigramHead:
    """A drafter whose logits are a line of a table, chosen by the row's own token. It has no attention."""

    name: str = "bigram"
    taps: tuple[int, ...] = ()
    layers: Seq[LayerShape] = ()
    targets: Tensor | None = None

    def features(self, taps: Seq[Tensor]) -> Tensor:
        return torch.empty(0, 0)

    def forward(self, tokens_R: Tensor, features_RD: Tensor | None, positions_R: Tensor, attend: Attend) -> Tensor:
        return tokens_R[:, None].float()

    def logits(self, hidden_LD: Tensor) -> Tensor:
        return torch.from_numpy(DRAFT_VV)[hidden_LD[:, 0].long()]


def acceptance(target_V: NDArray[np.float32], draft_V: NDArray[np.float32]) -> float:
    """The probability that two argmaxes under one Gumbel noise agree: sum over v of 1 / sum over u of
    max(p_u / p_v, q_u / q_v)."""
    p, q = (np.exp(row - np.logaddexp.reduce(row)).astype(np.float64) for row in (target_V, draft_V))
    return float(sum(1.0 / np.maximum(p / p[v], q / q[v]).sum() for v in range(len(p))))


def test_a_guess_is_right_as_often_as_the_formula_says() -> None:
    config = EngineConfig(16, 250 * 80, block_size=8, max_num_seqs=250, max_rows=4000, prefix_caching=False)
    head = BigramHead()
    memory = Memory(head.forward, head.layers, 0, Pool(config.num_blocks, config.block_size, "cpu", torch.float32))
    drafter = ModelDrafter(Recurrent(head, memory), VOCAB_SIZE, Growth(depth=1, branch=1))
    engine = Engine(BigramRunner(TABLE_VV), [drafter], config, new_text=letters, end_tokens=())
    right, expected, variance, draws = 0, 0.0, 0.0, 0
    for seed in range(800):
        engine.add(Request((3, 5), Sampling(seed=seed), Stopping(max_tokens=12)), f"r{seed}")
        if seed % 200 < 199:
            continue
        while engine.has_work:
            for emission in engine.step():
                if emission.num_drafts:
                    root = emission.seq.tokens[-len(emission.tokens) - 1]
                    chance = acceptance(TABLE_VV[root], DRAFT_VV[root])
                    right += emission.num_accepted
                    expected += chance
                    variance += chance * (1 - chance)
                    draws += 1
    assert draws > 3000
    assert 0.3 < expected / draws < 0.9
    assert abs(right - expected) < 4 * math.sqrt(variance)


@pytest.mark.parametrize(
    "sampling", [Sampling(seed=3), Sampling(seed=4, top_p=0.8), Sampling(seed=5, min_p=0.2, top_k=5)]
)
def test_the_best_guess_of_the_target_itself_is_what_it_picks(sampling: Sampling) -> None:
    rng = np.random.default_rng(1)
    for length in range(1, 200):
        seq = new_sequence([1] * length, sampling=sampling)
        row_V = (rng.standard_normal(40) * 2).astype(np.float32)
        guesses = Draws(seq, Survival(), 40).guess(row_V, (), 40, None)
        assert guesses is not None
        assert guesses.tokens[0] == best(*compared(scores(row_V, seq, (), None), seq, 0))
        assert sorted(guesses.tokens) == list(range(40))  # filters order, they never exclude


def test_what_the_filters_keep_comes_before_what_they_drop() -> None:
    rng = np.random.default_rng(2)
    for length in range(1, 100):
        seq = new_sequence([1] * length, sampling=Sampling(seed=6, top_k=5, temperature=0.8))
        row_V = (rng.standard_normal(40) * 2).astype(np.float32)
        guesses = Draws(seq, Survival(), 40).guess(row_V, (), 12, None)
        assert guesses is not None
        assert set(guesses.tokens[:5]) == set(np.argsort(-row_V)[:5].tolist())
        ids, values = compared(row_V, seq, 0)
        assert ids is not None
        assert list(guesses.tokens[:5]) == ids[np.argsort(-values)].tolist()


def test_penalties_bias_and_grammar_are_the_rows_own() -> None:
    sampling = Sampling(temperature=0.0, presence_penalty=1.0, logit_bias={3: 5.0})
    grammar = Automaton({0: {3: 1, 4: 1, 5: 1}, 1: {3: 1, 4: 1}}, {})
    seq = new_sequence([7, 6], sampling=sampling)
    seq.constraint = grammar.start()
    row_V = np.array([9.0, 9.0, 9.0, 1.0, 6.5, 4.0, 9.0, 9.0], np.float32)
    draws = Draws(seq, Survival(), VOCAB_SIZE)
    first, second = draws.guess(row_V, (), 8, None), draws.guess(row_V, (3,), 8, None)
    assert first is not None
    assert first.tokens == (4, 3, 5)
    assert second is not None
    assert second.tokens == (4, 3)  # 3 has been drawn on this path: 1 + 5 - 1
    assert draws.guess(row_V, (0,), 8, None) is None  # the grammar forbids the path


def test_a_vocabulary_of_its_own_is_guessed_in_the_targets_ids() -> None:
    seq = new_sequence([1, 2], sampling=Sampling(seed=8))
    targets_V = np.array([2, 3, 7])
    row_V = np.array([0.3, 0.1, 0.2], np.float32)
    full_V = np.full(VOCAB_SIZE, -np.inf, np.float32)
    full_V[targets_V] = row_V
    draws = Draws(seq, Survival(), VOCAB_SIZE)
    guesses = draws.guess(row_V, (), 8, targets_V)
    assert guesses is not None
    assert sorted(guesses.tokens) == [2, 3, 7]
    _, values = compared(full_V, seq, 0)
    assert list(guesses.tokens) == np.argsort(-values)[:3].tolist()


@pytest.mark.parametrize("row_V", [[np.nan, 1.0, 2.0], [np.inf, 0.0, 1.0], [-np.inf, -np.inf, -np.inf]])
def test_logits_that_are_no_numbers_give_no_guess(row_V: list[float]) -> None:
    draws = Draws(new_sequence([1, 2], sampling=Sampling(seed=8)), Survival(), 3)
    assert draws.guess(np.array(row_V, np.float32), (), 2, None) is None


def test_chances_are_a_softmax_of_scores_and_noise_and_fall_along_the_guesses() -> None:
    rng = np.random.default_rng(3)
    for length in range(1, 60):
        seq = new_sequence([1] * length, sampling=Sampling(seed=2))
        row_V = (rng.standard_normal(500) * 2).astype(np.float32)
        guesses = Draws(seq, Survival(), 500).guess(row_V, (), 6, None)
        assert guesses is not None
        _, values = compared(row_V, seq, 0)
        for temper, chances_N in zip(TEMPERS, guesses.chances_GN, strict=True):
            weights = np.exp((values - values.max()) / temper)
            exact = weights[list(guesses.tokens)] / weights.sum()
            np.testing.assert_allclose(chances_N, exact, rtol=1e-5)
        assert all(one >= other for one, other in itertools.pairwise(guesses.survival))
        assert sum(guesses.survival) <= 1.0 + 1e-9


@pytest.mark.parametrize("truth", [0.5, 1.0, 2.83])
def test_the_temper_that_predicts_best_is_found(truth: float) -> None:
    rng, survival = np.random.default_rng(4), Survival()
    guesses = None
    for length in range(1, 400):
        seq = new_sequence([1] * length, sampling=Sampling(temperature=0.0))
        row_V = (rng.standard_normal(30) * 2).astype(np.float32)
        guesses = Draws(seq, survival, 30).guess(row_V, (), 10, None)
        assert guesses is not None
        weights = np.exp((row_V - row_V.max()) / truth)
        survival.learn(guesses, int(rng.choice(30, p=weights / weights.sum())))
    assert guesses is not None
    found = TEMPERS[survival.temper(guesses.kind)]
    assert truth / 1.5 < found < truth * 1.5


def _guesses_of(seq: Sequence) -> Guesses:
    made = Draws(seq, Survival(), VOCAB_SIZE).guess(TABLE_VV[seq.tokens[-1]], (), 8, None)
    assert made is not None
    return made


def test_places_and_depths_are_told_apart() -> None:
    seq = new_sequence([random.Random(0).randrange(8)], sampling=Sampling(seed=1))
    free = _guesses_of(seq)
    seq.constraint = Automaton({0: {3: 1, 4: 1}}, {}).start()
    assert _guesses_of(seq).kind != free.kind
    deeper = Draws(seq, Survival(), VOCAB_SIZE).guess(TABLE_VV[0], (3,), 8, None)
    assert deeper is None
