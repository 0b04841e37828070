"""Where the target's picks are made: on a CPU row by row, when the walk comes to one; on a GPU for all rows at once.

L logits rows, V vocabulary, N numbers a row, M likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.device import on_gpu
from specdec.kernels.draws import NOT_NUMBERS, NOTHING_ALLOWED
from specdec.kernels.sample_rows import draw_rows, log_totals, top_rows
from specdec.mask import TokenMask
from specdec.request import MAX_LOGPROBS
from specdec.sampling import Picks, no_logits, no_scores, nothing_allowed
from specdec.scoring import RowsOf, draws, scored, told
from specdec.sequence import Logprob, Span
from specdec.staging import Staging
from specdec.tree import DraftTree

WIDTHS = (0, 5, MAX_LOGPROBS)  # of lists of likeliest tokens: each is compiled anew


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
    asked = [RowsOf(span.seq, span.first_logit, _paths(span.tree)) for span in spans]
    there = staging.move(told(asked, mask))
    tokens_L = draw_rows(scored(logits_LV, there), draws(there), totals_L)
    answer = [_low_words(tokens_L[:, None]), totals_L[:, None].view(torch.int32)]
    wanted = [number for span in spans if (number := span.seq.request.sampling.logprobs) is not None]
    if wanted:
        chosen_L1 = logits_LV.gather(1, tokens_L.clamp(min=0)[:, None]) - totals_L[:, None]
        width = next(width for width in WIDTHS if width >= max(wanted))
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


def _paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The draft tokens that lead to each node, its own included."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths
