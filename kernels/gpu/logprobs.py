"""Log-probabilities of rows in Triton: totals, and the likeliest tokens without a sort.

L rows, V vocabulary, C chunks of a row (a program each; a second kernel joins them, so a row has the same bits in any
company), M likeliest tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gpu.noise import log
from specdec.kernels.gpu.order import packed, token_of, value_of
from specdec.kernels.gpu.tuning import Tuning

TOTAL_TUNINGS = (Tuning(block=4096, warps=8), Tuning(block=8192, warps=8))
TOP_TUNINGS = (Tuning(block=2048, warps=8), Tuning(block=4096, warps=8))
JOIN_WARPS = 4
NEVER = tl.constexpr(-(2**63))


def log_totals(logits_LV: Tensor, tuning: Tuning = TOTAL_TUNINGS[0]) -> Tensor:
    """See `specdec.kernels.sample_rows.log_totals`."""
    num_rows, vocab_size = logits_LV.shape
    num_chunks = triton.cdiv(vocab_size, tuning.block)
    totals_L = logits_LV.new_empty(num_rows)
    highest_LC, sums_LC = logits_LV.new_empty(num_rows, num_chunks), logits_LV.new_empty(num_rows, num_chunks)
    if num_rows:
        chunk_total_kernel[(num_rows, num_chunks)](
            *(highest_LC, sums_LC, logits_LV, logits_LV.stride(0), vocab_size), BLOCK=tuning.block, **tuning.options
        )
        total_kernel[(num_rows,)](
            *(totals_L, highest_LC, sums_LC, num_chunks),
            CHUNKS=triton.next_power_of_2(num_chunks),
            num_warps=JOIN_WARPS,
            enable_fp_fusion=False,
        )
    return totals_L


def top_rows(
    logits_LV: Tensor, log_totals_L: Tensor, num_top: int, tuning: Tuning = TOP_TUNINGS[0]
) -> tuple[Tensor, Tensor]:
    """See `specdec.kernels.sample_rows.top_rows`."""
    num_rows, vocab_size = logits_LV.shape
    width = min(num_top, vocab_size)
    num_chunks = triton.cdiv(vocab_size, tuning.block)
    ids_LM = logits_LV.new_empty(num_rows, width, dtype=torch.int64)
    values_LM = logits_LV.new_empty(num_rows, width)
    best_LCM = logits_LV.new_empty(num_rows, num_chunks * width, dtype=torch.int64)
    if num_rows and width:
        chunk_top_kernel[(num_rows, num_chunks)](
            *(best_LCM, logits_LV, logits_LV.stride(0), vocab_size, width), BLOCK=tuning.block, **tuning.options
        )
        top_kernel[(num_rows,)](
            *(ids_LM, values_LM, best_LCM, log_totals_L, num_chunks * width, width),
            SIZE=triton.next_power_of_2(num_chunks * width),
            num_warps=JOIN_WARPS,
            enable_fp_fusion=False,
        )
    return ids_LM, values_LM


@triton.jit
def chunk_total_kernel(highest_LC, sums_LC, logits_LV, logits_stride, vocab_size, BLOCK: tl.constexpr):
    """The largest logit of a chunk and the sum of exponentials below it; NaN as a sum where one is NaN or infinite."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_LV + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
    bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    highest = tl.max(tl.where(x == x, x, float("-inf")), 0)
    safe = tl.where((highest == float("-inf")) | (bad != 0), 0.0, highest)
    total = tl.sum(tl.exp(tl.where((x == x) & (x < float("inf")), x - safe, float("-inf"))), 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(highest_LC + place, highest)
    tl.store(sums_LC + place, tl.where(bad != 0, float("nan"), total))


@triton.jit
def total_kernel(totals_L, highest_LC, sums_LC, num_chunks, CHUNKS: tl.constexpr):
    """Join the chunks of a row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    highest_C = tl.load(highest_LC + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    sums_C = tl.load(sums_LC + row * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
    bad = tl.max((sums_C != sums_C).to(tl.int32), 0) != 0
    highest = tl.max(highest_C, 0)
    bad = bad | (highest == float("-inf"))
    # exp(0) at the highest chunk keeps the sum at 1 or more, where there is a sum.
    total = tl.sum(sums_C * tl.exp(highest_C - tl.where(bad, 0.0, highest)), 0)
    tl.store(totals_L + row, tl.where(bad, float("nan"), highest + log(tl.where(bad, 1.0, total), 0.0)))


@triton.jit
def chunk_top_kernel(best_LCM, logits_LV, logits_stride, vocab_size, width, BLOCK: tl.constexpr):
    """The likeliest tokens of a chunk, one maximum after the other while it stays in registers."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_LV + row * logits_stride + token, mask=token < vocab_size, other=0.0)
    pack = tl.where(token < vocab_size, packed(x, token), NEVER)
    first = (row * tl.num_programs(1) + chunk) * width
    for rank in range(width):
        highest = tl.max(pack, 0)
        tl.store(best_LCM + first + rank, highest)
        pack = tl.where(pack == highest, NEVER, pack)


@triton.jit
def top_kernel(ids_LM, values_LM, best_LCM, totals_L, num_best, width, SIZE: tl.constexpr):
    """The likeliest among the chunks' likeliest."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    pack = tl.load(best_LCM + row * num_best + place, mask=place < num_best, other=NEVER)
    total = tl.load(totals_L + row)
    for rank in range(width):
        highest = tl.max(pack, 0)
        tl.store(ids_LM + row * width + rank, token_of(highest))
        tl.store(values_LM + row * width + rank, value_of(highest) - total)
        pack = tl.where(pack == highest, NEVER, pack)
