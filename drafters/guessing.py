"""The guesses behind a level of nodes, from a drafter's logits: row by row on a CPU, on a GPU all at once, with one
wait for the device. Knows no model and no tree.

L rows of logits, W vocabulary of the drafter, V that of its target, C guesses, G tempers.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.drafters.survival import Draws, Guesses
from specdec.errors import SpecdecError
from specdec.kernels.device import on_gpu
from specdec.kernels.guess import TEMPERS
from specdec.kernels.guess_rows import guess_rows
from specdec.kernels.sample_rows import log_totals
from specdec.mask import TokenMask
from specdec.scoring import RowsOf, draws, scored, told
from specdec.staging import Staging

Place = tuple[Draws, tuple[int, ...]]  # the draft of a text, and the tokens behind its last known one
Words = NDArray[np.int32] | None  # of a grammar's mask


class Guessing:
    """Makes guesses over a target's vocabulary of `vocab_size`. `targets` are the target's ids of a drafter with a
    vocabulary of its own, int64 `[W]`, or None."""

    def __init__(self, vocab_size: int, targets: Tensor | None) -> None:
        self.vocab_size = vocab_size
        self._targets = targets
        self._targets_W = None if targets is None else targets.cpu().numpy()
        self._staging: Staging | None = None

    def guesses(self, logits_LW: Tensor, places: Seq[Place], count: int) -> list[Guesses | None]:
        """Up to `count` guesses of what follows each place, from fp32 logits there: see `Draws.guess`. The places of a
        text stand side by side."""
        if not on_gpu(logits_LW):
            rows = zip(places, logits_LW.cpu().numpy(), strict=True)
            return [one.guess(logits_W, path, count, self._targets_W) for (one, path), logits_W in rows]
        words = [_words(one, path) for one, path in places]
        staging = self.staging(logits_LW.device)
        answer_LN = staging.fetch(self.enqueue(logits_LW, places, words, count, staging))
        return [
            None if failed else guessed(answer_N, one, path, row)
            for (one, path), (row, failed), answer_N in zip(places, words, answer_LN, strict=True)
        ]

    def staging(self, device: torch.device) -> Staging:
        """What brings a draft's arrays to where its logits are, and its answers back."""
        if self._staging is None:
            self._staging = Staging(device)
            self._targets = None if self._targets is None else self._targets.to(device)
        return self._staging

    def enqueue(
        self, logits_LW: Tensor, places: Seq[Place], words: Seq[tuple[Words, bool]], count: int, staging: Staging
    ) -> Tensor:
        """All guesses, int32 `[L, C (1 + G)]` on their device: the tokens, or why there are none, and the bits of their
        chances. Waits for nothing, and asks the device nothing."""
        mask = TokenMask(len(places), self.vocab_size)
        for row, (words_W, _) in enumerate(words):
            if words_W is not None:
                mask.put(row, words_W[: mask.num_words])
        tokens_LC, chances_LCG = self.at_once(logits_LW, staging.move(told(_by_text(places), mask)), count)
        return torch.cat([tokens_LC, chances_LCG.view(torch.int32).flatten(1)], 1)

    def at_once(self, logits_LW: Tensor, there: Mapping[str, Tensor], count: int) -> tuple[Tensor, Tensor]:
        """All guesses as `guess_rows` gives them, by what `told` says of the rows, now on their device. Waits for
        nothing, and asks the device nothing."""
        totals_L = log_totals(logits_LW)
        if self._targets is None:
            scores_LV = scored(logits_LW, there)
        else:
            scores_LV = logits_LW.new_full((len(logits_LW), self.vocab_size), -torch.inf)
            scores_LV = scored(scores_LV.index_copy_(1, self._targets, logits_LW), there, own=True)
        return guess_rows(scores_LV, draws(there), totals_L, count)


def guessed(answer_N: NDArray[np.int32], one: Draws, path: tuple[int, ...], words: Words) -> Guesses | None:
    """The guesses behind `path`, from tokens and the bits of chances; None where there are none."""
    width = len(answer_N) // (1 + len(TEMPERS))
    count = int((answer_N[:width] >= 0).sum())
    if count == 0:
        return None
    chances_CG = np.ascontiguousarray(answer_N[width:]).view(np.float32).reshape(width, len(TEMPERS))
    return one.guesses(answer_N[:count].tolist(), chances_CG[:count].T.astype(np.float64), path, words)


def _words(one: Draws, path: tuple[int, ...]) -> tuple[Words, bool]:
    """The words of the grammar's mask behind `path`, None where it has no say; and whether the grammar failed there."""
    try:
        return one.seq.constraint.row(path), False
    except SpecdecError:
        return None, True


def _by_text(places: Seq[Place]) -> list[RowsOf]:
    starts = [row for row in range(len(places)) if row == 0 or places[row - 1][0] is not places[row][0]]
    return [
        RowsOf(places[first][0].seq, first, [path for _, path in places[first:end]])
        for first, end in zip(starts, [*starts[1:], len(places)], strict=True)
    ]
