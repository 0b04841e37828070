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


def claim(mask: TokenMask, row: int) -> NDArray[np.int32]:
    """The words of one row."""
    words_W: NDArray[np.int32] = mask.claim(row, 1)[0]
    return words_W
