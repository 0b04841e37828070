"""Words in order, of which some begin alike: those that begin in one way lie together. Knows nothing of JSON."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator


class Words:
    """Some runs of bytes, each once. Immutable; with one more it is another."""

    __slots__ = ("_sorted",)

    def __init__(self, words: Iterable[bytes] = ()) -> None:
        self._sorted = tuple(sorted(set(words)))

    def __len__(self) -> int:
        return len(self._sorted)

    def with_word(self, word: bytes) -> Words:
        """These and `word`."""
        place = bisect_left(self._sorted, word)
        if self._sorted[place : place + 1] == (word,):
            return self
        words = Words()
        words._sorted = (*self._sorted[:place], word, *self._sorted[place:])
        return words

    def any_begins(self, beginning: bytes) -> bool:
        """Whether one of them begins so."""
        place = bisect_left(self._sorted, beginning)
        return place < len(self._sorted) and self._sorted[place].startswith(beginning)

    def steps(self, beginning: bytes, longest: int) -> Iterator[bytes]:
        """What stands next in those that begin so: all that some of them go on with, of 1 to `longest` bytes, each
        once."""
        start, before = len(beginning), b""
        for place in range(bisect_left(self._sorted, beginning), len(self._sorted)):
            word = self._sorted[place]
            if not word.startswith(beginning):
                break
            rest = word[start : start + longest]
            for size in range(_common(rest, before) + 1, len(rest) + 1):
                yield rest[:size]
            before = rest


def _common(first: bytes, second: bytes) -> int:
    """How many bytes two words begin with in common."""
    for size, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return size
    return min(len(first), len(second))
