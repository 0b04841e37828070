"""What the tokens of a vocabulary do to a JSON text, in outline: which of them can tell a checker something, and which
tell it the same. Knows no grammar and no text. N tokens, V vocabulary, W words of 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MAX_QUOTES = 3  # of those that are told apart
FEW_WORDS = 64
NO_REST = -1
SPECIAL_REST = -2

_BLANKS = b" \t\r\n"
_CONTENT = re.compile(rb'(?:[^"\\]|\\.)*"', re.DOTALL)
_CLOSED = re.compile(rb'(?:[^"]|"(?:[^"\\]|\\.)*")*', re.DOTALL)
_UNFINISHED = re.compile(rb"(?:(?<![a-z0-9])-?[0-9][-+.0-9eE]*|(?<![a-z0-9])-|(?<![a-z0-9])[a-z]+)$")
_PLAIN = re.compile(rb'[ \t\r\n,:\[\]{}]*["0a-z]?')


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """The bytes of every token of the logits (empty for those that are no text); for n from 1 to `MAX_QUOTES` those
    that hold n quotes or more; those that hold a closing bracket; those that end a text; and the tokens of some bytes,
    of which there are at most `longest`; and those that are blanks and no more."""

    spelled: tuple[bytes, ...]
    with_quotes_NW: NDArray[np.int32]
    with_closing_W: NDArray[np.int32]
    end_words_W: NDArray[np.int32]
    ids: Mapping[bytes, tuple[int, ...]]
    longest: int
    blank_words_W: NDArray[np.int32]
    _outlines: list[Outlines] = field(default_factory=list)

    @classmethod
    def of(cls, spelled: Iterable[bytes], end_words_W: NDArray[np.int32]) -> TokenTable:
        """The table of a vocabulary; `end_words_W` is the row of its end tokens."""
        spelled = tuple(spelled)
        has_NV = np.zeros((MAX_QUOTES + 2, len(end_words_W) * 32), np.bool_)
        ids: dict[bytes, tuple[int, ...]] = {}
        for token, data in enumerate(spelled):
            if b'"' in data:
                has_NV[: min(data.count(b'"'), MAX_QUOTES), token] = True
            has_NV[MAX_QUOTES, token] = b"}" in data or b"]" in data
            has_NV[MAX_QUOTES + 1, token] = data != b"" and not data.strip(_BLANKS)
            if data:
                ids[data] = (*ids.get(data, ()), token)
        words_NW = np.packbits(has_NV, axis=1, bitorder="little").view(np.int32)
        longest = max(map(len, ids))
        quotes_NW, (closing_W, blank_W) = words_NW[:MAX_QUOTES], words_NW[MAX_QUOTES:]
        return cls(spelled, quotes_NW, closing_W, end_words_W, ids, longest, blank_W)

    @property
    def outlines(self) -> Outlines:
        """The outlines of the tokens, made when they are first asked for: that takes a microsecond or two a token."""
        if not self._outlines:
            self._outlines.append(Outlines.of(self.spelled))
        return self._outlines[0]


@dataclass(frozen=True, slots=True, eq=False)
class Outlines:
    """Tokens by what a checker is told of them: the outline of token v, taken between values, is
    `texts[between_V[v]]`. Taken inside a string that it ends behind `contents[v]`, the outline of the rest is
    `texts[rest_V[v]]`; `NO_REST` where the string goes on, `SPECIAL_REST` where other strings or numbers are complete
    in the rest. `closing_T` says which texts close a container, `number_T` which end in a number that may go on, and
    `opens_T` in a string; `quoted_N` are all tokens with a quote, and `special_N` those with a special rest."""

    texts: tuple[bytes, ...]
    closing_T: NDArray[np.bool_]
    number_T: NDArray[np.bool_]
    opens_T: NDArray[np.bool_]
    between_V: NDArray[np.int32]
    rest_V: NDArray[np.int32]
    contents: Mapping[int, bytes]
    quoted_N: NDArray[np.int64]
    special_N: NDArray[np.int64]

    @classmethod
    def of(cls, spelled: Sequence[bytes]) -> Outlines:
        """The outlines of a vocabulary."""
        places: dict[bytes, int] = {b"": 0}
        between_V = np.zeros(len(spelled), np.int32)
        rest_V = np.full(len(spelled), NO_REST, np.int32)
        contents = {}
        for token, data in enumerate(spelled):
            between_V[token] = places.setdefault(outline(data), len(places))
            content = _CONTENT.match(data) if b'"' in data else None
            if content is not None:
                contents[token] = data[: content.end() - 1]
                rest = outline(data[content.end() :])
                plain = _PLAIN.fullmatch(rest) is not None
                rest_V[token] = places.setdefault(rest, len(places)) if plain else SPECIAL_REST
        closing_T = np.array([b"}" in text or b"]" in text for text in places])
        number_T = np.array([text.endswith(b"0") for text in places])
        opens_T = np.array([text.endswith(b'"') for text in places])
        quoted_N = np.array([token for token, data in enumerate(spelled) if b'"' in data], np.int64)
        special_N = np.flatnonzero(rest_V == SPECIAL_REST)
        return cls(tuple(places), closing_T, number_T, opens_T, between_V, rest_V, contents, quoted_N, special_N)


def outline(data: bytes) -> bytes:
    """What of `data`, which begins between values, tells a checker something: not what is inside a string that does not
    end, nor how a number or literal begins that may go on."""
    data = data.lstrip(_BLANKS)
    closed = _CLOSED.match(data)
    assert closed is not None
    if closed.end() < len(data):
        return data[: closed.end() + 1]
    unfinished = _UNFINISHED.search(data)
    if unfinished is None:
        return data
    first = data[unfinished.start() : unfinished.start() + 1]
    return data[: unfinished.start()] + (first if first.isalpha() else b"0")


def tokens_of(words_W: NDArray[np.int32]) -> NDArray[np.int64]:
    """`[N]`: the tokens of a row, in order."""
    places = np.flatnonzero(words_W)
    if len(places) > FEW_WORDS:
        return np.flatnonzero(np.unpackbits(words_W.view(np.uint8), bitorder="little"))
    bits = np.unpackbits(words_W[places].view(np.uint8), bitorder="little").reshape(-1, 32)
    rows, columns = np.nonzero(bits)
    return places[rows] * 32 + columns


def among(tokens_N: NDArray[np.int64], words_W: NDArray[np.int32]) -> NDArray[np.int64]:
    """Those of a few tokens whose bits a row has."""
    found_N: NDArray[np.int64] = tokens_N[(words_W[tokens_N >> 5] >> (tokens_N & 31) & 1).astype(np.bool_)]
    return found_N


def row_of(tokens_N: NDArray[np.int64], num_words: int) -> NDArray[np.int32]:
    """`[W]`: a row with the bits of some tokens."""
    bits = np.zeros(num_words * 32, np.bool_)
    bits[tokens_N] = True
    words_W: NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)
    return words_W


def without(words_W: NDArray[np.int32], tokens_N: NDArray[np.int64]) -> None:
    """Clear the bits of some tokens of a row."""
    masks_N = ~(np.uint32(1) << (tokens_N & 31).astype(np.uint32))
    np.bitwise_and.at(words_W.view(np.uint32), tokens_N >> 5, masks_N)
