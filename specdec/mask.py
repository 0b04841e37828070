"""The bitmask of allowed tokens: one bit a token, one row a logits row, only for rows that asked.

L logits rows, W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from specdec.errors import SpecdecError


class TokenMask:
    """Rows of int32 words; bit v of a row (word v // 32, low bit first) is set where token v is allowed.

    A row that nobody claimed allows everything and costs nothing: the words exist only once a row is claimed. One that
    is to be filled later is filled when somebody looks at it: where only some rows are looked at, the others are free.
    """

    __slots__ = ("_claimed", "_failures", "_fills", "_words_LW", "num_rows", "num_words", "vocab_size")

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.num_words = (vocab_size + 31) // 32
        self._words_LW: NDArray[np.int32] | None = None
        self._claimed: set[int] = set()
        self._fills: dict[int, Callable[[], NDArray[np.int32]]] = {}
        self._failures: dict[int, SpecdecError] = {}

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
            self._failures.pop(row, None)
        return words_NW

    def fill_later(self, row: int, fill: Callable[[], NDArray[np.int32]]) -> None:
        """Claim `row`; `fill` gives its words when they are wanted. Raises IndexError outside the mask."""
        self.claim(row, 1)
        self._fills[row] = fill

    def fill(self) -> None:
        """Fill all rows now, for those who look at them all at once. Where filling fails the row stays blank: whoever
        looks at it then is told, by the same error, and nobody else is."""
        for row in sorted(self._fills):
            try:
                self.words(row)
            except SpecdecError as error:
                del self._fills[row]
                self._failures[row] = error

    def words(self, row: int) -> NDArray[np.int32] | None:
        """The words of `row`, or None where nobody claimed it (everything is allowed). Raises what filling raises."""
        if row in self._failures:
            raise self._failures[row]
        if row in self._fills:
            self.words_LW[row] = self._fills[row]()
            del self._fills[row]
        return self.words_LW[row] if row in self._claimed else None

    @property
    def claimed_L(self) -> NDArray[np.bool_]:
        """`[num_rows]`: which rows somebody claimed."""
        claimed_L = np.zeros(self.num_rows, np.bool_)
        claimed_L[list(self._claimed)] = True
        return claimed_L

    def allows_only(self, row: int, tokens: Seq[int]) -> bool:
        """Whether the words of a claimed `row`, as they are now, allow none but `tokens`."""
        rest = self.words_LW[row].view(np.uint32).copy()
        if self.vocab_size % 32:
            rest[-1] &= (1 << self.vocab_size % 32) - 1
        for token in tokens:
            rest[token >> 5] &= 0xFFFFFFFF ^ 1 << (token & 31)
        return not rest.any()

    def allowed(self, row: int) -> NDArray[np.bool_] | None:
        """Row as booleans `[vocab_size]`, or None where everything is allowed."""
        words = self.words(row)
        return None if words is None else bits(words, self.vocab_size)


def bits(words: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Booleans `[vocab_size]` of one row of words."""
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size).view(np.bool_)
