"""Guesses by the kernels in Triton's interpreter against those of the reference, over shapes in which all pairs meet;
and the reference against a sort and a softmax written down once more.

The noise is fp64 in the reference and fp32 in the kernels, so guesses whose values differ by less than that blurs
(`rounding.swaps`) may change places; where a filter's edge lies within 1e-5 of its target a row is not compared.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.kernels import sample_rows
from specdec.kernels.draws import NOT_NUMBERS, NOTHING_ALLOWED, Draws
from specdec.kernels.gpu import guess as gpu_guess
from specdec.kernels.gpu import sample as gpu_sample
from specdec.kernels.guess import OUTSIDE, TEMPERS
from specdec.kernels.guess_rows import guess_rows
from specdec.kernels.rounding import certain_edges, swaps
from specdec.kernels.sample import perturbed
from tests.kernels.cover import pairwise
from tests.kernels.test_gpu_sample import INFINITY, NAN, padded, plain, scores

SHAPES: dict[str, list[Any]] = {
    "rows": [1, 3, 17],
    "vocab_size": [1, 33, 1000, 2100],
    "kind": ["smooth", "ties", "mostly forbidden"],
    "temperature": [0.0, 0.4, 1.0],
    "top_k": [0, 1, 40],
    "top_p": [1.0, 0.9],
    "min_p": [0.0, 0.1],
    "count": [1, 2, 5, 8, 3000],
}


@pytest.fixture
def rng() -> np.random.Generator:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def drawn_alike(case: dict[str, Any], rng: np.random.Generator) -> Draws:
    """All rows as the case says, the last one at temperature 1."""
    num_rows = case["rows"]
    draws = Draws(
        torch.full((num_rows,), case["temperature"]),
        torch.full((num_rows,), case["top_k"], dtype=torch.int32),
        torch.full((num_rows,), case["top_p"], dtype=torch.float64),
        torch.full((num_rows,), case["min_p"], dtype=torch.float64),
        torch.from_numpy(rng.integers(-(2**63), 2**63, num_rows)),
        torch.from_numpy(rng.integers(0, 2**20, num_rows)),
    )
    draws.temperature_L[-1] = 1.0
    return draws


def one_of(draws: Draws, row: int) -> dict[str, Any]:
    """A row's values under the names of `perturbed`."""
    return {
        "temperature": draws.temperature_L[row].item(),
        "top_k": int(draws.top_k_L[row]),
        "top_p": draws.top_p_L[row].item(),
        "min_p": draws.min_p_L[row].item(),
        "seed": int(draws.seeds_L[row]),
        "position": int(draws.positions_L[row]),
    }


