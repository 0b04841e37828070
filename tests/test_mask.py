"""The token bitmask: bit order, claims, and the vocabulary's ragged end."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.errors import ConstraintError
from specdec.mask import TokenMask, bits
from tests.masks import allow, blank


@pytest.mark.parametrize("vocab_size", [1, 8, 31, 32, 33, 63, 64, 65, 1000, 49152])
def test_bits_and_allow_are_inverse(vocab_size: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    tokens = rng.sample(range(vocab_size), rng.randint(0, vocab_size))
    mask = TokenMask(3, vocab_size)
    allow(blank(mask, 1), tokens)
    allowed = mask.allowed(1)
    assert allowed is not None
    assert allowed.dtype == np.bool_
    assert allowed.shape == (vocab_size,)
    assert np.flatnonzero(allowed).tolist() == sorted(tokens)


def test_bit_v_is_bit_v_mod_32_of_word_v_div_32() -> None:
    mask = TokenMask(1, 100)
    words = blank(mask, 0)
    allow(words, [0, 31, 32, 99])
    assert words.dtype == np.int32
    assert words.view(np.uint32).tolist() == [1 | 1 << 31, 1, 0, 1 << 3]


def test_a_row_that_nobody_gave_allows_everything() -> None:
    mask = TokenMask(4, 100)
    assert mask.allowed(2) is None
    assert mask.words(2) is None
    blank(mask, 1)
    assert mask.allowed(2) is None
    assert mask.stacked().shape == (4, 4)
    assert mask.stacked().flags.c_contiguous


def test_a_row_of_zeros_allows_nothing() -> None:
    mask = TokenMask(2, 40)
    blank(mask, 0)
    allowed = mask.allowed(0)
    assert allowed is not None
    assert not allowed.any()


def test_a_row_that_is_given_again_is_the_later_one() -> None:
    mask = TokenMask(2, 40)
    for row in (0, 1):
        allow(blank(mask, row), [5])
    blank(mask, 1)
    allowed = mask.allowed(1)
    assert allowed is not None
    assert not allowed.any()
    assert mask.stacked().any(1).tolist() == [True, False]


def test_bits_past_the_vocabulary_are_not_seen() -> None:
    words = np.full(2, -1, np.int32)
    assert bits(words, 33).tolist() == [True] * 33


@pytest.mark.parametrize("row", [-1, 2, 10])
def test_a_row_outside_the_mask_is_refused(row: int) -> None:
    with pytest.raises(IndexError, match=rf"row {row} is outside the mask's 0\.\.1"):
        blank(TokenMask(2, 8), row)


def test_a_row_that_is_filled_later_is_filled_once_and_only_if_it_is_looked_at() -> None:
    mask, asked = TokenMask(4, 40), list[int]()

    def row(token: int) -> NDArray[np.int32]:
        asked.append(token)
        words_W = np.zeros(2, np.int32)
        allow(words_W, [token])
        return words_W

    for place in range(3):
        mask.fill_later(place, lambda token=place + 7: row(token))  # type: ignore[misc]
    assert asked == []
    for _ in range(2):
        allowed = mask.allowed(1)
        assert allowed is not None
        assert np.flatnonzero(allowed).tolist() == [8]
    assert asked == [8]
    blank(mask, 2)  # by somebody else: nothing is left to fill there
    mask.fill()
    assert asked == [8, 7]
    assert mask.words(3) is None
    with pytest.raises(IndexError):
        mask.fill_later(4, lambda: row(0))


def test_a_row_whose_filling_fails_stays_to_be_filled() -> None:
    mask = TokenMask(1, 40)

    def fail() -> NDArray[np.int32]:
        raise ConstraintError("no row")

    mask.fill_later(0, fail)
    for _ in range(2):
        with pytest.raises(ConstraintError, match="no row"):
            mask.words(0)


def test_neighbours_of_a_row_stay_free() -> None:
    mask = TokenMask(5, 70)
    blank(mask, 2)[:] = 1
    assert [mask.words(row) is None for row in range(5)] == [True, True, False, True, True]
    assert mask.masked_L.tolist() == [False, False, True, False, False]
    assert mask.stacked().sum(1).tolist() == [0, 0, 3, 0, 0]


def test_filling_all_rows_at_once_fails_for_those_alone_who_look_at_the_row_that_fails() -> None:
    mask, asked = TokenMask(4, 40), list[int]()

    def row(place: int) -> NDArray[np.int32]:
        asked.append(place)
        if place == 1:
            raise ConstraintError("no row")
        return np.full(2, place, np.int32)

    for place in range(3):
        mask.fill_later(place, functools.partial(row, place))
    for _ in range(2):
        mask.fill()
        assert asked == [0, 1, 2]
        with pytest.raises(ConstraintError, match="no row"):
            mask.words(1)
        assert mask.stacked()[:3].tolist() == [[0, 0], [0, 0], [2, 2]]
    assert mask.masked_L.tolist() == [True, True, True, False]
    blank(mask, 1)
    assert mask.words(1) is not None


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 64, 70])
def test_a_row_allows_only_what_no_other_bit_stands_beside(vocab_size: int) -> None:
    mask = TokenMask(1, vocab_size)
    words_W = blank(mask, 0)
    last = vocab_size - 1
    assert mask.allows_only(0, [])
    allow(words_W, range(vocab_size, mask.num_words * 32))  # bits of no token
    assert mask.allows_only(0, [])
    allow(words_W, [3, last])
    assert mask.allows_only(0, [3, last])
    assert mask.allows_only(0, [0, 3, last])
    assert not mask.allows_only(0, [3])
    assert not mask.allows_only(0, [last])
    allowed = mask.allowed(0)
    assert allowed is not None
    assert np.flatnonzero(allowed).tolist() == [3, last]
