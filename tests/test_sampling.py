"""What the target picks at a row: the order of the pipeline, bans and completion, errors, penalties along a path."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specdec.errors import DeadEnd, NumericalError
from specdec.free import FREE_TEXT
from specdec.kernels.sample import gumbel, noise_words
from specdec.mask import TokenMask
from specdec.protocols import Constraint
from specdec.request import Request, Sampling, Stopping
from specdec.sampling import Picks, forbid, scores
from specdec.sequence import Sequence, Span
from specdec.text import Detokenizer
from specdec.tree import chain
from tests.fakes import Automaton
from tests.masks import allow, blank

VOCAB_SIZE = 12
CONSTRAINED = Automaton({0: {1: 0}}, {}).start()


def sequence(
    prompt: list[int],
    output: list[int] | None = None,
    sampling: Sampling | None = None,
    stopping: Stopping | None = None,
    *,
    constraint: Constraint = FREE_TEXT,
    end_tokens: tuple[int, ...] = (0,),
    seed: int = 7,
) -> Sequence:
    request = Request(tuple(prompt), sampling or Sampling(), stopping or Stopping())
    text = Detokenizer(lambda token: b"")
    tokens = [*prompt, *(output or [])]
    return Sequence("r", 0, request, seed, tokens, constraint, text, 100, frozenset(end_tokens))


def only(*tokens: int) -> NDArray[np.bool_]:
    allowed_V = np.zeros(VOCAB_SIZE, np.bool_)
    allowed_V[list(tokens)] = True
    return allowed_V


def row(seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(VOCAB_SIZE).astype(np.float32) * 3


def finite(scores_V: NDArray[np.float32]) -> set[int]:
    return set(np.flatnonzero(np.isfinite(scores_V)).tolist())


def test_plain_scores_are_the_logits() -> None:
    logits_V = row()
    assert scores(logits_V, sequence([1]), [], None).tolist() == logits_V.tolist()


def test_the_logits_are_never_changed() -> None:
    logits_V = row()
    logits_V.setflags(write=False)
    sampling = Sampling(repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5, logit_bias={3: 2.0})
    seq = sequence([1, 2], [3], sampling, Stopping(min_tokens=5))
    scores(logits_V, seq, [4], only(1, 2, 3))
    scores(logits_V, sequence([1]), [], only(1))
    scores(logits_V, sequence([1], stopping=Stopping(min_tokens=2)), [], None)


def test_the_order_is_penalties_bias_bans_mask() -> None:
    """Bias after penalties is not scaled by them; nothing brings back what is banned or masked."""
    logits_V = np.full(VOCAB_SIZE, 2.0, np.float32)
    sampling = Sampling(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={1: 3.0, 0: 100.0, 5: 100.0}
    )
    seq = sequence([1, 2], [2, 2], sampling, Stopping(min_tokens=9, stop_token_ids=(6,)))
    got = scores(logits_V, seq, [1], only(*range(VOCAB_SIZE - 1)) & ~only(5))
    assert got[1] == 2.0 / 2 - 0.5 - 0.25 + 3.0
    assert got[2] == 2.0 / 2 - 0.5 - 2 * 0.25
    assert got[3] == 2.0
    assert finite(got) == {1, 2, 3, 4, 7, 8, 9, 10}


def test_penalties_follow_the_path() -> None:
    """The score of a row is that of the text which leads to it: draft tokens count as if they were committed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        sampling = Sampling(
            repetition_penalty=rng.choice([1.0, 1.7, 0.6]),
            presence_penalty=rng.choice([0.0, 1.1, -0.4]),
            frequency_penalty=rng.choice([0.0, 0.3]),
        )
        prompt, output, path = ([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(low, 6))] for low in (1, 0, 0))
        logits_V = row(rng.randrange(2**32))
        got = scores(logits_V, sequence(prompt, output, sampling), path, None)
        committed = scores(logits_V, sequence(prompt, [*output, *path], sampling), [], None)
        assert got.tolist() == committed.tolist()
        for token in range(VOCAB_SIZE):
            expected = float(logits_V[token])
            if token in (*prompt, *output, *path):
                factor = sampling.repetition_penalty
                expected = expected / factor if expected > 0 else expected * factor
            times = [*output, *path].count(token)
            expected -= sampling.presence_penalty * (times > 0) + sampling.frequency_penalty * times
            assert got[token] == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_penalties_of_a_text_that_grows_are_those_of_the_whole_text() -> None:
    sampling = Sampling(repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5)
    grown = sequence([1, 2], [], sampling)
    for length, token in enumerate([3, 3, 1, 4, 3, 2, 2]):
        for path in ([], [3], [5, 5, 1]):
            whole = sequence([1, 2], grown.tokens[2:], sampling)
            assert scores(row(length), grown, path, None).tolist() == scores(row(length), whole, path, None).tolist()
        grown.tokens.append(token)
    tokens, counts = grown.counts().after([])
    assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == {1: 1, 2: 2, 3: 3, 4: 1}


