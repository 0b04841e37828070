"""How a random text comes to its end: of the tokens that may follow, those that close what is open, and else those that
go on as texts do that are known to be right. Knows the syntax of JSON and the text so far, and no schema.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.grammar.walk import has
from specdec.mask import bits

BLANKS = b" \t\r\n"
OPENS_ANYWAY = 0.25  # how often a bracket may open where something else could stand
LIKELY = 0.9  # how often a text goes on as known ones do, where nothing can be closed
MAX_CONTEXT = 4  # bytes
# What a token does by its first byte outside of strings, in the order in which it is preferred.
END, CLOSES, ENDS_A_PART, SCALAR, OPENS, BLANK = range(6)


class Closing:
    """Draws the tokens that end a text.

    Outside of strings the end is preferred to closing brackets, these to commas and colons (so a number ends where it
    can), then come strings, numbers and literals, opening brackets (one time in four), and blanks last. Inside a
    string the quote that ends it is preferred. Where none of these closes anything, nine tokens of ten go on as one
    of the texts `known` does after the same last bytes, zero to four of them: how many is drawn too.
    """

    def __init__(
        self,
        spelled: Sequence[bytes],
        ids: Mapping[bytes, int],
        end: int,
        known: Sequence[bytes] = (),
        start: Iterable[int] = (),
    ) -> None:
        """`spelled` are the bytes of every token and `ids` the tokens by their bytes; `end` is the one that ends a
        text, and `start` what it begins with."""
        self._spelled = spelled
        self._ids = ids
        self._longest = max(map(len, ids))
        self._known = known
        self._last = b""
        self._in_string = False
        self._escaped = False
        self._outside_V = np.array([_rank(data) for data in spelled], np.int8)
        self._outside_V[end] = END
        self._inside_V = np.array([CLOSES if b'"' in data else SCALAR for data in spelled], np.int8)
        for token in start:
            self._take(token)

    def draw(self, allowed_W: NDArray[np.int32], rng: random.Random) -> int:
        """One of the tokens of a row, which then is the last one of the text."""
        tokens_N = np.flatnonzero(bits(allowed_W, len(self._spelled)))
        ranks_N = (self._inside_V if self._in_string else self._outside_V)[tokens_N]
        if self._escaped:
            ranks_N = np.full_like(ranks_N, SCALAR)
        likely: list[int] = []
        if ranks_N.min() > ENDS_A_PART and rng.random() < LIKELY:
            likely = list(self._likely(allowed_W, rng.randint(0, MAX_CONTEXT)))
        if likely:
            token = rng.choice(likely)
        else:
            if rng.random() < OPENS_ANYWAY:
                ranks_N = np.where(ranks_N == OPENS, SCALAR, ranks_N)
            token = int(rng.choice(tokens_N[ranks_N == ranks_N.min()].tolist()))
        self._take(token)
        return token

    def _likely(self, allowed_W: NDArray[np.int32], most: int) -> Iterator[int]:
        """The longest allowed tokens with which known texts go on after the longest context that they share, of at
        most so many bytes."""
        for size in range(min(most, len(self._last)), -1, -1):
            context, found = self._last[len(self._last) - size :], False
            for text in self._known:
                place = text.find(context)
                while 0 <= place < len(text) - size:
                    token = self._next(text, place + size, allowed_W)
                    if token is not None:
                        found = True
                        yield token
                    place = text.find(context, place + 1)
            if found:
                return

    def _next(self, text: bytes, place: int, allowed_W: NDArray[np.int32]) -> int | None:
        """The longest allowed token that spells what stands at a place of a text."""
        for length in range(min(self._longest, len(text) - place), 0, -1):
            token = self._ids.get(text[place : place + length])
            if token is not None and has(allowed_W, token):
                return token
        return None

    def _take(self, token: int) -> None:
        self._last = (self._last + self._spelled[token])[-MAX_CONTEXT:]
        for byte in self._spelled[token]:
            if self._escaped:
                self._escaped = False
            elif byte == ord('"'):
                self._in_string = not self._in_string
            else:
                self._escaped = self._in_string and byte == ord("\\")


def _rank(spelled: bytes) -> int:
    """What a token does outside of strings."""
    first = spelled.lstrip(BLANKS)[:1]
    if not first:
        return BLANK
    if first in b"}]":
        return CLOSES
    if first in b",:":
        return ENDS_A_PART
    return OPENS if first in b"{[" else SCALAR
