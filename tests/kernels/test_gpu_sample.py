"""The sampler's kernels in Triton's interpreter, each against its reference, over shapes in which all pairs meet.

A draw's noise is fp64 in the reference and fp32 here, so a draw must agree where the reference's best two differ by
more than fp32 can blur (`blur`), and where no filter's edge lies within 1e-5 of its target; the others are counted.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.kernels import mask, sample_rows
from specdec.kernels.draws import NOT_NUMBERS, NOTHING_ALLOWED, Counted, Draws, Listed
from specdec.kernels.gpu import logprobs as gpu_logprobs
from specdec.kernels.gpu import mask as gpu_mask
from specdec.kernels.gpu import sample as gpu_sample
from specdec.kernels.rounding import certain
from tests.kernels.cover import pairwise

INFINITY, NAN = math.inf, math.nan


@pytest.fixture
def rng() -> np.random.Generator:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def padded(rows_LV: Tensor, padding: int) -> Tensor:
    """The same rows, further apart in memory, with NaN between them."""
    wide = torch.full((rows_LV.shape[0], rows_LV.shape[1] + padding), NAN, dtype=rows_LV.dtype)
    wide[:, : rows_LV.shape[1]] = rows_LV
    return wide[:, : rows_LV.shape[1]]


def scores(rng: np.random.Generator, num_rows: int, vocab_size: int, kind: str) -> Tensor:
    """Rows of fp32 scores: smooth, or with few values and so many ties, or with most tokens forbidden."""
    values = rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
    if kind == "ties":
        values = np.round(values)
    if kind == "mostly forbidden":
        values[rng.random(values.shape) < 0.9] = -np.inf
        values[np.arange(num_rows), rng.integers(0, vocab_size, num_rows)] = 1.0
    return torch.from_numpy(values)


# Masks


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "rows": [1, 3, 17],
            "vocab_size": [1, 31, 32, 33, 63, 64, 65, 1000, 2049],
            "bits": ["empty", "full", "random", "31", "62"],
            "masked": ["none", "all", "every other"],
            "padding": [0, 5],
            "tuning": gpu_mask.TUNINGS,
        }
    ),
)
def test_masked_rows_are_those_of_the_reference(case: dict[str, Any], rng: np.random.Generator) -> None:
    num_rows, vocab_size = case["rows"], case["vocab_size"]
    bits = np.zeros((num_rows, (vocab_size + 31) // 32 * 32), np.uint8)
    if case["bits"] == "full":
        bits[:] = 1
    elif case["bits"] == "random":
        bits[:] = rng.random(bits.shape) < 0.5
    elif case["bits"] != "empty":
        bits[:, int(case["bits"]) : int(case["bits"]) + 1] = 1
    words_LW = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view("<i4"))
    masked_L = torch.zeros(num_rows, dtype=torch.bool)
    masked_L[:: {"none": num_rows + 1, "all": 1, "every other": 2}[case["masked"]]] = case["masked"] != "none"
    scores_LV = torch.from_numpy(rng.normal(size=(num_rows, vocab_size)).astype(np.float32))
    expected_LV = scores_LV.clone()
    for row in torch.nonzero(masked_L).flatten().tolist():
        expected_LV[row, np.flatnonzero(bits[row, :vocab_size] == 0)] = -INFINITY
    reference_LV = scores_LV.clone()
    mask.mask_rows(reference_LV, words_LW, masked_L)
    assert torch.equal(reference_LV, expected_LV)
    found_LV = padded(scores_LV, case["padding"])
    gpu_mask.mask_rows(found_LV, words_LW, masked_L, case["tuning"])
    assert torch.equal(found_LV, expected_LV)


def test_words_too_few_for_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="2 words of 32 bits cannot mask a vocabulary of 65"):
        mask.mask_rows(torch.zeros(1, 65), torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.bool))


# Penalties


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "rows": [1, 3, 17],
            "vocab_size": [1, 33, 1000],
            "longest": [0, 1, 255, 256, 600],
            "repetition": [1.0, 1.3, 0.5],
            "presence": [0.0, 0.7, -2.0],
            "frequency": [0.0, 0.3],
            "tuning": gpu_sample.PENALTY_TUNINGS,
        }
    ),
)
def test_penalized_rows_are_those_of_the_reference_to_the_last_bit(
    case: dict[str, Any], rng: np.random.Generator
) -> None:
    num_rows, vocab_size = case["rows"], case["vocab_size"]
    lists = [rng.permutation(vocab_size)[: rng.integers(0, case["longest"] + 1)] for _ in range(num_rows)]
    counted = Counted(
        torch.from_numpy(np.concatenate(lists).astype(np.int32)),
        torch.from_numpy(rng.integers(0, 4, sum(map(len, lists))).astype(np.int32)),
        torch.tensor([0, *np.cumsum([len(entries) for entries in lists])], dtype=torch.int32),
    )
    repetition_L, presence_L = torch.full((num_rows,), case["repetition"]), torch.full((num_rows,), case["presence"])
    frequency_L = torch.full((num_rows,), case["frequency"])
    repetition_L[0] = 1.1  # rows of one batch need not be alike
    expected_LV = scores(rng, num_rows, vocab_size, "smooth")
    found_LV = padded(expected_LV, 3)
    sample_rows.penalize_rows(expected_LV, counted, repetition_L, presence_L, frequency_L)
    gpu_sample.penalize_rows(found_LV, counted, repetition_L, presence_L, frequency_L, case["tuning"])
    assert torch.equal(found_LV, expected_LV)


# Biases and bans


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "rows": [1, 3, 17],
            "vocab_size": [1, 33, 1000],
            "longest": [0, 1, 127, 128, 600],
            "banned": ["none", "some", "all"],
            "padding": [0, 3],
            "tuning": gpu_sample.ADD_TUNINGS,
        }
    ),
)
def test_listed_values_are_added_as_in_the_reference_to_the_last_bit(
    case: dict[str, Any], rng: np.random.Generator
) -> None:
    num_rows, vocab_size = case["rows"], case["vocab_size"]
    lists = [rng.permutation(vocab_size)[: rng.integers(0, case["longest"] + 1)] for _ in range(num_rows)]
    values_N = rng.normal(0, 50, sum(map(len, lists))).astype(np.float32)
    values_N[rng.random(len(values_N)) < {"none": 0.0, "some": 0.3, "all": 1.0}[case["banned"]]] = -np.inf
    lengths_L = torch.tensor([len(entries) for entries in lists], dtype=torch.int32)
    ends_L = lengths_L.cumsum(0, dtype=torch.int32)
    tokens_N = torch.from_numpy(np.concatenate(lists).astype(np.int32))
    listed = Listed(tokens_N, torch.from_numpy(values_N), ends_L - lengths_L, ends_L)
    scores_LV = scores(rng, num_rows, vocab_size, "mostly forbidden")
    scores_LV[-1, -1] = NAN  # no ban is stopped by what is no number
    expected_LV, place = scores_LV.numpy().copy(), 0
    for row, tokens in enumerate(lists):
        for token in tokens:
            value, place = values_N[place], place + 1
            expected_LV[row, token] = value if value == -np.inf else expected_LV[row, token] + value
    found_LV = padded(scores_LV, case["padding"])
    sample_rows.add_rows(scores_LV, listed)
    gpu_sample.add_rows(found_LV, listed, case["tuning"])
    for got_LV in (scores_LV, found_LV):
        np.testing.assert_array_equal(got_LV.numpy(), expected_LV)


# Draws


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "rows": [1, 3, 17],
            "vocab_size": [1, 2, 33, 1000, 2100],
            "kind": ["smooth", "ties", "mostly forbidden"],
            "temperature": [0.0, 0.2, 1.0, 3.0],
            "top_k": [0, 1, 40, 5000],
            "top_p": [1.0, 0.9, 0.05],
            "min_p": [0.0, 0.1],
            "filtering": gpu_sample.FILTER_TUNINGS,
            "drawing": gpu_sample.DRAW_TUNINGS,
        }
    ),
)
def test_draws_are_those_of_the_reference(case: dict[str, Any], rng: np.random.Generator) -> None:
    num_rows = case["rows"]
    scores_LV = scores(rng, num_rows, case["vocab_size"], case["kind"])
    draws = Draws(
        torch.full((num_rows,), case["temperature"]),
        torch.full((num_rows,), case["top_k"], dtype=torch.int32),
        torch.full((num_rows,), case["top_p"], dtype=torch.float64),
        torch.full((num_rows,), case["min_p"], dtype=torch.float64),
        torch.from_numpy(rng.integers(-(2**63), 2**63, num_rows)),
        torch.from_numpy(rng.integers(0, 2**20, num_rows)),
    )
    draws.temperature_L[-1] = 1.0
    totals_L = sample_rows.log_totals(scores_LV)
    expected_L = sample_rows.draw_rows(scores_LV, draws, totals_L)
    found_L = gpu_sample.draw_rows(padded(scores_LV, 3), draws, totals_L, case["filtering"], case["drawing"])
    sure = [certain(scores_LV[row], draws, row) for row in range(num_rows)]
    print(f"{num_rows - sum(sure)} of {num_rows} draws are near ties")
    assert sum(sure) >= num_rows - 1
    assert (found_L[sure] == expected_L[sure]).all()
    assert found_L.dtype == torch.int64
    assert ((found_L >= 0) & (found_L < case["vocab_size"])).all()


def test_equals_at_the_edges_of_filters_are_kept_as_the_reference_keeps_them() -> None:
    """min-p, whose edge is a score here, keeps all that equal it, though top-p kept few of its own equals before; and
    where top-p has the last word, only the lowest tokens of its equals stay."""
    scores_V = torch.full((100,), -9.0)
    scores_V[20], scores_V[50:61], scores_V[:10] = 0.0, math.log(0.5), -1.0
    scores_LV = scores_V.repeat(16, 1)
    expected = []
    for min_p in (0.0, 0.5):
        draws = Draws(
            torch.ones(16),
            torch.zeros(16, dtype=torch.int32),
            torch.full((16,), 0.8, dtype=torch.float64),
            torch.full((16,), min_p, dtype=torch.float64),
            torch.arange(16),
            torch.arange(16),
        )
        expected.append(sample_rows.draw_rows(scores_LV, draws, torch.zeros(16)).tolist())
        assert all(certain(row, draws, place) for place, row in enumerate(scores_LV))
        assert gpu_sample.draw_rows(scores_LV, draws, torch.zeros(16)).tolist() == expected[-1]
    kept, kept_by_both = (set(tokens) for tokens in expected)
    assert {token for token in kept if token < 10} <= {0, 1, 2, 3, 4}
    assert min(kept) < 10
    assert kept_by_both <= {20, *range(50, 61)}
    assert max(kept_by_both) >= 50


def test_both_zeros_are_one_score() -> None:
    scores_LV = torch.tensor([[-1.0, -0.0, 0.0, -0.0], [-1.0, 0.0, -0.0, 0.0]])
    greedy = Draws(torch.zeros(2), *(getattr(plain(2), name) for name in Draws.__slots__[1:]))
    assert gpu_sample.draw_rows(scores_LV, greedy, torch.zeros(2)).tolist() == [1, 1]
    ids_LM, _ = gpu_logprobs.top_rows(scores_LV, torch.zeros(2), 4)
    assert ids_LM.tolist() == [[1, 2, 3, 0]] * 2


def plain(num_rows: int) -> Draws:
    """Draws at temperature 1 without filters."""
    ones, zeros = torch.ones(num_rows), torch.zeros(num_rows)
    return Draws(ones, zeros.int(), ones.double(), zeros.double(), torch.arange(num_rows), torch.arange(num_rows))


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (5, 0.5)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_no_numbers_or_forbid_everything_are_flagged_and_their_neighbours_are_not(
    temperature: float, top_k: int, top_p: float, rng: np.random.Generator
) -> None:
    scores_LV = scores(rng, 7, 1100, "smooth")
    scores_LV[1, 1050] = NAN
    scores_LV[2, 3] = INFINITY
    scores_LV[3] = -INFINITY
    scores_LV[4, 5] = -INFINITY
    scores_LV[5] = NAN
    draws = Draws(
        torch.full((7,), temperature),
        torch.full((7,), top_k, dtype=torch.int32),
        torch.full((7,), top_p, dtype=torch.float64),
        torch.zeros(7, dtype=torch.float64),
        torch.arange(7),
        torch.arange(7),
    )
    fine_L = torch.zeros(7)
    expected_L = sample_rows.draw_rows(scores_LV, draws, fine_L)
    assert expected_L[[1, 2, 3, 5]].tolist() == [NOT_NUMBERS, NOT_NUMBERS, NOTHING_ALLOWED, NOT_NUMBERS]
    assert (expected_L[[0, 4, 6]] >= 0).all()
    assert gpu_sample.draw_rows(scores_LV, draws, fine_L).tolist() == expected_L.tolist()
    totals_L = torch.tensor([NAN, *[0.0] * 6])
    for draw in (sample_rows.draw_rows, gpu_sample.draw_rows):
        assert draw(scores_LV, draws, totals_L).tolist() == [NOT_NUMBERS, *expected_L.tolist()[1:]]


def test_a_row_draws_the_same_alone_and_in_company(rng: np.random.Generator) -> None:
    scores_LV, draws = scores(rng, 5, 1500, "ties"), plain(5)
    together_L = gpu_sample.draw_rows(scores_LV, draws, torch.zeros(5))
    for row in range(5):
        one = Draws(*(getattr(draws, name)[row : row + 1] for name in Draws.__slots__))
        assert gpu_sample.draw_rows(scores_LV[row : row + 1], one, torch.zeros(1)).tolist() == [together_L[row]]


def test_no_rows_draw_nothing() -> None:
    none = plain(0)
    assert gpu_sample.draw_rows(torch.zeros(0, 9), none, torch.zeros(0)).tolist() == []
    assert sample_rows.draw_rows(torch.zeros(0, 9), none, torch.zeros(0)).tolist() == []


# Log-probabilities


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "rows": [1, 3, 17],
            "vocab_size": [1, 2, 33, 1000, 9000],
            "kind": ["smooth", "ties", "mostly forbidden"],
            "num_top": [0, 1, 5, 20],
            "padding": [0, 3],
            "total_tuning": gpu_logprobs.TOTAL_TUNINGS,
            "top_tuning": gpu_logprobs.TOP_TUNINGS,
        }
    ),
)
def test_log_probabilities_are_those_of_the_reference(case: dict[str, Any], rng: np.random.Generator) -> None:
    logits_LV = scores(rng, case["rows"], case["vocab_size"], case["kind"])
    wide_LV = padded(logits_LV, case["padding"])
    expected_L = sample_rows.log_totals(logits_LV)
    found_L = gpu_logprobs.log_totals(wide_LV, case["total_tuning"])
    assert torch.allclose(found_L, expected_L, rtol=0, atol=1e-5)
    ids_LM, values_LM = sample_rows.top_rows(logits_LV, expected_L, case["num_top"])
    found_ids_LM, found_values_LM = gpu_logprobs.top_rows(wide_LV, expected_L, case["num_top"], case["top_tuning"])
    assert torch.equal(found_ids_LM, ids_LM)
    assert torch.allclose(found_values_LM, values_LM, rtol=0, atol=1e-5)
    assert ids_LM.shape == (case["rows"], min(case["num_top"], case["vocab_size"]))


@pytest.mark.parametrize("vocab_size", [1, 40, 5000])
def test_totals_of_rows_that_are_no_numbers_are_nan_and_their_neighbours_are_not(vocab_size: int) -> None:
    logits_LV = torch.zeros(6, vocab_size)
    logits_LV[1, -1] = NAN
    logits_LV[2, 0] = INFINITY
    logits_LV[3] = -INFINITY
    logits_LV[4] = NAN
    for totals in (sample_rows.log_totals, gpu_logprobs.log_totals):
        found_L = totals(logits_LV)
        assert found_L.isnan().tolist() == [False, True, True, True, True, False]
        assert found_L[[0, 5]].tolist() == pytest.approx([math.log(vocab_size)] * 2, abs=1e-6)