@pytest.mark.parametrize("num_output", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_ends_are_banned_until_min_tokens(num_output: int, depth: int) -> None:
    seq = sequence([1], [2] * num_output, stopping=Stopping(min_tokens=3, stop_token_ids=(4, 5)), end_tokens=(0, 9))
    got = finite(scores(row(), seq, [3] * depth, None))
    ends = {0, 4, 5, 9}
    assert got == set(range(VOCAB_SIZE)) - (ends if num_output + depth < 3 else set())


def test_ignore_eos_bans_ends_only_under_a_grammar() -> None:
    """Free text goes on after an end token that is ignored; a grammar has nothing to say after its end."""
    stopping = Stopping(ignore_eos=True, stop_token_ids=(4,))
    assert 0 in finite(scores(row(), sequence([1], stopping=stopping), [], None))
    constrained = sequence([1], stopping=stopping, constraint=CONSTRAINED)
    assert finite(scores(row(), constrained, [], only(0, 4, 6))) == {4, 6}


@pytest.mark.parametrize(
    "stopping", [Stopping(min_tokens=9), Stopping(ignore_eos=True), Stopping(9, 9, ignore_eos=True)]
)
def test_a_complete_grammar_may_end_whatever_is_banned(stopping: Stopping) -> None:
    seq = sequence([1], stopping=stopping, constraint=CONSTRAINED, end_tokens=(0, 9))
    assert finite(scores(row(), seq, [], only(0, 9))) == {0, 9}
    assert finite(scores(row(), seq, [], only(0))) == {0}
    assert finite(scores(row(), seq, [], only(0, 9, 5))) == {5}


def test_a_row_where_nothing_is_allowed_is_a_dead_end() -> None:
    for allowed_V, stopping in ((only(), Stopping()), (only(), Stopping(min_tokens=3))):
        with pytest.raises(DeadEnd, match="no token is allowed at position 4"):
            scores(row(), sequence([1, 2], [3], stopping=stopping, constraint=CONSTRAINED), [5], allowed_V)
    everything = Stopping(min_tokens=1, stop_token_ids=tuple(range(VOCAB_SIZE)))
    with pytest.raises(DeadEnd, match="no token is allowed at position 1"):
        scores(row(), sequence([1], stopping=everything), [], None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_all_numbers_is_an_error_even_where_a_mask_hides_it(value: float) -> None:
    logits_V = row()
    logits_V[5] = value
    with pytest.raises(NumericalError, match="logits at position 2 are not numbers"):
        scores(logits_V, sequence([1, 2]), [], None)
    with pytest.raises(NumericalError, match="logits at position 1 are not numbers"):
        scores(logits_V, sequence([1], constraint=CONSTRAINED), [], only(3, 4))


def test_a_row_of_nothing_but_minus_infinity_is_the_model_s_fault_and_no_dead_end() -> None:
    with pytest.raises(NumericalError, match="logits at position 1 are not numbers"):
        scores(np.full(VOCAB_SIZE, -math.inf, np.float32), sequence([1]), [], None)
    logits_V = row()
    logits_V[5] = -math.inf  # how a model says that a token is none
    assert 5 not in finite(scores(logits_V, sequence([1]), [], None))


def picks_for(
    seq: Sequence, drafts: list[int], logits_LV: NDArray[np.float32], mask: TokenMask | None = None
) -> tuple[Picks, Span]:
    """One span at logits row 2: rows before it belong to somebody else."""
    span = Span(seq, 1, chain(seq.tokens[-1], drafts, "x"), 0, 2, len(seq.tokens) - 1)
    return Picks(torch.from_numpy(logits_LV), mask or TokenMask(len(logits_LV), VOCAB_SIZE)), span


def test_the_draw_of_a_node_is_that_of_its_place_in_the_text() -> None:
    logits_LV = np.stack([row(number) for number in range(6)])
    for temperature in (0.0, 0.6, 1.0):
        seq = sequence([1, 2], [3], Sampling(temperature=temperature, seed=5), seed=5)
        picks, span = picks_for(seq, [4, 5, 6], logits_LV)
        for node, path in enumerate(([], [4], [4, 5], [4, 5, 6])):
            values = logits_LV[2 + node].astype(np.float64)
            if temperature:
                values = (logits_LV[2 + node] / np.float32(temperature)) + gumbel(noise_words(5, 3 + node, VOCAB_SIZE))
            assert picks.at(span, node, path) == (int(values.argmax()), None)


def test_the_mask_of_a_node_is_its_own_row() -> None:
    logits_LV = np.stack([row(number) for number in range(4)])
    mask = TokenMask(4, VOCAB_SIZE)
    allow(blank(mask, 2), [7])
    allow(blank(mask, 3), [8])
    allow(blank(mask, 0), [9])
    picks, span = picks_for(sequence([1], constraint=CONSTRAINED), [7], logits_LV, mask)
    assert picks.at(span, 0, [])[0] == 7
    assert picks.at(span, 1, [7])[0] == 8


@pytest.mark.parametrize("count", [None, 0, 1, 5, 20])
def test_logprobs_are_raw_and_only_on_request(count: int | None) -> None:
    logits_LV = np.stack([row(number) for number in range(3)])
    sampling = Sampling(temperature=0.3, top_k=2, presence_penalty=2.0, logit_bias={4: 9.0}, logprobs=count)
    picks, span = picks_for(sequence([1], [2], sampling), [], logits_LV)
    token, logprob = picks.at(span, 0, [])
    if count is None:
        assert logprob is None
        return
    expected = torch.log_softmax(torch.from_numpy(logits_LV[2]).double(), 0)
    assert logprob is not None
    assert logprob.token == token
    assert logprob.logprob == pytest.approx(expected[token].item(), abs=1e-9)
    order = expected.argsort(descending=True, stable=True)[:count]
    assert [place for place, _ in logprob.top] == order.tolist()
    assert [value for _, value in logprob.top] == pytest.approx(expected[order].tolist(), abs=1e-9)


def test_a_seed_and_its_residue_draw_alike() -> None:
    logits_LV = np.stack([row(number) for number in range(3)])

    def drawn(seed: int) -> list[int]:
        places = [picks_for(sequence([1] * length, seed=seed), [], logits_LV) for length in range(1, 40)]
        return [picks.at(span, 0, [])[0] for picks, span in places]

    assert drawn(-1) == drawn(2**64 - 1)
    assert len(set(drawn(-1))) > 1


@pytest.mark.parametrize("num_allowed", [0, 1, 20, 499, 500, 501, 999, 1000])
def test_what_is_forbidden_is_minus_infinity_and_the_rest_keeps_its_bits(num_allowed: int) -> None:
    print("seed 3")
    rng = np.random.default_rng(3)
    scores_V = rng.standard_normal(1000, dtype=np.float32)
    scores_V[rng.integers(1000)] = np.nan
    allowed_V = np.zeros(1000, np.bool_)
    allowed_V[rng.permutation(1000)[:num_allowed]] = True
    masked_V = scores_V.copy()
    forbid(masked_V, allowed_V)
    np.testing.assert_array_equal(masked_V, np.where(allowed_V, scores_V, np.float32(-np.inf)))
    assert masked_V.dtype == np.float32
