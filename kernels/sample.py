"""Drawing a token from one row of scores: filters, the Gumbel noise that is a pure function, and the argmax.

V vocabulary. The noise of (seed, position, token) is defined by NumPy's Philox4x64-10 stream, so any device can compute
the same integers; its logarithms are taken in fp64 here. Gumbel-max coupling: Daliri, Musco, Suresh, arXiv 2408.07978.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import torch
from numpy.typing import NDArray

GREEDY_BELOW = float(np.float32(1e-5))  # in fp32, so that kernels draw the same line
_ZEROS_4 = np.zeros(4, np.uint64)


class _Streams(threading.local):
    """One generator a thread; it carries nothing from one draw to the next."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(key=0)


_streams = _Streams()
NUCLEUS_CANDIDATES = 1024  # a nucleus larger than this is rare, and only then is the whole row sorted


def noise_words(seed: int, position: int, vocab_size: int) -> NDArray[np.uint32]:
    """The 32-bit integers `[V]` behind the noise of one place: Philox4x64-10 with key (seed mod 2**64, position).

    Token v takes half v & 1 (low first) of word (v >> 1) & 3 of block v >> 3, which is the stream's order on a
    little-endian machine. NumPy increments the counter before it draws, so block i has counter i + 1.
    """
    # A fresh Philox asks the system for entropy even where it is given a key; an old one in a new state does not.
    stream = _streams.philox
    stream.state = {
        "bit_generator": "Philox",
        "state": {"counter": _ZEROS_4, "key": np.array([seed % 2**64, position], np.uint64)},
        "buffer": _ZEROS_4,
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    words = stream.random_raw((vocab_size + 1) // 2)
    return np.asarray(words).astype("<u8", copy=False).view("<u4")[:vocab_size]


def gumbel(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Standard Gumbel noise, fp64, from uniform 32-bit integers x: -log(-log((x + 1/2) / 2**32)). Finite for all x.

    The inner logarithm goes through the complement: log1p keeps the tail near u = 1, where a naive log loses it.
    """
    complement = torch.from_numpy(words.astype(np.float64))
    complement.sub_(2**32 - 0.5).mul_(2.0**-32)  # -(1 - u), exact in fp64
    noise: NDArray[np.float64] = complement.log1p_().neg_().log_().neg_().numpy()
    return noise


def surviving(scaled_V: NDArray[np.float32], top_k: int, top_p: float, min_p: float) -> NDArray[np.intp] | None:
    """Ids, ascending, that pass top-k (0: off; ties with the k-th pass), then top-p, then min-p; None: all of V pass.

    top-p keeps the shortest prefix of the probabilities in falling order, ties by the lowest id, whose sum reaches
    `top_p`; both top-p and min-p look at softmax of what top-k kept. At least one id passes.
    """
    vocab_size = len(scaled_V)
    ids: NDArray[np.intp] | None = None
    if 0 < top_k < vocab_size:
        kth = torch.from_numpy(scaled_V).topk(top_k, sorted=False).values.min().item()
        ids = np.flatnonzero(scaled_V >= kth)
    if top_p < 1.0:
        ids = _nucleus(scaled_V, ids, top_p)
    if min_p > 0.0:
        values = scaled_V if ids is None else scaled_V[ids]
        passing = np.flatnonzero(values >= values.max() + np.float32(math.log(min_p)))
        ids = passing if ids is None else ids[passing]
    return ids


def _nucleus(scaled_V: NDArray[np.float32], ids: NDArray[np.intp] | None, top_p: float) -> NDArray[np.intp]:
    values = torch.from_numpy(scaled_V if ids is None else scaled_V[ids])
    log_total = values.logsumexp(0).item()
    count = min(NUCLEUS_CANDIDATES, len(values))
    best, places = values.topk(count)
    last = best[-1].item()
    kept = _prefix(best.numpy(), places.numpy(), log_total, top_p)
    if count < len(values) and (kept is None or float(values[int(kept[-1])]) <= last):
        # The nucleus reaches the edge of the candidates, where topk may have chosen among equals: sort everything.
        best, places = torch.sort(values, descending=True, stable=True)
        kept = _prefix(best.numpy(), places.numpy(), log_total, top_p)
    chosen = np.sort(places.numpy() if kept is None else kept)
    return chosen if ids is None else ids[chosen]


def _prefix(
    values: NDArray[np.float32], places: NDArray[np.int64], log_total: float, top_p: float
) -> NDArray[np.intp] | None:
    """Places of the shortest prefix, in falling order of value and rising place, that sums to `top_p`; None if all
    of them, by rounding, sum to less."""
    order = np.lexsort((places, -values))
    sums = np.cumsum(np.exp(values[order].astype(np.float64) - log_total))
    end = int(np.searchsorted(sums, top_p))
    return None if end >= len(order) else places[order[: end + 1]]


def perturbed(
    scores_V: NDArray[np.float32],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> tuple[NDArray[np.intp] | None, NDArray[np.float32] | NDArray[np.float64]]:
    """What the draw at `position` (its index in the sequence) compares, from a row of fp32 scores (docs/design.md, 3).

    The ids that survive the filters (None: all of V) and, for each, scaled score plus noise. Below a temperature of
    1e-5 there is no noise: the scores themselves. The row must not hold NaN.
    """
    if temperature < GREEDY_BELOW:
        return None, scores_V
    scaled_V = scores_V / np.float32(temperature)
    ids = surviving(scaled_V, top_k, top_p, min_p)
    words = noise_words(seed, position, len(scores_V))
    if ids is None:
        return None, gumbel(words) + scaled_V
    return ids, gumbel(words[ids]) + scaled_V[ids]


def best(ids: NDArray[np.intp] | None, values: NDArray[np.float32] | NDArray[np.float64]) -> int:
    """The token with the largest value, ties to the lowest id: the pick."""
    place = int(values.argmax())
    return place if ids is None else int(ids[place])


def penalize(
    scores_V: NDArray[np.float32],
    ids: NDArray[np.int32] | NDArray[np.int64],
    counts: NDArray[np.int32] | NDArray[np.int64],
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Apply penalties in place. `ids` are the tokens of prompt, output and path, each once; `counts` how often each
    stands in output and path (0: in the prompt only).

    Repetition divides positive scores and multiplies the others (Keskar et al., arXiv 1909.05858); presence and
    frequency subtract once, and once a time, as in the OpenAI API. A repetition near 0 may make infinities and NaN.
    """
    if repetition != 1.0:
        values = scores_V[ids]
        with np.errstate(all="ignore"):
            scores_V[ids] = np.where(values > 0, values / np.float32(repetition), values * np.float32(repetition))
    if presence != 0.0 or frequency != 0.0:
        times = counts.astype(np.float32)
        scores_V[ids] -= np.float32(presence) * (times > 0) + np.float32(frequency) * times


def log_probabilities(logits_V: NDArray[np.float32], token: int, num_top: int) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of `token` under softmax of a raw row, and the `num_top` likeliest, ties by the lowest id."""
    row = torch.from_numpy(logits_V)
    log_total = row.double().logsumexp(0).item()
    top: list[tuple[int, float]] = []
    if num_top:
        kth = row.topk(min(num_top, len(row))).values[-1].item()
        ids = np.flatnonzero(logits_V >= kth)
        ids = ids[np.lexsort((ids, -logits_V[ids]))][:num_top]
        top = [(int(v), float(logits_V[v]) - log_total) for v in ids]
    return float(logits_V[token]) - log_total, top
