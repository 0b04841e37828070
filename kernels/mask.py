"""The bitmask of allowed tokens, applied to rows of scores. It knows no grammar.

L rows, V vocabulary, W words of 32 bits: bit v & 31 of word v >> 5 stands for token v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.device import on_gpu


def mask_rows(scores_LV: Tensor, words_LW: Tensor, masked_L: Tensor) -> None:
    """Set the scores of forbidden tokens to minus infinity, in place, in the rows where `masked_L` (bool) is set.

    `scores_LV` is fp32 with contiguous rows, `words_LW` int32. A row that is not masked is left alone, whatever its
    words hold, and so are bits past the vocabulary. Raises ValueError where the words are too few for V.
    """
    if words_LW.shape[1] * 32 < scores_LV.shape[1]:
        raise ValueError(f"{words_LW.shape[1]} words of 32 bits cannot mask a vocabulary of {scores_LV.shape[1]}")
    if on_gpu(scores_LV):
        from specdec.kernels.gpu import mask

        mask.mask_rows(scores_LV, words_LW, masked_L)
        return
    token_V = torch.arange(scores_LV.shape[1], device=scores_LV.device)
    allowed_LV = (words_LW[:, token_V >> 5] >> (token_V & 31).int()) & 1
    scores_LV.masked_fill_((allowed_LV == 0) & masked_L[:, None], -torch.inf)
