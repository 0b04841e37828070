"""A drafter's guesses from one row of scores: ordered with the noise that the target will draw with, and how likely
each then is.

V vocabulary, N guesses, G tempers. Gumbel-max coupling of a list of drafts and their target: Rowan, Phan, Khisti, arXiv
2506.05632.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.kernels.sample import surviving

Floats = NDArray[np.float32] | NDArray[np.float64]

# Each the square root of 2 times the one before: so the weights of all come from two exponentials by squaring.
TEMPERS = 2.0 ** ((np.arange(8) - 3) / 2)
OUTSIDE = 4.0  # nats that a token loses where the drafter's own filters would drop it
STRIPE = 64  # values of which the largest is looked at first


def guess_row(
    scores_V: NDArray[np.float32],
    noise_V: NDArray[np.float64] | None,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    count: int,
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Up to `count` tokens, best first, and their chances `[G, N]` under each of `TEMPERS`, from a row of fp32 scores.

    Tokens that pass the row's own filters come first, then by scaled score plus noise, ties by the lowest id. What is
    minus infinity is never guessed. A chance is a softmax over the whole row of score and noise, less `OUTSIDE` for
    what does not pass, at that temper; it never rises along the guesses. `noise_V` is None below a temperature of 1e-5.
    The row holds a number, and neither NaN nor plus infinity.
    """
    ids = None
    values_V: Floats = scores_V
    if noise_V is not None:
        scaled_V = scores_V / np.float32(temperature)
        ids = surviving(scaled_V, top_k, top_p, min_p)
        values_V = noise_V + scaled_V
    outside_V = None
    if ids is not None:
        outside_V = np.ones(len(values_V), np.bool_)
        outside_V[ids] = False
    if values_V.min() > -np.inf:
        return _ranked(values_V, outside_V, count)
    possible = np.flatnonzero(values_V > -np.inf)
    places, chances_GN = _ranked(values_V[possible], None if outside_V is None else outside_V[possible], count)
    return possible[places], chances_GN


def _ranked(
    values_N: Floats, outside_N: NDArray[np.bool_] | None, count: int
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Places of the best values, those not `outside` first, and their chances. `values_N` are overwritten where some
    are outside."""
    if outside_N is None:
        places = _top(values_N, count)
    else:
        inside, beyond = np.flatnonzero(~outside_N), np.flatnonzero(outside_N)
        places = inside[_top(values_N[inside], count)]
        places = np.concatenate([places, beyond[_top(values_N[beyond], count - len(places))]])
        values_N[beyond] -= OUTSIDE
    highest = values_N.max()
    distances_N = values_N[places].astype(np.float64) - highest
    weights_GN = np.exp(distances_N / TEMPERS[:, None])
    return places, np.minimum.accumulate(weights_GN / _totals(values_N, highest)[:, None], 1)


def _totals(values_N: Floats, highest: np.floating) -> NDArray[np.float64]:
    """Sums of exp((value - highest) / temper), `[G]`."""
    distances_N = torch.from_numpy(values_N).float() - float(highest)
    weights_2N = (distances_N / torch.from_numpy(TEMPERS[-2:, None]).float()).exp_()
    sums = []
    for _ in range(len(TEMPERS) // 2):
        sums.append(weights_2N.sum(1))
        weights_2N.square_()
    totals_G: NDArray[np.float64] = torch.cat(sums[::-1]).double().numpy()
    return totals_G


def _top(values_N: Floats, count: int) -> NDArray[np.intp]:
    """Places of the largest values, ties by the lowest place."""
    count = min(count, len(values_N))
    if count <= 0:
        return np.empty(0, np.intp)
    stripes = len(values_N) // STRIPE
    if stripes < count:
        sorted_N: NDArray[np.intp] = np.argsort(-values_N, kind="stable")
        return sorted_N[:count]
    # As many maxima of parts that share nothing are at least this, so all of the largest are.
    highest_S = values_N[: stripes * STRIPE].reshape(STRIPE, stripes).max(0)
    places = np.flatnonzero(values_N >= np.partition(highest_S, stripes - count)[stripes - count])
    order = np.argsort(-values_N[places], kind="stable")
    best: NDArray[np.intp] = places[order[:count]]
    return best
