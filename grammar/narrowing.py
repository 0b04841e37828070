"""What a watcher of the JSON text takes away from the rows of a grammar. Only tokens that may complete something the
watcher looks at are tried, each on its own copy of the text. W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.grammar.json_text import JsonText, Place
from specdec.grammar.keys import Keys

MAX_QUOTES = 3  # of those that are told apart


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """The bytes of every token of the logits (empty for those that are no text), and, for n from 1 to `MAX_QUOTES`,
    those that hold n quotes or more."""

    spelled: tuple[bytes, ...]
    with_quotes_NW: NDArray[np.int32]

    @classmethod
    def of(cls, spelled: Iterable[bytes], num_words: int) -> TokenTable:
        """The table of a vocabulary whose rows have `num_words` words."""
        spelled = tuple(spelled)
        has_N = np.zeros((MAX_QUOTES, num_words * 32), np.bool_)
        for token, data in enumerate(spelled):
            if b'"' in data:
                has_N[: data.count(b'"'), token] = True
        return cls(spelled, np.packbits(has_N, axis=1, bitorder="little").view(np.int32))


class Narrowing:
    """Forbids what `watcher`, at the beginning of a text, forbids. Immutable; shared by all texts of a grammar."""

    __slots__ = ("_start", "_table")

    def __init__(self, table: TokenTable, watcher: Keys) -> None:
        self._table = table
        self._start = JsonText(watcher)

    def start(self) -> JsonText:
        """The empty text."""
        return self._start

    def after(self, text: JsonText, token: int) -> JsonText | None:
        """The text with a token behind it; None where the watcher forbids it."""
        return text.after(self._table.spelled[token])

    def reach(self, text: JsonText, tokens: Iterable[int]) -> int:
        """How many of `tokens` may follow, one after the other."""
        count = 0
        for token in tokens:
            following = self.after(text, token)
            if following is None:
                break
            text = following
            count += 1
        return count

    def narrow(self, words_W: NDArray[np.int32], text: JsonText) -> None:
        """Clear the bits of `words_W`, a row of the grammar after `text`, that the watcher forbids."""
        candidates_W = words_W & self._table.with_quotes_NW[_quotes_to_a_key(text) - 1]
        if not candidates_W.any():
            return
        bits = np.unpackbits(candidates_W.view(np.uint8), bitorder="little")
        unsigned_W = words_W.view(np.uint32)
        for token in np.flatnonzero(bits).tolist():
            if text.after(self._table.spelled[token]) is None:
                unsigned_W[token >> 5] &= 0xFFFFFFFF ^ 1 << (token & 31)


def _quotes_to_a_key(text: JsonText) -> int:
    """With how many quotes a token may complete a key that is there already."""
    if text.place is Place.KEY:
        assert isinstance(text.watcher, Keys)
        beginning = text.so_far()
        return 1 if any(key.startswith(beginning) for key in text.watcher.seen) else 3
    return 3 if text.place is Place.STRING else 2
