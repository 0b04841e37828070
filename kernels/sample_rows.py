"""Drawing for all rows of a batch at once: noise, penalties, biases, the draw, log-probabilities; one signature
everywhere.

L rows, V vocabulary, N entries of lists, M likeliest tokens. On a CPU each row goes through `specdec.kernels.sample`,
which is the definition; on a GPU the kernels of `specdec.kernels.gpu` compute the same with noise in fp32.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from specdec.kernels.device import on_gpu
from specdec.kernels.draws import NOT_NUMBERS, NOTHING_ALLOWED, Counted, Draws, Listed
from specdec.kernels.sample import best, gumbel, log_probabilities, noise_words, penalize, perturbed


def gumbel_rows(seeds_L: Tensor, positions_L: Tensor, vocab_size: int) -> Tensor:
    """The noise of each row's draw, fp32 `[L, vocab_size]`: `sample.gumbel` of `sample.noise_words`, to 1e-6."""
    if on_gpu(seeds_L):
        from specdec.kernels.gpu import noise

        return noise.gumbel_rows(seeds_L, positions_L, vocab_size)
    noise_LV = torch.empty(len(seeds_L), vocab_size)
    for row, (seed, position) in enumerate(zip(seeds_L.tolist(), positions_L.tolist(), strict=True)):
        noise_LV[row] = torch.from_numpy(gumbel(noise_words(seed, position, vocab_size)))
    return noise_LV


def penalize_rows(
    scores_LV: Tensor, counted: Counted, repetition_L: Tensor, presence_L: Tensor, frequency_L: Tensor
) -> None:
    """Apply each row's penalties (fp32) to the tokens of its list, in place; see `sample.penalize`."""
    if on_gpu(scores_LV):
        from specdec.kernels.gpu import sample

        sample.penalize_rows(scores_LV, counted, repetition_L, presence_L, frequency_L)
        return
    starts = counted.starts.tolist()
    for row, (first, end) in enumerate(pairwise(starts)):
        penalize(
            scores_LV[row].numpy(),
            counted.tokens_N[first:end].long().numpy(),
            counted.counts_N[first:end].long().numpy(),
            repetition=repetition_L[row].item(),
            presence=presence_L[row].item(),
            frequency=frequency_L[row].item(),
        )


def add_rows(scores_LV: Tensor, listed: Listed) -> None:
    """Add what is listed for each row to its fp32 scores, in place; minus infinity is put there instead."""
    if on_gpu(scores_LV):
        from specdec.kernels.gpu import sample

        sample.add_rows(scores_LV, listed)
        return
    for row, (first, end) in enumerate(zip(listed.begins_L.tolist(), listed.ends_L.tolist(), strict=True)):
        tokens, values = listed.tokens_N[first:end].long(), listed.values_N[first:end]
        scores_LV[row, tokens] = torch.where(values == -torch.inf, values, scores_LV[row, tokens] + values)


def draw_rows(scores_LV: Tensor, draws: Draws, log_totals_L: Tensor) -> Tensor:
    """The token that each row draws (docs/design.md, 3), int64 `[L]`.

    `scores_LV` is fp32, `log_totals_L` what `log_totals` says of the raw logits. `NOT_NUMBERS` stands where that is NaN
    or the scores hold NaN or plus infinity, `NOTHING_ALLOWED` where all scores are minus infinity.
    """
    if on_gpu(scores_LV):
        from specdec.kernels.gpu import sample

        return sample.draw_rows(scores_LV, draws, log_totals_L)
    tokens_L = torch.empty(len(scores_LV), dtype=torch.int64)
    for row, scores_V in enumerate(scores_LV):
        highest = scores_V.max().item()  # NaN where any score is
        if highest == -torch.inf:
            tokens_L[row] = NOTHING_ALLOWED
        if not highest < torch.inf or log_totals_L[row].isnan():
            tokens_L[row] = NOT_NUMBERS
        elif highest > -torch.inf:
            tokens_L[row] = best(
                *perturbed(
                    scores_V.numpy(),
                    temperature=draws.temperature_L[row].item(),
                    top_k=int(draws.top_k_L[row]),
                    top_p=draws.top_p_L[row].item(),
                    min_p=draws.min_p_L[row].item(),
                    seed=int(draws.seeds_L[row]),
                    position=int(draws.positions_L[row]),
                )
            )
    return tokens_L


def log_totals(logits_LV: Tensor) -> Tensor:
    """Log of the sum of exponentials of each row of fp32 logits, fp32 `[L]`. NaN where a row holds NaN or plus
    infinity, or nothing finite: its log-probabilities are no numbers, so nothing may be drawn from it."""
    if on_gpu(logits_LV):
        from specdec.kernels.gpu import logprobs

        return logprobs.log_totals(logits_LV)
    highest_L = logits_LV.amax(1)
    totals_L = logits_LV.double().logsumexp(1).float()
    return totals_L.masked_fill(~highest_L.isfinite(), torch.nan)


def top_rows(logits_LV: Tensor, log_totals_L: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """The `num_top` likeliest tokens of each row, ties by the lowest id: ids int64 `[L, M]` and log-probabilities fp32
    `[L, M]`, M = min(num_top, V). Where a row's total is NaN so are they, and its ids mean nothing."""
    if on_gpu(logits_LV):
        from specdec.kernels.gpu import logprobs

        return logprobs.top_rows(logits_LV, log_totals_L, num_top)
    width = min(num_top, logits_LV.shape[1])
    ids_LM = torch.zeros(len(logits_LV), width, dtype=torch.int64)
    values_LM = torch.full((len(logits_LV), width), torch.nan)
    for row, logits_V in enumerate(logits_LV):
        if width and not log_totals_L[row].isnan():
            _, top = log_probabilities(logits_V.numpy(), 0, width)
            ids_LM[row] = torch.tensor([token for token, _ in top])
            values_LM[row] = torch.tensor([value for _, value in top])
    return ids_LM, values_LM
