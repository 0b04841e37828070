"""The draw: noise as NumPy documents it, filters and penalties against their definitions, log-probabilities."""

from __future__ import annotations

import math
import random

import mpmath
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specdec.kernels.sample import (
    NUCLEUS_CANDIDATES,
    best,
    gumbel,
    log_probabilities,
    noise_words,
    penalize,
    perturbed,
    surviving,
)

VOCAB_SIZES = [1, 2, 7, 8, 9, 24, 1000, 49152, 262144]
MASK = 2**64 - 1


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def philox4x64_10(counter: int, key: tuple[int, int]) -> list[int]:
    """One block of Philox4x64-10 from its definition (Salmon, Moraes, Dror, Shaw, SC 2011, section 3.3)."""
    words = [counter >> 64 * i & MASK for i in range(4)]
    low, high = key
    for _ in range(10):
        first, second = words[0] * 0xD2E7470EE14C6C93, words[2] * 0xCA5A826395121157
        words = [second >> 64 ^ words[1] ^ low, second & MASK, first >> 64 ^ words[3] ^ high, first & MASK]
        low, high = low + 0x9E3779B97F4A7C15 & MASK, high + 0xBB67AE8584CAA73B & MASK
    return words


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)])
@pytest.mark.parametrize("position", [0, 1, 131071, 2**40])
def test_noise_is_philox_as_its_paper_defines_it(seed: int, position: int) -> None:
    words = noise_words(seed, position, 262144)
    assert words.dtype == np.uint32
    for block in (0, 1, 2, 3, 1000, 49152 // 8 - 1, 262144 // 8 - 1):
        expected = [
            half
            for word in philox4x64_10(block + 1, (seed & MASK, position))
            for half in (word & 0xFFFFFFFF, word >> 32)
        ]
        assert words[8 * block : 8 * block + 8].tolist() == expected


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_noise_is_the_start_of_one_stream(vocab_size: int, rng: random.Random) -> None:
    seed, position = rng.randrange(-(2**63), 2**64), rng.randrange(2**20)
    words = noise_words(seed, position, vocab_size)
    assert words.shape == (vocab_size,)
    raw = np.random.Philox(key=np.array([seed & MASK, position], np.uint64)).random_raw(vocab_size // 2 + 1)
    halves = np.stack([raw & 0xFFFFFFFF, raw >> np.uint64(32)], 1).flatten()
    assert words.tolist() == halves[:vocab_size].tolist()


def test_each_seed_and_position_has_noise_of_its_own(rng: random.Random) -> None:
    seed = rng.randrange(2**63)
    keys = [(seed, 5), (seed + 1, 5), (seed, 6), (5, seed % 2**40), (seed + 2**63, 5)]
    assert len({noise_words(*key, 64).tobytes() for key in keys}) == len(keys)
    assert noise_words(-1, 5, 64).tolist() == noise_words(2**64 - 1, 5, 64).tolist()


def exact_gumbel(x: int) -> mpmath.mpf:
    with mpmath.workdps(60):
        return -mpmath.log(-mpmath.log((mpmath.mpf(x) + mpmath.mpf("0.5")) / 2**32))


def test_gumbel_noise_is_exact_to_1e_12_and_finite_everywhere(rng: random.Random) -> None:
    edges = [0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    near = [2**32 - 1 - 2**k for k in range(31)] + [2**k for k in range(32)]
    # e^-1: where the noise itself is near 0, and only its absolute error can be small
    zero = [int(2**32 / math.e) + k for k in range(-20, 20)]
    values = [*edges, *near, *zero, *(rng.randrange(2**32) for _ in range(2000))]
    noise = gumbel(np.array(values, np.uint32))
    assert noise.dtype == np.float64
    assert np.isfinite(noise).all()
    for x, got in zip(values, noise.tolist(), strict=True):
        exact = exact_gumbel(x)
        assert abs(got - exact) <= 1e-12 * max(1, abs(exact)), x
    order = np.argsort(np.array(values), kind="stable")
    assert (np.diff(noise[order]) >= 0).all()


@pytest.mark.parametrize("vocab_size", [49152, 262144])
def test_noise_has_the_law_of_gumbel_at_full_vocabulary(vocab_size: int) -> None:
    words = noise_words(12345, 678, vocab_size)
    noise = gumbel(words)
    assert np.isfinite(noise).all()
    for x, got in zip(words[:: vocab_size // 200].tolist(), noise[:: vocab_size // 200].tolist(), strict=True):
        exact = exact_gumbel(x)
        assert abs(got - exact) <= 1e-12 * max(1, abs(exact))
    # Kolmogorov-Smirnov against exp(-exp(-g)): p > 1e-4 at 2.23 / sqrt(n)
    cumulative = np.exp(-np.exp(-np.sort(noise)))
    steps = np.arange(vocab_size + 1) / vocab_size
    distance = max(np.abs(cumulative - steps[1:]).max(), np.abs(cumulative - steps[:-1]).max())
    assert distance < 2.23 / math.sqrt(vocab_size)


# Filters


def reference_filter(scaled_V: NDArray[np.float32], top_k: int, top_p: float, min_p: float) -> list[int]:
    """top-k with its ties, then the nucleus by a full stable sort, then min-p: the definitions, slowly, in fp64."""
    ids = sorted(range(len(scaled_V)), key=lambda v: (-float(scaled_V[v]), v))
    if 0 < top_k < len(ids):
        kth = scaled_V[ids[top_k - 1]]
        ids = [v for v in ids if scaled_V[v] >= kth]
    highest = float(scaled_V[ids[0]])
    weights = [math.exp(float(scaled_V[v]) - highest) for v in ids]
    if top_p < 1.0:
        total, running, count = math.fsum(weights), 0.0, 0
        while count < len(ids) and running / total < top_p:
            running += weights[count]
            count += 1
        ids, weights = ids[:count], weights[:count]
    if min_p > 0.0:
        ids = [v for v, weight in zip(ids, weights, strict=True) if weight >= min_p * weights[0] * (1 - 1e-6)]
    return sorted(ids)


def got_filter(scaled_V: NDArray[np.float32], top_k: int, top_p: float, min_p: float) -> list[int]:
    ids = surviving(scaled_V, top_k, top_p, min_p)
    if ids is None:
        return list(range(len(scaled_V)))
    assert (np.diff(ids) > 0).all(), "ascending"
    return [int(v) for v in ids]


def margin_is_wide(scaled_V: NDArray[np.float32], top_k: int, top_p: float) -> bool:
    """Whether no prefix sums to `top_p` within rounding: only then does fp32 have to agree with fp64."""
    values = np.sort(scaled_V[scaled_V >= np.sort(scaled_V)[::-1][(top_k or len(scaled_V)) - 1]].astype(np.float64))[
        ::-1
    ]
    sums = np.cumsum(np.exp(values - values[0]))
    return bool(np.abs(sums / sums[-1] - top_p).min() > 2e-6)


def rows(rng: random.Random, vocab_size: int) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(rng.randrange(2**32))
    normal = generator.standard_normal(vocab_size).astype(np.float32)
    masked = normal * 3
    masked[generator.random(vocab_size) < 0.9] = -np.inf
    masked[generator.integers(vocab_size)] = 1.0
    return {
        "normal": normal * 3,
        "flat": normal * np.float32(0.01),
        "ties": generator.integers(0, 4, vocab_size).astype(np.float32),
        "few values": np.float32(2) * generator.integers(-3, 3, vocab_size).astype(np.float32),
        "equal": np.zeros(vocab_size, np.float32),
        "peaked": np.where(np.arange(vocab_size) == vocab_size // 2, np.float32(50), normal),
        "masked": masked,
    }


@pytest.mark.parametrize("vocab_size", [1, 2, 9, 100, NUCLEUS_CANDIDATES, NUCLEUS_CANDIDATES + 1, 5000])
def test_filters_keep_what_a_full_stable_sort_keeps(vocab_size: int, rng: random.Random) -> None:
    compared = 0
    for kind, scaled_V in rows(rng, vocab_size).items():
        for _ in range(6):
            top_k = rng.choice([0, 1, 2, 5, 40, vocab_size, 2 * vocab_size, 1200])
            top_p = rng.choice([1.0, 0.5, 0.9, 0.95, 0.999, 1e-9, rng.random() or 0.5])
            min_p = rng.choice([0.0, 0.0, 0.01, 0.3, 1.0])
            if top_p < 1.0 and not margin_is_wide(scaled_V, min(top_k, vocab_size), top_p):
                continue
            compared += 1
            assert got_filter(scaled_V, top_k, top_p, min_p) == reference_filter(scaled_V, top_k, top_p, min_p), (
                kind,
                top_k,
                top_p,
                min_p,
            )
    assert compared > 10


@pytest.mark.parametrize("vocab_size", [49152, 262144])
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_filters_at_full_vocabulary(vocab_size: int, kind: str, rng: random.Random) -> None:
    scaled_V = rows(rng, vocab_size)[kind]
    for top_k, top_p, min_p in [(0, 0.9034, 0.0), (2000, 0.9517, 0.01)]:
        if margin_is_wide(scaled_V, top_k, top_p):
            assert got_filter(scaled_V, top_k, top_p, min_p) == reference_filter(scaled_V, top_k, top_p, min_p)


def test_ties_with_the_kth_are_kept() -> None:
    row = np.array([1, 3, 2, 2, 2, 0], np.float32)
    assert got_filter(row, 2, 1.0, 0.0) == [1, 2, 3, 4]
    assert got_filter(row, 1, 1.0, 0.0) == [1]
    assert got_filter(row, 5, 1.0, 0.0) == [0, 1, 2, 3, 4]
    assert got_filter(row, 0, 1.0, 0.0) == list(range(6))


def test_ties_on_the_edge_of_the_nucleus_go_to_the_lowest_ids() -> None:
    assert got_filter(np.zeros(10, np.float32), 0, 0.45, 0.0) == [0, 1, 2, 3, 4]
    row = np.zeros(5000, np.float32)
    row[4999] = 7.0
    total = math.exp(7) + 4999
    assert got_filter(row, 0, (math.exp(7) + 2.5) / total, 0.0) == [0, 1, 2, 4999]


@pytest.mark.parametrize("count", [NUCLEUS_CANDIDATES - 1, NUCLEUS_CANDIDATES, NUCLEUS_CANDIDATES + 1, 3000])
def test_a_nucleus_larger_than_the_candidates_is_whole(count: int) -> None:
    row = np.full(4000, -5.0, np.float32)
    row[4000 - count :] = 5.0
    share = 1 / (count + (4000 - count) * math.exp(-10))
    assert got_filter(row, 0, (count - 0.5) * share, 0.0) == list(range(4000 - count, 4000))
    assert got_filter(row, 0, (count - 1.5) * share, 0.0) == list(range(4000 - count, 3999))


@pytest.mark.parametrize("vocab_size", [1000, 5000, 49152, 262144])
@pytest.mark.parametrize("top_p", [1 - 2**-53, 1 - 1e-12, 1 - 1e-9])
def test_a_nucleus_of_all_but_nothing_keeps_everything_that_counts(
    vocab_size: int, top_p: float, rng: random.Random
) -> None:
    """Sums that rounding keeps below top_p must not cost tokens."""
    for kind in ("flat", "equal"):
        kept = got_filter(rows(rng, vocab_size)[kind], 0, top_p, 0.0)
        assert len(kept) >= vocab_size * (1 - 1e-5), kind


def test_the_order_is_top_k_then_top_p_then_min_p() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # Of the two that top-k keeps, the first has 4/7 = 0.571 of the mass: only alone does it reach 0.55.
    assert got_filter(row, 2, 0.55, 0.0) == [0]
    assert got_filter(row, 0, 0.55, 0.0) == [0, 1]
    # min-p is a share of the largest, whatever the nucleus leaves.
    assert got_filter(row, 0, 0.85, 0.6) == [0, 1]
    assert got_filter(row, 0, 1.0, 0.24) == [0, 1, 2, 3]
    assert got_filter(row, 0, 1.0, 1.0) == [0]


@pytest.mark.parametrize("filters", [(1, 1.0, 0.0), (0, 1e-9, 0.0), (0, 1.0, 1.0), (1, 1e-9, 1.0)])
def test_something_always_survives(filters: tuple[int, float, float], rng: random.Random) -> None:
    for row in rows(rng, 3000).values():
        assert int(row.argmax()) in got_filter(row, *filters)


# The draw


def drawn(row: NDArray[np.float32], temperature: float = 1.0, seed: int = 0, position: int = 0, top_k: int = 0) -> int:
    return best(
        *perturbed(row, temperature=temperature, top_k=top_k, top_p=1.0, min_p=0.0, seed=seed, position=position)
    )


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_without_temperature_the_first_of_the_highest_is_drawn(temperature: float) -> None:
    row = np.array([1, 5, 5, 2], np.float32)
    assert drawn(row, temperature) == 1
    assert row.tolist() == [1, 5, 5, 2]


def test_the_draw_is_the_argmax_of_scaled_score_plus_noise(rng: random.Random) -> None:
    for vocab_size in (2, 100, 49152):
        row = np.random.default_rng(rng.randrange(2**32)).standard_normal(vocab_size).astype(np.float32) * 3
        seed, position, temperature = rng.randrange(2**64), rng.randrange(10**5), rng.choice([0.3, 1.0, 2.0])
        scaled = (row / np.float32(temperature)).astype(np.float64)
        noise = gumbel(noise_words(seed, position, vocab_size))
        assert drawn(row, temperature, seed, position) == int((scaled + noise).argmax())
        kept = got_filter(row / np.float32(temperature), 5, 1.0, 0.0)
        assert drawn(row, temperature, seed, position, top_k=5) == max(kept, key=lambda v: scaled[v] + noise[v])


def test_what_is_forbidden_is_never_drawn(rng: random.Random) -> None:
    row = np.full(100, -np.inf, np.float32)
    row[[7, 70]] = -1e9, -1e9
    assert {drawn(row, seed=rng.randrange(2**64), position=p) for p in range(50)} == {7, 70}


# Penalties


def test_penalties_are_those_of_a_naive_loop(rng: random.Random) -> None:
    for _ in range(100):
        vocab_size = rng.randint(1, 50)
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 20))]
        output = [rng.randrange(vocab_size) for _ in range(rng.randint(0, 20))]
        row = np.array([rng.gauss(0, 4) for _ in range(vocab_size)], np.float32)
        row[rng.randrange(vocab_size)] = rng.choice([0.0, -np.inf, 1.0])
        repetition, presence, frequency = (
            rng.choice([1.0, 1.3, 0.7]),
            rng.choice([0.0, 0.5, -2.0]),
            rng.choice([0.0, 0.3]),
        )
        expected = []
        for token, value in enumerate(row.tolist()):
            if token in prompt or token in output:
                value = value / repetition if value > 0 else value * repetition
            if token in output:
                value -= presence
            expected.append(value - frequency * output.count(token))
        got = row.copy()
        seen = sorted({*prompt, *output})
        counts = np.array([output.count(v) for v in seen], np.int64)
        penalize(
            got,
            np.array(seen, np.int64),
            counts,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-5)
        untouched = [v for v in range(vocab_size) if v not in seen]
        assert got[untouched].tolist() == row[untouched].tolist()


# Log-probabilities


@pytest.mark.parametrize("vocab_size", [1, 8, 100, 49152])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_log_probabilities_are_those_of_torch(vocab_size: int, num_top: int, rng: random.Random) -> None:
    for kind in ("normal", "ties", "masked"):
        row = rows(rng, vocab_size)[kind]
        token = rng.randrange(vocab_size)
        expected = torch.log_softmax(torch.from_numpy(row).double(), 0)
        logprob, top = log_probabilities(row, token, num_top)
        assert logprob == pytest.approx(expected[token].item(), abs=1e-9)
        order = sorted(range(vocab_size), key=lambda v: (-float(row[v]), v))
        assert [v for v, _ in top] == order[:num_top]
        assert [p for _, p in top] == pytest.approx([expected[v].item() for v, _ in top], abs=1e-9)
