"""What a checker of the JSON text takes away from the rows of a grammar. Only tokens that may complete something it
looks at are tried, and what tokens have in common is tried once. W words of 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from specdec.grammar.checker import Checker
from specdec.grammar.json_text import JsonText, Place
from specdec.grammar.numbers import spelling

MAX_QUOTES = 3  # of those that are told apart
MANY = 256  # tokens of which hardly all lead to nothing

# What a token adds up to the first thing that a checker is told of, if it comes so far.
_PIECES = {
    Place.BETWEEN: re.compile(rb"[ \t\r\n]*.?", re.DOTALL),
    Place.KEY: re.compile(rb'(?:[^"\\]|\\.)*(?:"|\\)?', re.DOTALL),
    Place.STRING: re.compile(rb'(?:[^"\\]|\\.)*(?:"|\\)?', re.DOTALL),
    Place.NUMBER: re.compile(rb"[-+.0-9eE]*"),
    Place.LITERAL: re.compile(rb"[a-z]*"),
}


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """The bytes of every token of the logits (empty for those that are no text); for n from 1 to `MAX_QUOTES` those
    that hold n quotes or more; those that hold a closing bracket; those that end a text; and the tokens of some bytes,
    of which there are at most `longest`."""

    spelled: tuple[bytes, ...]
    with_quotes_NW: NDArray[np.int32]
    with_closing_W: NDArray[np.int32]
    end_words_W: NDArray[np.int32]
    ids: Mapping[bytes, tuple[int, ...]]
    longest: int

    @classmethod
    def of(cls, spelled: Iterable[bytes], end_words_W: NDArray[np.int32]) -> TokenTable:
        """The table of a vocabulary; `end_words_W` is the row of its end tokens."""
        spelled = tuple(spelled)
        has_NV = np.zeros((MAX_QUOTES + 1, len(end_words_W) * 32), np.bool_)
        for token, data in enumerate(spelled):
            if b'"' in data:
                has_NV[: min(data.count(b'"'), MAX_QUOTES), token] = True
            has_NV[MAX_QUOTES, token] = b"}" in data or b"]" in data
        words_NW = np.packbits(has_NV, axis=1, bitorder="little").view(np.int32)
        ids: dict[bytes, tuple[int, ...]] = {}
        for token, data in enumerate(spelled):
            ids[data] = (*ids.get(data, ()), token) if data else ()
        longest = max(map(len, ids))
        return cls(spelled, words_NW[:MAX_QUOTES], words_NW[MAX_QUOTES], end_words_W, ids, longest)


class Narrowing:
    """Forbids what `checker`, at the beginning of a text, forbids. Shared by all texts of a grammar."""

    __slots__ = ("_has_tight_keys", "_start", "_table")

    def __init__(self, table: TokenTable, checker: Checker, *, has_tight_keys: bool = True) -> None:
        """`has_tight_keys`: objects may run out of keys."""
        self._table = table
        self._start = JsonText(checker)
        self._has_tight_keys = has_tight_keys

    def start(self) -> JsonText:
        """The empty text."""
        return self._start

    def after(self, text: JsonText, token: int) -> JsonText | None:
        """The text with a token behind it; None where the checker forbids it."""
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

    def suspects(self, words_W: NDArray[np.int32], text: JsonText) -> list[int]:
        """Those of the tokens of a narrowed row that may lead to where nothing is allowed, on the way to a key or an
        item that is there already."""
        layout = _checker(text).layout
        if not (self._has_tight_keys if layout.is_object else layout.unique):
            return []
        found: dict[int, None] = {}
        if text.place is Place.KEY or text.place is Place.STRING:
            found.update(dict.fromkeys(self._towards(words_W, text)))
            words_W = words_W & self._table.with_quotes_NW[0]
        if text.place is not Place.KEY:
            tokens = _tokens(words_W)
            for token in tokens if len(tokens) <= MANY else ():
                data = self._table.spelled[token]
                after = text.after(data) if data else None
                if after is not None and after.open == text.open and _may_run_out(after):
                    found[token] = None
        return list(found)

    def _towards(self, words_W: NDArray[np.int32], text: JsonText) -> Iterator[int]:
        """The tokens of a row that go on with what the text is in as what is there already does."""
        beginning = _beginning(text)
        for used in _used(text):
            if used.startswith(beginning):
                rest = used[len(beginning) :].encode()
                for size in range(1, min(len(rest), self._table.longest) + 1):
                    for token in self._table.ids.get(rest[:size], ()):
                        if words_W[token >> 5] >> (token & 31) & 1:
                            yield token

    def narrow(self, words_W: NDArray[np.int32], text: JsonText) -> None:
        """Clear the bits of `words_W`, a row of the grammar after `text`, that the checker forbids."""
        end_words_W = self._table.end_words_W
        if text.place is Place.NUMBER and not text.open and (words_W & end_words_W).any() and text.ended() is None:
            words_W &= ~end_words_W
        candidates_W = self._candidates(words_W, text)
        if not candidates_W.any():
            return
        unsigned_W = words_W.view(np.uint32)
        attempts = _Attempts(text)
        for token in _tokens(candidates_W):
            data = self._table.spelled[token]
            if data and not attempts.may_follow(data):
                unsigned_W[token >> 5] &= 0xFFFFFFFF ^ 1 << (token & 31)

    def _candidates(self, words_W: NDArray[np.int32], text: JsonText) -> NDArray[np.int32]:
        """The tokens of a row that the checker may forbid."""
        checker = _checker(text)
        in_string = text.place is Place.KEY or text.place is Place.STRING
        if not checker.is_idle:
            candidates_W: NDArray[np.int32] = words_W & self._table.with_quotes_NW[0] if in_string else words_W
            return candidates_W
        # Only a key that comes again matters, or the end of all that is idle.
        quotes_W = self._table.with_quotes_NW[_quotes_to_a_key(text, checker) - 1]
        if checker.is_watched:
            closing_W = self._table.with_closing_W
            quotes_W = quotes_W | (closing_W & self._table.with_quotes_NW[0] if in_string else closing_W)
        candidates_W = words_W & quotes_W
        return candidates_W


class _Attempts:
    """Texts after one text, by what stands between. What several tokens begin with is followed once."""

    __slots__ = ("_after", "_text")

    def __init__(self, text: JsonText) -> None:
        self._text = text
        self._after: dict[tuple[int, bytes, bool], JsonText | None] = {}

    def may_follow(self, data: bytes) -> bool:
        """Whether the checker lets `data` follow."""
        text: JsonText | None = self._text
        at = 0
        while text is not None and at < len(data):
            match = _PIECES[text.place].match(data, at)
            assert match is not None
            end = match.end()
            if text.escaped or end == at:
                # The byte after a backslash stands for itself; a number that ends here ends before the next byte.
                end = at + 1
            key = (id(text), data[at:end], end == len(data))
            if key not in self._after:
                self._after[key] = text.after(data[at:end])
            text = self._after[key]
            at = end
        return text is not None


def _quotes_to_a_key(text: JsonText, checker: Checker) -> int:
    """With how many quotes a token may complete a key that is there already."""
    if text.place is Place.KEY:
        beginning = text.so_far()
        return 1 if any(key.startswith(beginning) for key in checker.keys) else 3
    return 3 if text.place is Place.STRING else 2


def _checker(text: JsonText) -> Checker:
    assert isinstance(text.watcher, Checker)
    return text.watcher


def _tokens(words_W: NDArray[np.int32]) -> list[int]:
    """The tokens of a row, in order."""
    tokens: list[int] = np.flatnonzero(np.unpackbits(words_W.view(np.uint8), bitorder="little")).tolist()
    return tokens


def _may_run_out(text: JsonText) -> bool:
    """Whether nothing may be left for the key or item that the text is in, or that a comma asks for."""
    checker = _checker(text)
    if text.place is Place.BETWEEN:
        return checker.more and (text.key_next or bool(checker.seen))
    return any(used.startswith(_beginning(text)) for used in _used(text))


def _used(text: JsonText) -> Iterable[str]:
    """The keys, strings or numbers that what the text is in must differ from."""
    checker = _checker(text)
    if text.place is Place.KEY:
        return checker.keys
    if text.place is Place.STRING:
        return (value for value in checker.seen if isinstance(value, str))
    numbers = [value for value in checker.seen if isinstance(value, Decimal)]
    return (*map(spelling, numbers), *("-0" for value in numbers if not value))


def _beginning(text: JsonText) -> str:
    return text.raw.decode() if text.place is Place.NUMBER else text.so_far()
