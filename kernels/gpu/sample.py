"""Penalties, biases and the draw in Triton: filters find their thresholds digit by digit instead of sorting the row.

L rows, V vocabulary, C chunks of a row, N entries of lists. A row goes through the same steps in any company, so its
draw does not depend on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.draws import NOT_NUMBERS, NOTHING_ALLOWED, Counted, Draws, Listed
from specdec.kernels.gpu.noise import gumbel
from specdec.kernels.gpu.order import from_ordered, ordered, packed, token_of, value_of
from specdec.kernels.gpu.tuning import Tuning
from specdec.kernels.sample import GREEDY_BELOW

PENALTY_TUNINGS = (Tuning(block=256, warps=4), Tuning(block=1024, warps=4))
ADD_TUNINGS = (Tuning(block=128, warps=2), Tuning(block=512, warps=4))
FILTER_TUNINGS = (Tuning(block=2048, warps=32), Tuning(block=512, warps=16))
DRAW_TUNINGS = (Tuning(block=1024, warps=4), Tuning(block=2048, warps=8))
CHOOSE_WARPS = 4

GREEDY = tl.constexpr(GREEDY_BELOW)
NUMBERLESS = tl.constexpr(NOT_NUMBERS)
FORBIDDEN = tl.constexpr(NOTHING_ALLOWED)
BAD = tl.constexpr(2**63 - 1)
LAST = tl.constexpr(2**31 - 1)
DIGIT = tl.constexpr(4)  # bits; 32 is a multiple
BINS = tl.constexpr(16)


def penalize_rows(
    scores_LV: Tensor,
    counted: Counted,
    repetition_L: Tensor,
    presence_L: Tensor,
    frequency_L: Tensor,
    tuning: Tuning = PENALTY_TUNINGS[0],
) -> None:
    """See `specdec.kernels.sample_rows.penalize_rows`."""
    if len(scores_LV):
        penalty_kernel[(len(scores_LV),)](
            *(scores_LV, counted.tokens_N, counted.counts_N, counted.starts),
            *(repetition_L, presence_L, frequency_L, scores_LV.stride(0)),
            BLOCK=tuning.block,
            **tuning.options,
        )


def add_rows(scores_LV: Tensor, listed: Listed, tuning: Tuning = ADD_TUNINGS[0]) -> None:
    """See `specdec.kernels.sample_rows.add_rows`."""
    if len(scores_LV):
        add_kernel[(len(scores_LV),)](
            *(scores_LV, listed.tokens_N, listed.values_N, listed.begins_L, listed.ends_L, scores_LV.stride(0)),
            BLOCK=tuning.block,
            **tuning.options,
        )


def draw_rows(
    scores_LV: Tensor,
    draws: Draws,
    log_totals_L: Tensor,
    filtering: Tuning = FILTER_TUNINGS[0],
    drawing: Tuning = DRAW_TUNINGS[0],
) -> Tensor:
    """See `specdec.kernels.sample_rows.draw_rows`. Nothing is read back: rows without filters leave theirs at once."""
    num_rows, vocab_size = scores_LV.shape
    num_chunks = triton.cdiv(vocab_size, drawing.block)
    tokens_L = scores_LV.new_empty(num_rows, dtype=torch.int64)
    best_LC = scores_LV.new_empty(num_rows, num_chunks, dtype=torch.int64)
    if num_rows:
        thresholds_L, last_L = thresholds(scores_LV, draws, filtering, drawing)
        draw_kernel[(num_rows, num_chunks)](
            *(best_LC, scores_LV, thresholds_L, last_L, draws.temperature_L, draws.seeds_L, draws.positions_L),
            *(scores_LV.stride(0), vocab_size),
            BLOCK=drawing.block,
            **drawing.options,
        )
        choose_kernel[(num_rows,)](
            *(tokens_L, best_LC, log_totals_L, num_chunks),
            CHUNKS=triton.next_power_of_2(num_chunks),
            num_warps=CHOOSE_WARPS,
            enable_fp_fusion=False,
        )
    return tokens_L


def thresholds(scores_LV: Tensor, draws: Draws, filtering: Tuning, scaling: Tuning) -> tuple[Tensor, Tensor]:
    """What the filters of each row keep: of its scaled scores those above a threshold (fp32 `[L]`), and those equal to
    it up to a last token (int32 `[L]`). There is at least one row."""
    num_rows, vocab_size = scores_LV.shape
    thresholds_L, last_L = scores_LV.new_empty(num_rows), scores_LV.new_empty(num_rows, dtype=torch.int32)
    floors_L = draws.min_p_L.double().log().float()
    # The kernels' own sums are no better than fp32.
    filters = (draws.temperature_L, draws.top_k_L, draws.top_p_L.float(), floors_L)
    scaled_LV = torch.empty_like(scores_LV, memory_format=torch.contiguous_format)
    scale_kernel[(num_rows, triton.cdiv(vocab_size, scaling.block))](
        *(scaled_LV, scores_LV, *filters, scores_LV.stride(0), vocab_size), BLOCK=scaling.block, **scaling.options
    )
    filter_kernel[(num_rows,)](
        *(thresholds_L, last_L, scaled_LV, *filters, vocab_size), BLOCK=filtering.block, **filtering.options
    )
    return thresholds_L, last_L


@triton.jit
def penalty_kernel(
    scores_LV, tokens_N, counts_N, starts, repetition_L, presence_L, frequency_L, scores_stride, BLOCK: tl.constexpr
):
    """The list of one row. Each token stands in it once, so no two lanes meet."""
    row = tl.program_id(0).to(tl.int64)
    repetition, presence = tl.load(repetition_L + row), tl.load(presence_L + row)
    frequency = tl.load(frequency_L + row)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    for begin in range(first, end, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        inside = entry < end
        token = tl.load(tokens_N + entry, mask=inside, other=0)
        times = tl.load(counts_N + entry, mask=inside, other=0).to(tl.float32)
        place = scores_LV + row * scores_stride + token
        score = tl.load(place, mask=inside, other=0.0)
        score = tl.where(score > 0, tl.div_rn(score, repetition + tl.zeros_like(score)), score * repetition)
        score -= tl.where(times > 0, presence, 0.0) + frequency * times
        tl.store(place, score, mask=inside)


@triton.jit
def add_kernel(scores_LV, tokens_N, values_N, begins_L, ends_L, scores_stride, BLOCK: tl.constexpr):
    """The list of one row. Each token stands in it once, so no two lanes meet."""
    row = tl.program_id(0).to(tl.int64)
    first, end = tl.load(begins_L + row), tl.load(ends_L + row)
    for begin in range(first, end, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        inside = entry < end
        token = tl.load(tokens_N + entry, mask=inside, other=0)
        value = tl.load(values_N + entry, mask=inside, other=0.0)
        place = scores_LV + row * scores_stride + token
        score = tl.load(place, mask=inside, other=0.0)
        tl.store(place, tl.where(value == float("-inf"), value, score + value), mask=inside)


@triton.jit
def scale_kernel(
    scaled_LV, scores_LV, temperature_L, top_k_L, top_p_L, floors_L, scores_stride, vocab_size, BLOCK: tl.constexpr
):
    """Scores over the temperature, in correct rounding, of the rows that have filters."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_L + row)
    if filtered(temperature, tl.load(top_k_L + row), tl.load(top_p_L + row), tl.load(floors_L + row), vocab_size):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab_size
        score = tl.load(scores_LV + row * scores_stride + token, mask=inside, other=0.0)
        x = tl.div_rn(score, temperature + tl.zeros_like(score))
        tl.store(scaled_LV + row * vocab_size + token, x, mask=inside)


