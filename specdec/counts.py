"""How often the tokens of a growing text were drawn: what penalties look at. Knows no request and no scores."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

ROOM = 256  # places that are there at first


class TokenCounts:
    """The tokens of a text, each once, in the order in which they came, and how often each was drawn: 0 for what stands
    in the prompt only. A text only grows, and what is new costs time in its length alone."""

    __slots__ = ("_counts_N", "_ids_N", "_places")

    def __init__(self, prompt: Seq[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        room = max(ROOM, 2 * len(self._places))
        self._ids_N = np.zeros(room, np.int32)
        self._counts_N = np.zeros(room, np.int32)
        self._ids_N[: len(self._places)] = list(self._places)

    def draw(self, token: int) -> None:
        """One more token was drawn."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids_N):
            self._ids_N = np.concatenate([self._ids_N, np.zeros_like(self._ids_N)])
            self._counts_N = np.concatenate([self._counts_N, np.zeros_like(self._counts_N)])
        self._ids_N[place] = token
        self._counts_N[place] += 1

    def after(self, path: Seq[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Tokens and counts if the tokens of `path` were drawn next. Do not change them."""
        length = len(self._places)
        ids_N, counts_N = self._ids_N[:length], self._counts_N[:length]
        if not path:
            return ids_N, counts_N
        counts_N = counts_N.copy()
        more: dict[int, int] = {}
        for token in path:
            place = self._places.get(token)
            if place is None:
                more[token] = more.get(token, 0) + 1
            else:
                counts_N[place] += 1
        if not more:
            return ids_N, counts_N
        return (
            np.concatenate([ids_N, np.array(list(more), np.int32)]),
            np.concatenate([counts_N, np.array(list(more.values()), np.int32)]),
        )
