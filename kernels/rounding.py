"""Which draws and guesses rounding may change: what a comparison of two devices, or of fp32 noise with fp64, must not
hold against either. V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
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
    best = np.sort(_compared(scores_V, draws, row)[1])[-2:]
    return certain_edges(scores_V, draws, row) and (len(best) < 2 or best[1] - best[0] > blur(best[1]))


def certain_edges(scores_V: Tensor, draws: Draws, row: int) -> bool:
    """Whether top-p moved by EDGE keeps the same tokens."""
    kept = [_compared(scores_V, draws, row, moved)[0] for moved in (-EDGE, 0.0, EDGE)]
    ids = [None if one is None else one.tolist() for one in kept]
    return ids[0] == ids[1] == ids[2]


def swaps(found: Sequence[int], expected: Sequence[int], scores_V: Tensor, draws: Draws, row: int) -> int | None:
    """How many of the guesses `found` for `row`, best first, are others than those `expected`; None where rounding is
    no excuse: at a place the two are not on one side of the filters, or their values differ by more than `blur`."""
    if len(found) != len(expected) or len(set(found)) != len(found):
        return None
    ids, _ = _compared(scores_V, draws, row)
    inside = None if ids is None else set(ids.tolist())
    places = [(one, other) for one, other in zip(found, expected, strict=True) if one != other]
    if not places:
        return 0
    unfiltered = Draws(
        draws.temperature_L,
        torch.zeros_like(draws.top_k_L),
        torch.ones_like(draws.top_p_L),
        torch.zeros_like(draws.min_p_L),
        draws.seeds_L,
        draws.positions_L,
    )
    greedy = draws.temperature_L[row].item() < GREEDY_BELOW
    _, values_V = _compared(scores_V, unfiltered, row)
    for one, other in places:
        alike = inside is None or (one in inside) == (other in inside)
        if greedy or not alike or not abs(values_V[one] - values_V[other]) <= blur(float(values_V[other])):
            return None
    return len(places)


def _compared(
    scores_V: Tensor, draws: Draws, row: int, moved: float = 0.0
) -> tuple[NDArray[np.intp] | None, NDArray[np.float32] | NDArray[np.float64]]:
    """See `sample.perturbed`; with top-p `moved`, where it is on."""
    top_p = draws.top_p_L[row].item()
    return perturbed(
        scores_V.numpy(),
        temperature=draws.temperature_L[row].item(),
        top_k=int(draws.top_k_L[row]),
        top_p=top_p if top_p == 1.0 else top_p + moved,
        min_p=draws.min_p_L[row].item(),
        seed=int(draws.seeds_L[row]),
        position=int(draws.positions_L[row]),
    )
