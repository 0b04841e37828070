"""A place in a JSON text that is being written, and what it tells a watcher: where values begin and end, and what they
are. Immutable, so that it can be followed down every branch of a tree. Trusts the grammar that the text is JSON.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from enum import Enum
from typing import Protocol, Self

Scalar = None | bool | Decimal | str


class Kind(Enum):
    """What a value begins as; null, true and false are complete with their first letter."""

    OBJECT = "{"
    ARRAY = "["
    STRING = '"'
    NUMBER = "0"


class Watcher(Protocol):
    """What looks at the values of a text. Immutable: each method gives the watcher after an event; None forbids it."""

    def begins(self, kind: Kind) -> Self | None:
        """A value begins."""
        ...

    def key(self, name: str) -> Self | None:
        """A key of the innermost object is complete."""
        ...

    def scalar(self, value: Scalar) -> Self | None:
        """A scalar is complete: a string or number that began before, or null, true or false."""
        ...

    def closes(self) -> Self | None:
        """The innermost container is complete."""
        ...

    def continues(self) -> Self | None:
        """A comma: another key or item follows in the innermost container."""
        ...


class Place(Enum):
    """What the next byte belongs to."""

    BETWEEN = 0  # blanks, commas, colons, brackets, or the first byte of a value or key
    KEY = 1
    STRING = 2
    NUMBER = 3
    LITERAL = 4


_BLANKS = re.compile(rb"[ \t\r\n]*")
_CONTENT = re.compile(rb'(?:[^"\\]|\\.)*', re.DOTALL)
_NUMBER = re.compile(rb"[-+.0-9eE]*")
_LETTERS = re.compile(rb"[a-z]*")
_LITERALS: dict[int, Scalar] = {ord("n"): None, ord("t"): True, ord("f"): False}
# Whole escapes; half of a surrogate pair is none.
_WHOLE = re.compile(
    rb"(?:[^\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*", re.DOTALL
)
_QUOTE, _BACKSLASH, _COLON, _COMMA = b'"\\:,'


class JsonText:
    """A JSON text so far. `place` of the next byte; `raw` bytes of the key or scalar it is in, `escaped` where they end
    in a backslash that stands for itself; `open` containers, as their brackets; `key_next`: a string would be a key."""

    __slots__ = ("escaped", "key_next", "open", "place", "raw", "watcher")

    def __init__(
        self,
        watcher: Watcher,
        place: Place = Place.BETWEEN,
        raw: bytes = b"",
        open: bytes = b"",
        key_next: bool = False,
        escaped: bool = False,
    ) -> None:
        self.watcher = watcher
        self.place = place
        self.raw = raw
        self.open = open
        self.key_next = key_next
        self.escaped = escaped

    def after(self, data: bytes) -> JsonText | None:
        """The text with `data` behind it; None where the watcher forbids it."""
        text: JsonText | None = self
        at = 0
        while at < len(data) and text is not None:
            place = text.place
            if place is Place.BETWEEN:
                text, at = text._between(data, at)
            elif place is Place.STRING or place is Place.KEY:
                text, at = text._string(data, at)
            elif place is Place.NUMBER:
                start, at = at, _end(_NUMBER, data, at)
                text = JsonText(text.watcher, place, text.raw + data[start:at], text.open)
                if at < len(data):
                    text = text.ended()
            else:
                at = _end(_LETTERS, data, at)
                if at < len(data):
                    text = JsonText(text.watcher, Place.BETWEEN, b"", text.open)
        return text

    def ended(self) -> JsonText | None:
        """The text where a number that it is in ends here; None where the watcher forbids it."""
        return self._complete(Decimal(self.raw.decode())) if self.place is Place.NUMBER else self

    def so_far(self) -> str:
        """The characters of the key or string that the text is in, as far as they are complete."""
        raw = self.raw[: _end(_WHOLE, self.raw, 0)] if b"\\" in self.raw else self.raw
        return decoded(raw.decode(errors="ignore"))

    def _between(self, data: bytes, at: int) -> tuple[JsonText | None, int]:
        at = _end(_BLANKS, data, at)
        if at == len(data):
            return self, at
        byte, watcher = data[at], self.watcher
        if byte == _QUOTE:
            if self.key_next:
                return JsonText(watcher, Place.KEY, b"", self.open), at + 1
            return self._at(watcher.begins(Kind.STRING), Place.STRING), at + 1
        if byte == _COLON:
            return JsonText(watcher, Place.BETWEEN, b"", self.open), at + 1
        if byte == _COMMA:
            return self._at(watcher.continues(), key_next=self.open.endswith(b"{")), at + 1
        if byte in b"{[":
            is_object = byte == b"{"[0]
            following = watcher.begins(Kind.OBJECT if is_object else Kind.ARRAY)
            return self._at(following, open=self.open + data[at : at + 1], key_next=is_object), at + 1
        if byte in b"}]":
            return self._at(watcher.closes(), open=self.open[:-1]), at + 1
        if byte in _LITERALS:
            return self._at(watcher.scalar(_LITERALS[byte]), Place.LITERAL), at + 1
        return self._at(watcher.begins(Kind.NUMBER), Place.NUMBER), at

    def _string(self, data: bytes, at: int) -> tuple[JsonText | None, int]:
        end = _end(_CONTENT, data, at + self.escaped)
        raw = self.raw + data[at:end]
        if end == len(data):
            return JsonText(self.watcher, self.place, raw, self.open), end
        if data[end] == _BACKSLASH:  # the last byte: what it escapes is still to come
            return JsonText(self.watcher, self.place, raw + b"\\", self.open, escaped=True), end + 1
        value = decoded(raw.decode())
        text = self._at(self.watcher.key(value)) if self.place is Place.KEY else self._complete(value)
        return text, end + 1

    def _complete(self, value: Scalar) -> JsonText | None:
        return self._at(self.watcher.scalar(value))

    def _at(
        self, watcher: Watcher | None, place: Place = Place.BETWEEN, open: bytes | None = None, key_next: bool = False
    ) -> JsonText | None:
        if watcher is None:
            return None
        return JsonText(watcher, place, b"", self.open if open is None else open, key_next)


def _end(expression: re.Pattern[bytes], data: bytes, at: int) -> int:
    """Where a match from `at` on ends; the expression may match nothing, so it always matches."""
    match = expression.match(data, at)
    assert match is not None
    return match.end()


def decoded(escaped: str) -> str:
    """The string that is spelled `escaped` between its quotes."""
    if "\\" not in escaped:
        return escaped
    value: str = json.loads(f'"{escaped}"')
    return value
