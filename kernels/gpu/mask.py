"""The bitmask of allowed tokens in Triton. L rows, V vocabulary, W words."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gpu.tuning import Tuning

TUNINGS = (Tuning(block=2048, warps=4), Tuning(block=8192, warps=8))


def mask_rows(scores_LV: Tensor, words_LW: Tensor, masked_L: Tensor, tuning: Tuning = TUNINGS[0]) -> None:
    """See `specdec.kernels.mask.mask_rows`. Rows that are not masked are neither read nor written."""
    num_rows, vocab_size = scores_LV.shape
    if num_rows:
        mask_kernel[(num_rows, triton.cdiv(vocab_size, tuning.block))](
            *(scores_LV, words_LW, masked_L),
            *(scores_LV.stride(0), words_LW.stride(0), vocab_size),
            BLOCK=tuning.block,
            **tuning.options,
        )


@triton.jit
def mask_kernel(scores_LV, words_LW, masked_L, scores_stride, words_stride, vocab_size, BLOCK: tl.constexpr):
    """One block of one row: only what is forbidden is written."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(masked_L + row) != 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab_size
        words = tl.load(words_LW + row * words_stride + (token >> 5), mask=inside, other=-1)
        forbidden = ((words >> (token & 31)) & 1) == 0
        tl.store(scores_LV + row * scores_stride + token, float("-inf"), mask=inside & forbidden)