@triton.jit
def filter_kernel(
    thresholds_L, last_L, scaled_LV, temperature_L, top_k_L, top_p_L, floors_L, vocab_size, BLOCK: tl.constexpr
):
    """What a row's filters keep: scaled scores above a threshold, and those equal to it up to a last token.

    `floors` are logarithms of min-p. The filters look at the row a digit of the ordered integers at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    scaled_V = scaled_LV + row * vocab_size
    top_k, top_p, floor = tl.load(top_k_L + row), tl.load(top_p_L + row), tl.load(floors_L + row)
    threshold = ordered(tl.full((), float("-inf"), tl.float32))
    last = tl.full((), LAST, tl.int32)
    if filtered(tl.load(temperature_L + row), top_k, top_p, floor, vocab_size):
        highest = tl.full((), float("-inf"), tl.float32)
        for first in range(0, vocab_size, BLOCK):
            highest = tl.maximum(highest, tl.max(part(scaled_V, first, vocab_size, BLOCK), 0))
        if (highest > float("-inf")) & (highest < float("inf")):
            if (top_k > 0) & (top_k < vocab_size):
                threshold, _ = reach(scaled_V, vocab_size, highest, threshold, top_k.to(tl.float64), False, BLOCK)
            if top_p < 1.0:
                threshold, last = nucleus(scaled_V, vocab_size, highest, threshold, top_p, BLOCK)
            lowest = ordered(highest + floor)
            last = tl.where(lowest > threshold, LAST, last)
            threshold = tl.maximum(lowest, threshold)
    tl.store(thresholds_L + row, from_ordered(threshold))
    tl.store(last_L + row, last)


@triton.jit
def filtered(temperature, top_k, top_p, floor, vocab_size):
    """Whether a row has filters, and noise to choose by."""
    return (temperature >= GREEDY) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (floor > float("-inf")))


@triton.jit
def part(scaled_V, first, vocab_size, BLOCK: tl.constexpr):
    """A block of scaled scores; minus infinity past the vocabulary."""
    token = first + tl.arange(0, BLOCK)
    return tl.load(scaled_V + token, mask=token < vocab_size, other=float("-inf"))


@triton.jit
def nucleus(scaled_V, vocab_size, highest, kept, top_p, BLOCK: tl.constexpr):
    """The threshold and the last token of the shortest prefix, in falling order of scores and rising tokens, whose sum
    reaches `top_p` of what is not below the ordered integer `kept`."""
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, vocab_size, BLOCK):
        x = part(scaled_V, first, vocab_size, BLOCK)
        total += tl.sum(tl.where(ordered(x) >= kept, tl.exp(x - highest), 0.0), 0).to(tl.float64)
    target = total * top_p.to(tl.float64)
    threshold, above = reach(scaled_V, vocab_size, highest, kept, target, True, BLOCK)
    # Of equals at the edge, as many as reach the target, the lowest tokens first.
    each = tl.exp(from_ordered(threshold) - highest).to(tl.float64)
    seen = tl.full((), 0, tl.int32)
    last = tl.full((), LAST, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        equal = ((ordered(part(scaled_V, first, vocab_size, BLOCK)) == threshold) & (token < vocab_size)).to(tl.int32)
        sums = above + (seen + tl.cumsum(equal, 0)).to(tl.float64) * each
        last = tl.minimum(last, tl.min(tl.where((equal != 0) & (sums >= target), token, LAST), 0))
        seen += tl.sum(equal, 0)
    return threshold, last


@triton.jit
def reach(scaled_V, vocab_size, highest, kept, target, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest ordered integer such that what is not below it, among what is not below `kept`, reaches `target`: by
    number, or by MASS, the sum of exp(scaled - highest). Also the weight of all that is above it.

    Digits from the top: the weights of all values of a digit come from one pass, so a row is read 32 / DIGIT times.
    """
    bins = tl.arange(0, BINS)
    prefix = tl.full((), 0, tl.uint32)
    above = tl.full((), 0.0, tl.float64)
    for step in range(32 // DIGIT):
        shift = (32 - DIGIT) - step * DIGIT
        sums = tl.zeros((BINS,), tl.float64)
        for first in range(0, vocab_size, BLOCK):
            x = part(scaled_V, first, vocab_size, BLOCK)
            key = ordered(x)
            inside = (key >= kept) & (first + tl.arange(0, BLOCK) < vocab_size)
            weight = tl.where(inside, tl.exp(x - highest) if MASS else 1.0, 0.0)
            # Where the digits found so far agree, what is left of the difference is the digit itself.
            digit = (key.to(tl.uint32, bitcast=True) ^ 0x80000000 ^ prefix) >> shift
            one_hot = tl.where(digit[:, None] == bins[None, :].to(tl.uint32), weight[:, None], 0.0)
            sums += tl.sum(one_hot, 0).to(tl.float64)
        from_top = tl.sum(tl.where(bins[None, :] >= bins[:, None], sums[None, :], 0.0), 1)
        found = tl.max(tl.where(above + from_top >= target, bins, 0), 0)
        above += tl.sum(tl.where(bins > found, sums, 0.0), 0)
        prefix = prefix | (found.to(tl.uint32) << shift)
    return (prefix ^ 0x80000000).to(tl.int32, bitcast=True), above


@triton.jit
def draw_kernel(
    best_LC,
    scores_LV,
    thresholds_L,
    last_L,
    temperature_L,
    seeds_L,
    positions_L,
    scores_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """The best of a chunk: score over temperature plus noise, among what the filters keep. No noise is made where
    nothing is kept."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores_LV + row * scores_stride + token, mask=token < vocab_size, other=float("-inf"))
    bad = tl.max(((score != score) | (score == float("inf"))).to(tl.int32), 0) != 0
    temperature = tl.load(temperature_L + row)
    greedy = temperature < GREEDY
    x = tl.div_rn(score, tl.where(greedy, 1.0, temperature) + tl.zeros_like(score))
    threshold, last = tl.load(thresholds_L + row), tl.load(last_L + row)
    keep = (x > threshold) | ((x == threshold) & (token <= last))
    x = tl.where(keep, x, float("-inf"))
    if (tl.max(x, 0) > float("-inf")) & (greedy == 0):
        x += gumbel(chunk * BLOCK, tl.load(seeds_L + row), tl.load(positions_L + row), BLOCK)
    best = tl.max(tl.where(token < vocab_size, packed(x, token), -BAD), 0)
    tl.store(best_LC + row * tl.num_programs(1) + chunk, tl.where(bad, BAD, best))


@triton.jit
def choose_kernel(tokens_L, best_LC, log_totals_L, num_chunks, CHUNKS: tl.constexpr):
    """The best of the chunks' best, or why there is none."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    best = tl.max(tl.load(best_LC + row * num_chunks + chunk, mask=chunk < num_chunks, other=-BAD), 0)
    total = tl.load(log_totals_L + row)
    token = tl.where(value_of(best) == float("-inf"), FORBIDDEN, token_of(best))
    tl.store(tokens_L + row, tl.where((best == BAD) | (total != total), NUMBERLESS, token))
