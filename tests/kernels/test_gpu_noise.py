"""Triton's noise in the interpreter: NumPy's integers to the last bit, and logarithms that never overflow."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

import triton.language as tl

from specdec.kernels import sample_rows
from specdec.kernels.gpu import noise
from specdec.kernels.gpu.tuning import Tuning
from specdec.kernels.sample import gumbel, noise_words
from tests.kernels.cover import pairwise

SIGNED = 2**64
CASES = pairwise(
    {
        "seed": [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1],
        "position": [0, 1, 131071, 2**40],
        "vocab_size": [1, 7, 8, 9, 33, 1000, 2049],
        "tuning": noise.TUNINGS,
    }
)


@triton.jit
def integers_kernel(words, seed, position, BLOCK: tl.constexpr):
    """The four words of the first blocks, end to end."""
    block = tl.arange(0, BLOCK)
    word_0, word_1, word_2, word_3 = noise.philox(block, tl.load(seed), tl.load(position))
    tl.store(words + 4 * block, word_0.to(tl.int64, bitcast=True))
    tl.store(words + 4 * block + 1, word_1.to(tl.int64, bitcast=True))
    tl.store(words + 4 * block + 2, word_2.to(tl.int64, bitcast=True))
    tl.store(words + 4 * block + 3, word_3.to(tl.int64, bitcast=True))


def signed(seed: int) -> int:
    """The int64 with the bits of a seed."""
    return seed - SIGNED if seed >= 2**63 else seed


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 5, 2**40])
def test_integers_are_those_of_numpy(seed: int, position: int) -> None:
    words = torch.empty(4 * 64, dtype=torch.int64)
    integers_kernel[(1,)](words, torch.tensor([signed(seed)]), torch.tensor([position]), BLOCK=64)
    assert words.numpy().view("<u4").tolist() == noise_words(seed, position, 8 * 64).tolist()


@pytest.mark.parametrize("case", CASES)
def test_noise_is_that_of_the_reference_whatever_the_shape(case: dict[str, object]) -> None:
    seed, position, vocab_size, tuning = case["seed"], case["position"], case["vocab_size"], case["tuning"]
    assert isinstance(seed, int) and isinstance(position, int)
    assert isinstance(vocab_size, int) and isinstance(tuning, Tuning)
    rows = (torch.tensor([7, signed(seed)]), torch.tensor([3, position]))
    found_LV = noise.gumbel_rows(*rows, vocab_size, tuning)
    exact_LV = np.stack([gumbel(noise_words(7, 3, vocab_size)), gumbel(noise_words(seed, position, vocab_size))])
    assert np.abs(found_LV.numpy() - exact_LV).max() <= 1e-6
    assert torch.equal(sample_rows.gumbel_rows(*rows, vocab_size), torch.from_numpy(exact_LV).float())


def test_noise_of_edges_and_of_any_integer_is_finite_and_off_by_a_millionth_at_most() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    near_zero = int(2**32 / np.e)  # where the noise itself is near 0
    ranges = [
        np.arange(2**13),
        2**31 + np.arange(-(2**12), 2**12),
        near_zero + np.arange(-(2**12), 2**12),
        2**32 - 2**19 + np.arange(-(2**12), 2**12),  # where the tail begins
        2**32 - 1 - np.arange(2**16),
        2**32 - 1 - np.floor(2 ** rng.uniform(0, 32, 2**17)).astype(np.int64),
        rng.integers(0, 2**32, 2**18),
    ]
    integers = np.concatenate(ranges).astype(np.int64)
    assert integers.min() == 0
    assert integers.max() == 2**32 - 1
    x_N = torch.from_numpy(integers.astype(np.uint32).view(np.int32))
    found = noise.gumbel_of_integers(x_N, Tuning(block=65536, warps=4)).numpy()
    assert np.isfinite(found).all()
    assert np.abs(found - gumbel(integers.astype(np.uint32))).max() <= 1e-6


@pytest.mark.parametrize("tuning", noise.TUNINGS)
def test_noise_has_the_bits_it_has_elsewhere(tuning: Tuning) -> None:
    x_N = torch.from_numpy((np.arange(2**16, dtype=np.uint32) * np.uint32(65537)).view(np.int32))
    found = noise.gumbel_of_integers(x_N, tuning).numpy().astype("<f4").tobytes()
    assert hashlib.blake2b(found, digest_size=8).hexdigest() == noise.NOISE_DIGEST
