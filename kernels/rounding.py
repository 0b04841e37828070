"""Which draws rounding may change: what a comparison of two devices, or of fp32 noise with fp64, must not hold against
either. V vocabulary.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from specdec.kernels.draws import Draws
from specdec.kernels.sample import GREEDY_BELOW, perturbed

EDGE = 1e-5  # of top-p: sums of fp32 exponentials over a vocabulary are off by less


def blur(value: float) -> float:
    """What two sums of a score and its noise near `value` may be off against each other: the noise by 1e-6 each, the
    sums by half a unit in their last place each."""
    return 2e-6 + 2**-23 * abs(value)


def certain(scores_V: Tensor, draws: Draws, row: int) -> bool:
    """Whether rounding cannot change the draw of `row` from its fp32 scores, on the CPU: the best two differ by more
    than `blur`, and top-p moved by EDGE keeps the same tokens. A greedy draw is certain: there ties are ties."""
    if draws.temperature_L[row].item() < GREEDY_BELOW:
        return True
    kept = []
    for moved in (-EDGE, EDGE, 0.0):
        top_p = draws.top_p_L[row].item()
        ids, values = perturbed(
            scores_V.numpy(),
            temperature=draws.temperature_L[row].item(),
            top_k=int(draws.top_k_L[row]),
            top_p=top_p if top_p == 1.0 else top_p + moved,
            min_p=draws.min_p_L[row].item(),
            seed=int(draws.seeds_L[row]),
            position=int(draws.positions_L[row]),
        )
        kept.append(None if ids is None else ids.tolist())
    best = np.sort(values)[-2:]
    return kept[0] == kept[1] == kept[2] and (len(best) < 2 or best[1] - best[0] > blur(best[1]))