def written_down(scores_V: Tensor, draws: Draws, row: int, count: int) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Tokens and chances `[C, G]` of a row by a sort of everything and a softmax in fp64."""
    told = one_of(draws, row)
    kept, _ = perturbed(scores_V.numpy(), **told)
    _, values_V = perturbed(scores_V.numpy(), **{**told, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
    inside = set(range(len(scores_V))) if kept is None else set(kept.tolist())
    tokens = [token for token in range(len(scores_V)) if values_V[token] > -INFINITY]
    tokens.sort(key=lambda token: (token not in inside, -values_V[token], token))
    believed = np.array([values_V[token] - OUTSIDE * (token not in inside) for token in tokens], np.float64)
    weights_NG = np.exp((believed - believed.max())[:, None] / TEMPERS)
    return tokens[:count], np.minimum.accumulate(weights_NG / weights_NG.sum(0), 0)[:count]


def test_tempers_are_those_that_squaring_makes() -> None:
    np.testing.assert_allclose(TEMPERS[:-2] * 2, TEMPERS[2:])
    assert TEMPERS[3] == 1.0
    assert (gpu_guess.TEMPERS.value, gpu_guess.MILDEST.value) == (len(TEMPERS), 1 / TEMPERS[-1])
    assert gpu_guess.MILDER.value == pytest.approx(1 / TEMPERS[-2], rel=1e-15)


@pytest.mark.parametrize("case", pairwise(SHAPES))
def test_the_reference_is_a_sort_and_a_softmax(case: dict[str, Any], rng: np.random.Generator) -> None:
    scores_LV = scores(rng, case["rows"], case["vocab_size"], case["kind"])
    draws, totals_L = drawn_alike(case, rng), sample_rows.log_totals(scores_LV)
    tokens_LC, chances_LCG = guess_rows(scores_LV, draws, totals_L, case["count"])
    width = min(case["count"], case["vocab_size"])
    assert (tokens_LC.shape, tokens_LC.dtype) == ((case["rows"], width), torch.int32)
    for row, scores_V in enumerate(scores_LV):
        expected, expected_NG = written_down(scores_V, draws, row, width)
        rest = width - len(expected)
        assert tokens_LC[row].tolist() == [*expected, *[NOTHING_ALLOWED] * rest]
        np.testing.assert_allclose(chances_LCG[row, : len(expected)], expected_NG, rtol=0, atol=1e-5)
        assert (chances_LCG[row, len(expected) :] == 0.0).all()


PLAIN: dict[str, list[Any]] = {"top_k": [0], "top_p": [1.0], "min_p": [0.0]}
TUNED: dict[str, Any] = {"count": [1, 5, 8, 40], "guessing": gpu_guess.TUNINGS}
# The interpreter takes a tenth of a second for a row, and several for filters.
FILTERED = {"rows": [1], "vocab_size": [33, 1100], "kind": ["smooth", "ties"]}
CASES = pairwise(SHAPES | PLAIN | TUNED) + pairwise(SHAPES | TUNED | FILTERED)


@pytest.mark.parametrize("case", CASES)
def test_guesses_are_those_of_the_reference(case: dict[str, Any], rng: np.random.Generator) -> None:
    scores_LV = scores(rng, case["rows"], case["vocab_size"], case["kind"])
    draws, totals_L = drawn_alike(case, rng), sample_rows.log_totals(scores_LV)
    tokens_LC, chances_LCG = guess_rows(scores_LV, draws, totals_L, case["count"])
    found_LC, found_LCG = gpu_guess.guess_rows(
        padded(scores_LV, 3), draws, totals_L, case["count"], guessing=case["guessing"]
    )
    assert (found_LC.shape, found_LC.dtype) == (tokens_LC.shape, tokens_LC.dtype)
    unsure = moved = 0
    for row, scores_V in enumerate(scores_LV):
        if not certain_edges(scores_V, draws, row):
            unsure += 1
            continue
        count = int((tokens_LC[row] >= 0).sum())
        changes = swaps(found_LC[row, :count].tolist(), tokens_LC[row, :count].tolist(), scores_V, draws, row)
        assert changes is not None
        moved += changes
        assert (found_LC[row, count:] == NOTHING_ALLOWED).all()
        torch.testing.assert_close(found_LCG[row], chances_LCG[row], rtol=0, atol=1e-5)
    print(f"{unsure} of {len(scores_LV)} rows are near an edge, {moved} guesses changed places")
    assert unsure <= 1
    assert moved <= 2
    assert (found_LCG.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("where", [guess_rows, gpu_guess.guess_rows])
@pytest.mark.parametrize("temperature, top_k, top_p", [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 5, 1.0)])
def test_rows_that_are_no_numbers_or_forbid_everything_are_flagged_and_their_neighbours_are_not(
    temperature: float, top_k: int, top_p: float, where: Any, rng: np.random.Generator
) -> None:
    scores_LV = scores(rng, 8, 1100, "smooth")
    scores_LV[1, 1050] = NAN
    scores_LV[2, 3] = INFINITY
    scores_LV[3] = -INFINITY
    scores_LV[4, 5:] = -INFINITY
    scores_LV[5] = NAN
    totals_L = torch.zeros(8)
    totals_L[6] = NAN
    draws = Draws(
        torch.full((8,), temperature),
        torch.full((8,), top_k, dtype=torch.int32),
        torch.full((8,), top_p, dtype=torch.float64),
        torch.zeros(8, dtype=torch.float64),
        torch.arange(8),
        torch.arange(8),
    )
    tokens_LC, chances_LCG = where(scores_LV, draws, totals_L, 8)
    flags = [None, NOT_NUMBERS, NOT_NUMBERS, NOTHING_ALLOWED, None, NOT_NUMBERS, NOT_NUMBERS, None]
    for row, flag in enumerate(flags):
        tokens = tokens_LC[row].tolist()
        if flag is not None:
            assert tokens == [flag] * 8
            assert (chances_LCG[row] == 0.0).all()
        elif row == 4:
            assert (sorted(tokens[:5]), tokens[5:]) == ([0, 1, 2, 3, 4], [NOTHING_ALLOWED] * 3)
        else:
            assert min(tokens) >= 0
            assert len(set(tokens)) == 8
            assert chances_LCG[row].isfinite().all()


def test_a_row_guesses_the_same_alone_and_in_company(rng: np.random.Generator) -> None:
    scores_LV, draws = scores(rng, 4, 2100, "ties"), plain(4)
    tokens_LC, chances_LCG = gpu_guess.guess_rows(scores_LV, draws, torch.zeros(4), 8)
    for row in range(4):
        one = Draws(*(getattr(draws, name)[row : row + 1] for name in Draws.__slots__))
        tokens_1C, chances_1CG = gpu_guess.guess_rows(scores_LV[row : row + 1], one, torch.zeros(1), 8)
        assert torch.equal(tokens_1C[0], tokens_LC[row])
        assert torch.equal(chances_1CG[0], chances_LCG[row])


@pytest.mark.parametrize("where", [guess_rows, gpu_guess.guess_rows])
def test_no_rows_guess_nothing(where: Any) -> None:
    tokens_LC, chances_LCG = where(torch.zeros(0, 9), plain(0), torch.zeros(0), 4)
    assert (tokens_LC.shape, chances_LCG.shape) == ((0, 4), (0, 4, len(TEMPERS)))


def test_the_first_of_the_guesses_is_the_draw(rng: np.random.Generator) -> None:
    """By the kernels on both sides, to the last bit: the same noise, the same filters, the same ties."""
    scores_LV = scores(rng, 4, 1100, "ties")
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (0, 0.8, 0.05)):
        draws = Draws(
            torch.tensor([0.0, 0.3, 1.0, 2.0]),
            torch.full((4,), top_k, dtype=torch.int32),
            torch.full((4,), top_p, dtype=torch.float64),
            torch.full((4,), min_p, dtype=torch.float64),
            torch.arange(4) - 5,
            torch.arange(4),
        )
        drawn_L = gpu_sample.draw_rows(scores_LV, draws, torch.zeros(4))
        tokens_LC, _ = gpu_guess.guess_rows(scores_LV, draws, torch.zeros(4), 3)
        assert tokens_LC[:, 0].tolist() == drawn_L.tolist()


def test_only_what_rounding_may_swap_is_excused() -> None:
    scores_V = torch.tensor([0.0, 1.0, 1.0 + 2**-23, -INFINITY, 3.0])
    noiseless = Draws(*(getattr(plain(1), name) for name in Draws.__slots__))
    noiseless.temperature_L[0] = 0.0
    assert swaps([4, 2, 1], [4, 2, 1], scores_V, noiseless, 0) == 0
    assert swaps([4, 1, 2], [4, 2, 1], scores_V, noiseless, 0) is None  # greedy: nothing is rounded
    draws = plain(1)
    _, values_V = perturbed(scores_V.numpy(), **one_of(draws, 0))
    near_V = scores_V.clone()
    near_V[0] += float(values_V[4] - values_V[0])  # as good as 4 then, to rounding
    assert swaps([0, 4, 1], [4, 0, 1], near_V, draws, 0) == 2
    assert swaps([0, 1, 4], [4, 0, 1], near_V, draws, 0) is None
    assert swaps([0, 4], [4, 0, 1], near_V, draws, 0) is None
    assert swaps([4, 4], [4, 0], near_V, draws, 0) is None
    draws.top_k_L[0] = 1  # keeps one of the two
    assert swaps([0, 4], [4, 0], near_V, draws, 0) is None
