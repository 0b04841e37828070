"""Guesses from a row of a drafter's logits: ordered with the very noise that the target will draw with, and how likely
each then is. Knows no model and no tree.

V vocabulary of the target. Gumbel-max coupling of a draft and its target: Daliri, Musco, Suresh, arXiv 2408.07978; of a
list of drafts: Rowan, Phan, Khisti, arXiv 2506.05632. Order follows docs/design.md, 3.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.errors import SpecdecError
from specdec.free import FREE_TEXT
from specdec.kernels.guess import TEMPERS, guess_row
from specdec.kernels.sample import GREEDY_BELOW, gumbel, noise_words
from specdec.mask import bits
from specdec.policy import where
from specdec.sampling import is_penalized, scores
from specdec.sequence import Sequence

PLAIN = 3  # the place of 1.0 in TEMPERS
MEMORY = 0.98  # what a draw weighs after the next one of its kind
MAX_DEPTH_BITS = 4  # depths of 8 and more are one kind

Kind = tuple[str, int]  # the place in a grammar, the bits of the depth


@dataclass(frozen=True, slots=True)
class Guesses:
    """The best guesses at one place, best first. `chances_GN` holds how likely each is under each of `TEMPERS`."""

    kind: Kind
    tokens: tuple[int, ...]
    chances_GN: NDArray[np.float64]
    survival: tuple[float, ...]

    def losses(self, token: int) -> NDArray[np.float64]:
        """Minus the log of the chance `[G]` that was given to `token`; all that was not guessed shares one."""
        if token in self.tokens:
            chances_G = self.chances_GN[:, self.tokens.index(token)]
        else:
            chances_G = 1.0 - self.chances_GN.sum(1)
        return -np.log(np.maximum(chances_G, 1e-6))


class Survival:
    """How far scores are believed: once the noise is known, the plain softmax of a drafter is a poor estimate of what
    the target will pick. The best of a few tempers is chosen by decayed log-loss, kind by kind."""

    def __init__(self) -> None:
        self._losses: dict[Kind, NDArray[np.float64]] = {}

    def temper(self, kind: Kind) -> int:
        """The place in `TEMPERS` of the one that has predicted best so far."""
        losses_G = self._losses.get(kind)
        return PLAIN if losses_G is None else int(losses_G.argmin())

    def learn(self, guesses: Guesses, token: int) -> None:
        """Take in what the target picked where these were the guesses."""
        losses_G = self._losses.setdefault(guesses.kind, np.zeros(len(TEMPERS)))
        losses_G *= MEMORY
        losses_G += guesses.losses(token)


class Draws:
    """The guesses of one draft for one sequence, over a target's vocabulary of `vocab_size`. Siblings share the noise
    of their position."""

    def __init__(self, seq: Sequence, survival: Survival, vocab_size: int) -> None:
        self.seq = seq
        self._survival = survival
        self._vocab_size = vocab_size
        self._noise: dict[int, NDArray[np.float64]] = {}

    @property
    def ignores_path(self) -> bool:
        """Whether equal logits mean equal guesses behind all paths of one length: nothing is penalized, and no grammar
        has a say."""
        return self.seq.constraint is FREE_TEXT and not is_penalized(self.seq.request.sampling)

    def guess(
        self, logits_V: NDArray[np.float32], path: tuple[int, ...], count: int, targets_V: NDArray[np.int64] | None
    ) -> Guesses | None:
        """Up to `count` guesses of what follows `path`, from the drafter's logits there.

        They go through the row's own pipeline: penalties on the path, bias, bans, the grammar's mask, temperature.
        Tokens that pass the row's own filters come first, then by score and noise: filters order, they never exclude,
        since the target's may keep other tokens. `targets_V` are the target's ids of a drafter with a vocabulary of its
        own; other ids are never guessed. None where nothing can follow or the logits are not numbers.
        """
        seq, sampling = self.seq, self.seq.request.sampling
        if targets_V is not None:
            own_V, logits_V = logits_V, np.full(self._vocab_size, -np.inf, np.float32)
            logits_V[targets_V] = own_V
        try:
            words = seq.constraint.row(path)
            scores_V = scores(logits_V, seq, path, None if words is None else bits(words, self._vocab_size))
        except SpecdecError:
            return None
        tokens, chances_GN = guess_row(
            scores_V,
            self._noise_at(len(path)) if sampling.temperature >= GREEDY_BELOW else None,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            count=count,
        )
        return self.guesses(tokens.tolist(), chances_GN, path, words)

    def guesses(
        self, tokens: Seq[int], chances_GN: NDArray[np.float64], path: tuple[int, ...], words: NDArray[np.int32] | None
    ) -> Guesses:
        """`tokens` as guesses of what follows `path`, where the grammar's mask has these `words`. They survive by the
        temper that has predicted best at such places."""
        kind = _kind(len(path), words)
        return Guesses(kind, tuple(tokens), chances_GN, tuple(chances_GN[self._survival.temper(kind)].tolist()))

    def temper(self, depth: int) -> int:
        """The place in `TEMPERS` by which guesses of free text survive behind paths of `depth` tokens."""
        return self._survival.temper(_kind(depth, None))

    def _noise_at(self, depth: int) -> NDArray[np.float64]:
        if depth not in self._noise:
            self._noise[depth] = gumbel(noise_words(self.seq.seed, len(self.seq.tokens) + depth, self._vocab_size))
        return self._noise[depth]


def _kind(depth: int, words: NDArray[np.int32] | None) -> Kind:
    return where(words), min(MAX_DEPTH_BITS, (depth + 1).bit_length())
