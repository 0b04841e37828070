"""Where the target's picks are made: on a CPU row by row, when the walk comes to one; on a GPU for all rows at once.

L logits rows, V vocabulary, N entries of lists, M likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.device import on_gpu
from specdec.kernels.draws import NOT_NUMBERS, NOTHING_ALLOWED, Counted, Draws, Listed
from specdec.kernels.mask import mask_rows
from specdec.kernels.sample import GREEDY_BELOW
from specdec.kernels.sample_rows import add_rows, draw_rows, log_totals, penalize_rows, top_rows
from specdec.mask import TokenMask
from specdec.request import MAX_LOGPROBS
from specdec.sampling import Picks, bans, is_penalized, no_logits, no_scores, nothing_allowed
from specdec.sequence import Logprob, Span
from specdec.staging import Staging

WIDTHS = (0, 5, MAX_LOGPROBS)  # of lists of likeliest tokens: each is compiled anew
# Of rows that nobody looks at: temperature, top-k, top-p and min-p; repetition, presence and frequency.
GREEDY = (0.0, 0.0, 1.0, 0.0)
UNPENALIZED = (1.0, 0.0, 0.0)


class Drawing:
    """Makes the picks of every step, with the same answers on every device (docs/kernels.md)."""

    def __init__(self) -> None:
        self._staging: Staging | None = None

    def picks(self, logits_LV: Tensor, mask: TokenMask, spans: Seq[Span]) -> Picks | Drawn:
        """The picks of a step whose forward may still be running: `logits_LV` is fp32, with a row for each of the
        mask's, and is not changed."""
        if any(len(span.tree) for span in spans) and on_gpu(logits_LV):
            return self.drawn(logits_LV, mask, spans)
        return Picks(logits_LV, mask)

    def drawn(self, logits_LV: Tensor, mask: TokenMask, spans: Seq[Span]) -> Drawn:
        """The picks of all rows, made where the logits are. Waits for the device once, at the end."""
        self._staging = self._staging or Staging(logits_LV.device)
        return Drawn(self._staging.fetch(enqueue(logits_LV, mask, spans, self._staging)), mask)


@torch.inference_mode()
def enqueue(logits_LV: Tensor, mask: TokenMask, spans: Seq[Span], staging: Staging) -> Tensor:
    """All that the host wants to know of the rows, int32 `[L, 2 or 3 + 2 M]` on their device: the token, or why there
    is none, and the bits of the log of the total; where anyone asks for log-probabilities the bits of the token's, the
    likeliest tokens and the bits of theirs. Waits for nothing, and asks the device nothing.
    """
    totals_L = log_totals(logits_LV)
    mask.fill()  # while the device is busy
    spans = [span for span in spans if len(span.tree)]
    told = _values(spans, len(logits_LV)) | _penalties(spans, len(logits_LV)) | _additions(spans, mask)
    claimed_L = mask.claimed_L
    if claimed_L.any():
        told |= {"claimed": claimed_L, "words": mask.words_LW}
    there = staging.move(told)
    scores_LV = logits_LV.clone() if {"counts", "values", "words"} & there.keys() else logits_LV
    if "counts" in there:
        counted = Counted(there["counted"], there["counts"], there["counted_starts"])
        penalize_rows(scores_LV, counted, there["repetition"], there["presence"], there["frequency"])
    if "values" in there:
        add_rows(scores_LV, Listed(there["listed"], there["values"], there["listed_starts"]))
    if "words" in there:
        mask_rows(scores_LV, there["words"], there["claimed"])
    draws = Draws(
        there["temperature"], there["top_k"], there["top_p"], there["min_p"], there["seeds"], there["positions"]
    )
    tokens_L = draw_rows(scores_LV, draws, totals_L)
    answer = [_low_words(tokens_L[:, None]), totals_L[:, None].view(torch.int32)]
    asked = [number for span in spans if (number := span.seq.request.sampling.logprobs) is not None]
    if asked:
        chosen_L1 = logits_LV.gather(1, tokens_L.clamp(min=0)[:, None]) - totals_L[:, None]
        width = next(width for width in WIDTHS if width >= max(asked))
        ids_LM, values_LM = top_rows(logits_LV, totals_L, width)
        answer += [chosen_L1.view(torch.int32), _low_words(ids_LM), values_LM.view(torch.int32)]
    return torch.cat(answer, 1)


