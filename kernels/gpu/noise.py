"""Gumbel noise as a pure function of seed, position and token, in Triton: the integers are NumPy's Philox4x64-10.

Only fp32 sums and products and integer operations are used, so with `enable_fp_fusion` off whatever rounds them to
nearest gives the same bits, the interpreter too. L rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gpu.tuning import Tuning

# Multipliers and key increments of Philox4x64 (Salmon, Moraes, Dror, Shaw, SC 2011, section 3.3).
MULTIPLIER_0 = tl.constexpr(0xD2E7470EE14C6C93)
MULTIPLIER_1 = tl.constexpr(0xCA5A826395121157)
KEY_STEP_0 = tl.constexpr(0x9E3779B97F4A7C15)
KEY_STEP_1 = tl.constexpr(0xBB67AE8584CAA73B)

# Of the noise of the integers 65537 k, k < 2**16, as little-endian bytes: BLAKE2b of 8 bytes.
NOISE_DIGEST = "e2b887c2ff3cf29e"

TUNINGS = (Tuning(block=1024, warps=4), Tuning(block=2048, warps=8), Tuning(block=512, warps=4))


def gumbel_rows(seeds_L: Tensor, positions_L: Tensor, vocab_size: int, tuning: Tuning = TUNINGS[0]) -> Tensor:
    """Standard Gumbel noise, fp32 `[L, vocab_size]`; see `specdec.kernels.sample_rows.gumbel_rows`."""
    num_rows = len(seeds_L)
    noise_LV = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=seeds_L.device)
    if num_rows:
        gumbel_kernel[(num_rows, triton.cdiv(vocab_size, tuning.block))](
            noise_LV, seeds_L, positions_L, vocab_size, BLOCK=tuning.block, **tuning.options
        )
    return noise_LV


def gumbel_of_integers(x_N: Tensor, tuning: Tuning = TUNINGS[0]) -> Tensor:
    """Noise, fp32 `[N]`, of 32-bit integers, given as the int32 with their bits: how the logarithms are checked."""
    noise_N = torch.empty(len(x_N), dtype=torch.float32, device=x_N.device)
    if len(x_N):
        gumbel_of_kernel[(triton.cdiv(len(x_N), tuning.block),)](
            noise_N, x_N, len(x_N), BLOCK=tuning.block, **tuning.options
        )
    return noise_N


@triton.jit
def gumbel_of_kernel(noise_N, x_N, count, BLOCK: tl.constexpr):
    """One block of integers."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_N + place, mask=place < count, other=0)
    tl.store(noise_N + place, gumbel_of(x.to(tl.uint32, bitcast=True)), mask=place < count)


@triton.jit
def gumbel_kernel(noise_LV, seeds_L, positions_L, vocab_size, BLOCK: tl.constexpr):
    """One block of one row of noise."""
    row, block = tl.program_id(0), tl.program_id(1)
    noise = gumbel(block * BLOCK, tl.load(seeds_L + row), tl.load(positions_L + row), BLOCK)
    token = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(noise_LV + row.to(tl.int64) * vocab_size + token, noise, mask=token < vocab_size)


@triton.jit
def gumbel(first, seed, position, BLOCK: tl.constexpr):
    """Noise of the tokens `first .. first + BLOCK - 1`; both multiples of 8."""
    word_0, word_1, word_2, word_3 = philox(first // 8 + tl.arange(0, BLOCK // 8), seed, position)
    # The last index runs fastest: [block, word >> 1, word & 1, half] is the order of the tokens.
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
    halves = tl.join((words & 0xFFFFFFFF).to(tl.uint32), (words >> 32).to(tl.uint32))
    return gumbel_of(tl.reshape(halves, (BLOCK,)))


@triton.jit
def philox(block, seed, position):
    """The four 64-bit words of each block of the stream with key (seed, position); block i has counter i + 1."""
    counter_0 = (block + 1).to(tl.uint64)
    counter_1 = tl.zeros_like(counter_0)
    counter_2 = counter_1
    counter_3 = counter_1
    key_0 = counter_1 + seed.to(tl.uint64)
    key_1 = counter_1 + position.to(tl.uint64)
    multiplier_0 = counter_1 + MULTIPLIER_0
    multiplier_1 = counter_1 + MULTIPLIER_1
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(multiplier_0, counter_0)
        high_1 = tl.umulhi(multiplier_1, counter_2)
        low_0 = multiplier_0 * counter_0
        low_1 = multiplier_1 * counter_2
        counter_0 = high_1 ^ counter_1 ^ key_0
        counter_1 = low_1
        counter_2 = high_0 ^ counter_3 ^ key_1
        counter_3 = low_0
        key_0 += KEY_STEP_0
        key_1 += KEY_STEP_1
    return counter_0, counter_1, counter_2, counter_3


@triton.jit
def gumbel_of(x):
    """-log(-log((x + 1/2) / 2^32)) of uint32 integers in fp32: finite, off by at most 1e-6.

    From 2^31 on the inner logarithm takes the complement c = 1 - u, which fp32 holds where u would round to 1. With w
    the rounded 1 - c, log(1 - c) = log(w) + log(1 + ((1 - w) - c) / w), and 1 - w is exact. Below c = 2^-13, where the
    noise is large, -log(1 - c) = c (1 + c/2 + ...) goes into the outer logarithm unrounded.
    """
    upper = x >= 2147483648
    complement = (4294967295 - x).to(tl.uint32)
    part = (tl.where(upper, complement, x).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    whole = tl.where(upper, 1.0 - part, part)
    rest = tl.where(upper, (1.0 - whole) - part, 0.0)
    exponential = -(log(whole, 0.0) + rest * (2.0 - whole))
    tail = upper & (part < 0.0001220703125)
    return -log(tl.where(tail, part, exponential), tl.where(tail, 0.5 * part, 0.0))


@triton.jit
def log(x, extra):
    """Natural logarithm of normal positive fp32 numbers, plus a small `extra`, in what every device rounds alike.

    x = m 2^k with m in [sqrt(1/2), sqrt(2)); log(m) = f - f^2/2 + f^3 P(f) with f = m - 1, and log(2) in two parts, the
    first of which times k is exact. P is fitted to 8e-10 of (log(1 + f) - f + f^2/2) / f.
    """
    bits = x.to(tl.int32, bitcast=True) - 0x3F3504F3
    exponent = (bits >> 23).to(tl.float32)
    f = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    p = 0.06917983293533325
    p = p * f - 0.11779666692018509
    p = p * f + 0.1186603531241417
    p = p * f - 0.12385798245668411
    p = p * f + 0.14219918847084045
    p = p * f - 0.16669197380542755
    p = p * f + 0.20002152025699615
    p = p * f - 0.24999986588954926
    p = p * f + 0.3333331048488617
    square = f * f
    small = p * f * square + (exponent * -2.12194440e-4 + extra) - 0.5 * square
    return exponent * 0.693359375 + (f + small)
