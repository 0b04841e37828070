"""Rows of bits by hand."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from specdec.mask import TokenMask


def allow(words_W: NDArray[np.int32], tokens: Iterable[int]) -> None:
    """Set the bits of `tokens` in one row of words."""
    row = words_W.view(np.uint32)
    for token in tokens:
        row[token >> 5] |= np.uint32(1 << (token & 31))


def blank(mask: TokenMask, row: int) -> NDArray[np.int32]:
    """The words of one row, which allows nothing yet."""
    words_W = np.zeros(mask.num_words, np.int32)
    mask.put(row, words_W)
    return words_W
