"""The bitmask of allowed tokens: one bit a token, one row a logits row, only for rows that asked.

L logits rows, W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class TokenMask:
    """Rows of int32 words; bit v of a row (word v // 32, low bit first) is set where token v is allowed.

    A row that nobody claimed allows everything and costs nothing: the words exist only once a row is claimed. One that
    is to be filled later is filled when somebody looks at it: where only some rows are looked at, the others are free.
    """

    __slots__ = ("_claimed", "_fills", "_words_LW", "num_rows", "num_words", "vocab_size")

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.num_words = (vocab_size + 31) // 32
        self._words_LW: NDArray[np.int32] | None = None
        self._claimed: set[int] = set()
        self._fills: dict[int, Callable[[], NDArray[np.int32]]] = {}

    @property
    def words_LW(self) -> NDArray[np.int32]:
        """All rows, int32 `[num_rows, num_words]`, C-contiguous, for backends that fill by pointer. Those that are to
        be filled later are blank until they are."""
        if self._words_LW is None:
            self._words_LW = np.zeros((self.num_rows, self.num_words), np.int32)
        return self._words_LW

    def claim(self, first: int, count: int) -> NDArray[np.int32]:
        """The words `[count, num_words]` of rows from `first` on, all zero (nothing allowed), for the caller to set.
        Raises IndexError outside the mask."""
        if not 0 <= first <= first + count <= self.num_rows:
            raise IndexError(f"mask rows {first}..{first + count - 1} are outside 0..{self.num_rows - 1}")
        words_NW: NDArray[np.int32] = self.words_LW[first : first + count]
        words_NW[:] = 0
        for row in range(first, first + count):
            self._claimed.add(row)
            self._fills.pop(row, None)
        return words_NW

    def fill_later(self, row: int, fill: Callable[[], NDArray[np.int32]]) -> None:
        """Claim `row`; `fill` gives its words when they are wanted. Raises IndexError outside the mask."""
        self.claim(row, 1)
        self._fills[row] = fill

    def fill(self) -> None:
        """Fill all rows now, for those who look at them all at once. Raises what filling raises; then some are not."""
        for row in sorted(self._fills):
            self.words(row)

    def words(self, row: int) -> NDArray[np.int32] | None:
        """The words of `row`, or None where nobody claimed it (everything is allowed). Raises what filling raises."""
        if row in self._fills:
            self.words_LW[row] = self._fills[row]()
            del self._fills[row]
        return self.words_LW[row] if row in self._claimed else None

    def allowed(self, row: int) -> NDArray[np.bool_] | None:
        """Row as booleans `[vocab_size]`, or None where everything is allowed."""
        words = self.words(row)
        return None if words is None else bits(words, self.vocab_size)


def bits(words: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Booleans `[vocab_size]` of one row of words."""
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size).view(np.bool_)
