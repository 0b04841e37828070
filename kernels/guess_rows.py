"""A drafter's guesses from many rows of scores at once; one signature everywhere.

L rows, V vocabulary, C guesses, G tempers. On a CPU each row goes through `specdec.kernels.guess`, which is the
definition; on a GPU the kernels of `specdec.kernels.gpu` compute the same with noise in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.device import on_gpu
from specdec.kernels.draws import NOT_NUMBERS, NOTHING_ALLOWED, Draws
from specdec.kernels.guess import TEMPERS, guess_row
from specdec.kernels.sample import GREEDY_BELOW, gumbel, noise_words


def guess_rows(scores_LV: Tensor, draws: Draws, log_totals_L: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best guesses of each row: tokens int32 `[L, C]` and chances fp32 `[L, C, G]`, C = min(count, V); see
    `guess.guess_row`.

    `scores_LV` is fp32, `log_totals_L` what `log_totals` says of the raw logits. Where that is NaN, or the scores hold
    NaN or plus infinity, all tokens of the row are `NOT_NUMBERS`. Where fewer than C tokens may follow, those left are
    `NOTHING_ALLOWED`. Chances are 0 there.
    """
    if on_gpu(scores_LV):
        from specdec.kernels.gpu import guess

        return guess.guess_rows(scores_LV, draws, log_totals_L, count)
    num_rows, vocab_size = scores_LV.shape
    width = min(count, vocab_size)
    tokens_LC = torch.full((num_rows, width), NOTHING_ALLOWED, dtype=torch.int32)
    chances_LCG = torch.zeros(num_rows, width, len(TEMPERS))
    for row, scores_V in enumerate(scores_LV):
        highest = scores_V.max().item()  # NaN where any score is
        if not highest < torch.inf or log_totals_L[row].isnan():
            tokens_LC[row] = NOT_NUMBERS
        elif highest > -torch.inf:
            temperature, noise_V = draws.temperature_L[row].item(), None
            if temperature >= GREEDY_BELOW:
                noise_V = gumbel(noise_words(int(draws.seeds_L[row]), int(draws.positions_L[row]), vocab_size))
            tokens, chances_GN = guess_row(
                scores_V.numpy(),
                noise_V,
                temperature=temperature,
                top_k=int(draws.top_k_L[row]),
                top_p=draws.top_p_L[row].item(),
                min_p=draws.min_p_L[row].item(),
                count=count,
            )
            tokens_LC[row, : len(tokens)] = torch.from_numpy(tokens)
            chances_LCG[row, : len(tokens)] = torch.from_numpy(chances_GN.T)
    return tokens_LC, chances_LCG