class Drawn:
    """The picks of one step, all made."""

    def __init__(self, answer_LN: NDArray[np.int32], mask: TokenMask) -> None:
        self._tokens_L: list[int] = answer_LN[:, 0].tolist()
        self._numberless_L: list[bool] = np.isnan(_floats(answer_LN[:, 1])).tolist()
        width = max(0, (answer_LN.shape[1] - 3) // 2)
        self._ids_LM = answer_LN[:, 3 : 3 + width]
        self._chosen_L = _floats(answer_LN[:, 2:3])
        self._values_LM = _floats(answer_LN[:, 3 + width :])
        self._mask = mask

    def at(self, span: Span, node: int, path: Seq[int]) -> tuple[int, Logprob | None]:
        """See `Picks.at`."""
        row, position = span.first_logit + node, len(span.seq.tokens) + len(path)
        self._mask.words(row)  # raises what filling it raised
        token = self._tokens_L[row]
        if token == NOT_NUMBERS:
            raise no_logits(position) if self._numberless_L[row] else no_scores(position)
        if token == NOTHING_ALLOWED:
            raise nothing_allowed(position)
        num_top = span.seq.request.sampling.logprobs
        if num_top is None:
            return token, None
        top = zip(self._ids_LM[row, :num_top].tolist(), self._values_LM[row, :num_top].tolist(), strict=True)
        return token, Logprob(token, float(self._chosen_L[row, 0]), tuple(top))


def _low_words(numbers_LN: Tensor) -> Tensor:
    """The low halves of int64: tokens are far smaller, and so are the flags. The devices that we know are all
    little-endian."""
    return numbers_LN.view(torch.int32)[:, ::2]


def _floats(bits: NDArray[np.int32]) -> NDArray[np.float32]:
    return np.ascontiguousarray(bits).view(np.float32)


def _values(spans: Seq[Span], num_rows: int) -> dict[str, NDArray[Any]]:
    """How each row is drawn, under the names of `Draws`."""
    samplings = [span.seq.request.sampling for span in spans]
    values_4L = _spread(
        spans,
        num_rows,
        GREEDY,
        # Where fp32 would round up to where drawing begins, the request's own number decides.
        [(one.temperature * (one.temperature >= GREEDY_BELOW), one.top_k, one.top_p, one.min_p) for one in samplings],
    )
    lengths_S = [len(span.tree) for span in spans]
    keys_2L = np.zeros((2, num_rows), np.uint64)
    keys_2L[0, _rows(spans)] = np.repeat(np.array([span.seq.seed % 2**64 for span in spans], np.uint64), lengths_S)
    keys_2L[1, _rows(spans)] = [len(span.seq.tokens) + depth for span in spans for depth in span.tree.depths()]
    seeds_L, positions_L = keys_2L.view(np.int64)
    return {
        "temperature": values_4L[0].astype(np.float32),
        "top_k": values_4L[1].astype(np.int32),
        "top_p": values_4L[2],
        "min_p": values_4L[3],
        "seeds": seeds_L,
        "positions": positions_L,
    }


def _penalties(spans: Seq[Span], num_rows: int) -> dict[str, NDArray[Any]]:
    """Penalties, and lists of `Counted`, where any row is penalized."""
    spans = [span for span in spans if is_penalized(span.seq.request.sampling)]
    if not spans:
        return {}
    lists: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]] = {}
    for span in spans:
        counts = span.seq.counts()
        for node, path in enumerate(_paths(span)):
            lists[span.first_logit + node] = counts.after(path)
    samplings = [span.seq.request.sampling for span in spans]
    values_3L = _spread(
        spans,
        num_rows,
        UNPENALIZED,
        [(one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in samplings],
    ).astype(np.float32)
    tokens, counts_N = zip(*(lists[row] for row in sorted(lists)), strict=True)
    return {
        "counted": np.concatenate(tokens),
        "counts": np.concatenate(counts_N),
        "counted_starts": _starts(num_rows, {row: len(ids) for row, (ids, _) in lists.items()}),
        "repetition": values_3L[0],
        "presence": values_3L[1],
        "frequency": values_3L[2],
    }


def _additions(spans: Seq[Span], mask: TokenMask) -> dict[str, NDArray[Any]]:
    """Lists of `Listed`, where any row has a bias or a ban: a token that has both is banned."""
    lists: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}
    claimed_L = mask.claimed_L
    for span in spans:
        bias, stopping = span.seq.request.sampling.logit_bias, span.seq.request.stopping
        if not bias and not stopping.ignore_eos and span.seq.num_output >= stopping.min_tokens:
            continue
        biased = _pairs(bias)
        for node, depth in enumerate(span.tree.depths()):
            row = span.first_logit + node
            constrained = bool(claimed_L[row])
            banned = bans(span.seq, depth, constrained)
            if banned and constrained and mask.allows_only(row, banned):
                banned = []  # the grammar is complete
            if bias or banned:
                lists[row] = _pairs({**bias, **dict.fromkeys(banned, -np.inf)}) if banned else biased
    if not lists:
        return {}
    tokens, values = zip(*(lists[row] for row in sorted(lists)), strict=True)
    return {
        "listed": np.concatenate(tokens),
        "values": np.concatenate(values),
        "listed_starts": _starts(mask.num_rows, {row: len(ids) for row, (ids, _) in lists.items()}),
    }


def _pairs(added: Mapping[int, float]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    count = len(added)
    return np.fromiter(added.keys(), np.int32, count), np.fromiter(added.values(), np.float32, count)


def _rows(spans: Seq[Span]) -> list[int]:
    """The logits rows of all nodes, span by span."""
    return [row for span in spans for row in range(span.first_logit, span.first_logit + len(span.tree))]


def _spread(
    spans: Seq[Span], num_rows: int, neutral: tuple[float, ...], values: Seq[tuple[float, ...]]
) -> NDArray[np.float64]:
    """Each span's values at its rows, `neutral` ones at rows of nobody: `[len(neutral), L]`."""
    spread = np.repeat(np.array(neutral)[:, None], num_rows, 1)
    spread[:, _rows(spans)] = np.repeat(np.array(values), [len(span.tree) for span in spans], 0).T
    return spread


def _paths(span: Span) -> list[tuple[int, ...]]:
    """The draft tokens that lead to each node, its own included."""
    tree = span.tree
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths


def _starts(num_rows: int, lengths: Mapping[int, int]) -> NDArray[np.int32]:
    """Where the list of each row begins, and where the last ends."""
    lengths_L = np.zeros(num_rows + 1, np.int64)
    for row, length in lengths.items():
        lengths_L[row + 1] = length
    return lengths_L.cumsum().astype(np.int32)
