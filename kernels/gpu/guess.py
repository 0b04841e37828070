"""A drafter's guesses in Triton: one pass over the scores gives the best tokens of each chunk of a row and its sums of
weights; a second kernel joins the chunks, so a row has the same bits in any company.

L rows, V vocabulary, C chunks of a row, M guesses, G tempers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels import guess as definition
from specdec.kernels.draws import NOT_NUMBERS, NOTHING_ALLOWED, Draws
from specdec.kernels.gpu.noise import gumbel
from specdec.kernels.gpu.order import from_ordered, ordered
from specdec.kernels.gpu.sample import DRAW_TUNINGS, FILTER_TUNINGS, thresholds
from specdec.kernels.gpu.tuning import Tuning
from specdec.kernels.sample import GREEDY_BELOW

TUNINGS = (Tuning(block=2048, warps=8), Tuning(block=1024, warps=4))
JOIN_WARPS = 4

GREEDY = tl.constexpr(GREEDY_BELOW)
NUMBERLESS = tl.constexpr(NOT_NUMBERS)
FORBIDDEN = tl.constexpr(NOTHING_ALLOWED)
OUTSIDE = tl.constexpr(definition.OUTSIDE)
TEMPERS = tl.constexpr(8)
MILDEST = tl.constexpr(1 / 4)  # one over the last temper; one over the last but one
MILDER = tl.constexpr(2**0.5 / 4)
NEVER = tl.constexpr(-(2**63))


def guess_rows(
    scores_LV: Tensor,
    draws: Draws,
    log_totals_L: Tensor,
    count: int,
    filtering: Tuning = FILTER_TUNINGS[0],
    guessing: Tuning = TUNINGS[0],
) -> tuple[Tensor, Tensor]:
    """See `specdec.kernels.guess_rows.guess_rows`. Nothing is read back."""
    num_rows, vocab_size = scores_LV.shape
    width, num_tempers = min(count, vocab_size), len(definition.TEMPERS)
    num_chunks = triton.cdiv(vocab_size, guessing.block)
    tokens_LM = scores_LV.new_empty(num_rows, width, dtype=torch.int32)
    chances_LMG = scores_LV.new_empty(num_rows, width, num_tempers)
    if num_rows and width:
        thresholds_L, last_L = thresholds(scores_LV, draws, filtering, DRAW_TUNINGS[0])
        best_LCM = scores_LV.new_empty(num_rows, num_chunks * width, dtype=torch.int64)
        peaks_LC = scores_LV.new_empty(num_rows, num_chunks)
        sums_LCG = scores_LV.new_empty(num_rows, num_chunks * num_tempers)
        chunk_guess_kernel[(num_rows, num_chunks)](
            *(best_LCM, peaks_LC, sums_LCG, scores_LV, thresholds_L, last_L),
            *(draws.temperature_L, draws.seeds_L, draws.positions_L, scores_LV.stride(0), vocab_size, width),
            BLOCK=guessing.block,
            **guessing.options,
        )
        guess_kernel[(num_rows,)](
            *(tokens_LM, chances_LMG, best_LCM, peaks_LC, sums_LCG, log_totals_L, num_chunks, width),
            SIZE=triton.next_power_of_2(num_chunks * width),
            CHUNKS=triton.next_power_of_2(num_chunks),
            num_warps=JOIN_WARPS,
            enable_fp_fusion=False,
        )
    return tokens_LM, chances_LMG


@triton.jit
def chunk_guess_kernel(
    best_LCM,
    peaks_LC,
    sums_LCG,
    scores_LV,
    thresholds_L,
    last_L,
    temperature_L,
    seeds_L,
    positions_L,
    scores_stride,
    vocab_size,
    width,
    BLOCK: tl.constexpr,
):
    """Of a chunk: the best guesses, the highest value less what those outside lose (NaN where a score is NaN or plus
    infinity), and the sums of weights against that."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores_LV + row * scores_stride + token, mask=token < vocab_size, other=float("-inf"))
    fine = (score == score) & (score < float("inf"))
    bad = tl.min(fine.to(tl.int32), 0) == 0
    temperature = tl.load(temperature_L + row)
    greedy = temperature < GREEDY
    x = tl.div_rn(tl.where(fine, score, float("-inf")), tl.where(greedy, 1.0, temperature) + tl.zeros_like(score))
    threshold, last = tl.load(thresholds_L + row), tl.load(last_L + row)
    inside = (x > threshold) | ((x == threshold) & (token <= last))
    if (tl.max(x, 0) > float("-inf")) & (greedy == 0):
        x += gumbel(chunk * BLOCK, tl.load(seeds_L + row), tl.load(positions_L + row), BLOCK)
    believed = tl.where(inside, x, x - OUTSIDE)
    peak = tl.max(believed, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(peaks_LC + place, tl.where(bad, float("nan"), peak))
    distance = believed - tl.where(peak == float("-inf"), 0.0, peak)
    mildest, milder = tl.exp(distance * MILDEST), tl.exp(distance * MILDER)
    for step in tl.static_range(TEMPERS // 2):
        sums = sums_LCG + place * TEMPERS + (TEMPERS - 2 - 2 * step)
        tl.store(sums, tl.sum(milder, 0))
        tl.store(sums + 1, tl.sum(mildest, 0))
        mildest, milder = mildest * mildest, milder * milder
    # 33 bits in the order of guesses, those inside above all others, then 31 in which the lowest token is the highest.
    key = ordered(x).to(tl.int64) + side(inside)
    pack = tl.where(x > float("-inf"), (key << 31) | (0x7FFFFFFF - token).to(tl.int64), NEVER)
    for rank in range(width):
        highest = tl.max(pack, 0)
        tl.store(best_LCM + place * width + rank, highest)
        pack = tl.where(pack == highest, NEVER, pack)


@triton.jit
def side(inside):
    """What puts the integer of a value into the upper or the lower half of 33 bits, int64."""
    return tl.where(inside, 1, -1).to(tl.int64) << 31


@triton.jit
def guess_kernel(
    tokens_LM,
    chances_LMG,
    best_LCM,
    peaks_LC,
    sums_LCG,
    log_totals_L,
    num_chunks,
    width,
    SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Join the chunks of a row: the best of their best, and the chances of these."""
    row = tl.program_id(0).to(tl.int64)
    place, chunk, temper = tl.arange(0, SIZE), tl.arange(0, CHUNKS), tl.arange(0, TEMPERS)
    peak_C = tl.load(peaks_LC + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    total = tl.load(log_totals_L + row)
    bad = (tl.max((peak_C != peak_C).to(tl.int32), 0) != 0) | (total != total)
    peak_C = tl.where(peak_C == peak_C, peak_C, float("-inf"))
    peak = tl.max(peak_C, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    per_nat_G = tl.exp2((3 - temper).to(tl.float32) * 0.5)
    sums_CG = tl.load(
        sums_LCG + (row * num_chunks + chunk)[:, None] * TEMPERS + temper[None, :],
        mask=(chunk < num_chunks)[:, None],
        other=0.0,
    )
    totals_G = tl.sum(sums_CG * tl.exp((peak_C - peak)[:, None] * per_nat_G[None, :]), 0)
    totals_G = tl.where(totals_G > 0.0, totals_G, 1.0)
    pack = tl.load(best_LCM + row * num_chunks * width + place, mask=place < num_chunks * width, other=NEVER)
    lowest_G = tl.full((TEMPERS,), 1.0, tl.float32)
    for rank in range(width):
        highest = tl.max(pack, 0)
        there = (highest != NEVER) & (bad == 0)
        inside = highest >= 0
        x = from_ordered(((highest >> 31) - side(inside)).to(tl.int32))
        believed = tl.where(there, tl.where(inside, x, x - OUTSIDE), float("-inf"))
        lowest_G = tl.minimum(lowest_G, tl.exp((believed - peak) * per_nat_G) / totals_G)
        token = tl.where(there, 0x7FFFFFFF - (highest & 0x7FFFFFFF), tl.where(bad, NUMBERLESS, FORBIDDEN))
        tl.store(tokens_LM + row * width + rank, token.to(tl.int32))
        tl.store(chances_LMG + (row * width + rank) * TEMPERS + temper, lowest_G)
        pack = tl.where(pack == highest, NEVER, pack)
