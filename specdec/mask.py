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

    A row that nobody gave allows everything and costs nothing. Rows are kept, not copied: nobody changes the words of
    one. One that is to be filled later is filled when somebody looks at it: where only some rows are looked at, the
    others are free.
    """

    __slots__ = ("_failures", "_fills", "_rows", "num_rows", "num_words", "vocab_size")

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.num_words = (vocab_size + 31) // 32
        self._rows: dict[int, NDArray[np.int32]] = {}
        self._fills: dict[int, Callable[[], NDArray[np.int32]]] = {}
        self._failures: dict[int, SpecdecError] = {}

    def put(self, row: int, words_W: NDArray[np.int32]) -> None:
        """The words `[num_words]` of `row`, in place of any that it had. Raises IndexError outside the mask."""
        self._release(row)
        self._rows[row] = words_W

    def fill_later(self, row: int, fill: Callable[[], NDArray[np.int32]]) -> None:
        """As `put`, with words that `fill` gives when they are wanted. Raises IndexError outside the mask."""
        self._release(row)
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
        """The words of `row`, or None where it has none (everything is allowed). Raises what filling raises."""
        if row in self._failures:
            raise self._failures[row]
        if row in self._fills:
            self._rows[row] = self._fills[row]()
            del self._fills[row]
        return self._rows.get(row)

    def stacked(self) -> NDArray[np.int32]:
        """All rows, `[num_rows, num_words]`. Those that have no words, or none yet, are blank."""
        words_LW = np.zeros((self.num_rows, self.num_words), np.int32)
        for row, words_W in self._rows.items():
            words_LW[row] = words_W
        return words_LW

    @property
    def masked_L(self) -> NDArray[np.bool_]:
        """`[num_rows]`: which rows have words, now or later."""
        masked_L = np.zeros(self.num_rows, np.bool_)
        masked_L[[*self._rows, *self._fills, *self._failures]] = True
        return masked_L

    def allows_only(self, row: int, tokens: Seq[int]) -> bool:
        """Whether the words that `row` has now, none where filling failed, allow none but `tokens`."""
        rest = self._rows.get(row, np.zeros(self.num_words, np.int32)).view(np.uint32).copy()
        if self.vocab_size % 32:
            rest[-1] &= (1 << self.vocab_size % 32) - 1
        for token in tokens:
            rest[token >> 5] &= 0xFFFFFFFF ^ 1 << (token & 31)
        return not rest.any()

    def allowed(self, row: int) -> NDArray[np.bool_] | None:
        """Row as booleans `[vocab_size]`, or None where everything is allowed."""
        words = self.words(row)
        return None if words is None else bits(words, self.vocab_size)

    def _release(self, row: int) -> None:
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} is outside the mask's 0..{self.num_rows - 1}")
        self._fills.pop(row, None)
        self._failures.pop(row, None)


def bits(words: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Booleans `[vocab_size]` of one row of words."""
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size).view(np.bool_)
