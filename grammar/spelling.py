"""How a JSON string spells each character: one way, and by an escape where JSON asks for one or the vocabulary has no
tokens for the character's bytes. Knows no pattern and no tokenizer.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

MAX_RANGES = 200  # of characters without tokens; what is left over is spelled as ever, so it can't be written
NUM_CODES = 0x110000
Range = tuple[int, int]

# What JSON itself spells with an escape, and the one spelling that is accepted for it.
ESCAPES: dict[int, str] = {
    **{code: f"\\u{code:04x}" for code in range(0x20)},
    8: "\\b",
    9: "\\t",
    10: "\\n",
    12: "\\f",
    13: "\\r",
    0x22: '\\"',
    0x5C: "\\\\",
}
_OWN_ESCAPES = r"\\([\x{22}\\bfnrt]|u00(0[0-7bef]|1[0-9a-f]))"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Spelling:
    """The characters in `ranges`, none of them JSON's own escapes, are written `\\uXXXX`, in lower case, those above
    U+FFFF as two halves.

    Those in `begun` tokens can begin and not end, so a grammar must forbid them; the others no token begins, and a
    grammar that allows them is as good: llguidance takes a fifth of the time where strings hold any character.
    """

    ranges: tuple[Range, ...] = ()
    begun: tuple[Range, ...] = ()

    @classmethod
    def of(cls, spelled: Iterable[bytes]) -> Spelling:
        """The spelling for a vocabulary, by the bytes of its tokens. A character has tokens if each of its bytes is
        one, or all of them together are."""
        tokens = set(spelled)
        missing = np.array([bytes([byte]) not in tokens for byte in range(256)])
        if (not missing[:0xC0].any() and not missing[0xC2:0xF5].any()) or missing[list(b"\\u0123456789abcdef")].any():
            return PLAIN
        codes = np.arange(NUM_CODES)
        without = np.where(codes < 0x80, missing[codes & 0x7F], False)
        for low, lead, size in ((0x80, 0xC0, 2), (0x800, 0xE0, 3), (0x10000, 0xF0, 4)):
            part = codes[low : min(NUM_CODES, 1 << (5 * size + 1))]
            lost = missing[lead | (part >> 6 * (size - 1))]
            for place in range(size - 1):
                lost = lost | missing[0x80 | (part >> 6 * place & 0x3F)]
            without[part] = lost
        without[0xD800:0xE000] = False
        without[list(ESCAPES)] = False
        without[[ord(text) for text in map(_character, tokens) if text]] = False
        edges = np.flatnonzero(np.diff(without.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        longest = sorted(edges.tolist(), key=lambda edge: edge[0] - edge[1])[:MAX_RANGES]
        ranges = tuple((first, end - 1) for first, end in sorted(longest))
        seen = set[int]().union(*tokens)
        leads = [(first, last) for first, last in _by_lead_byte(ranges) if chr(first).encode()[0] in seen]
        return cls(ranges, tuple(leads))

    @property
    def raw(self) -> str:
        """A regular expression for one character that stands for itself."""
        return r"[^\x{0}-\x{1f}\x{22}\x{5c}" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in self.begun) + "]"

    @property
    def character(self) -> str:
        """A regular expression for one character as it is spelled."""
        return f"({'|'.join([self.raw, _OWN_ESCAPES, *escapes(self.ranges)])})"

    @property
    def anything(self) -> str:
        """A regular expression for the contents of any string."""
        return f"{self.character}*"

    def escaped(self, text: str) -> str:
        """A text of whole characters as it stands between the quotes of a JSON string."""
        return "".join(ESCAPES.get(ord(c)) or (_escape(c) if self._escapes(ord(c)) else c) for c in text)

    def respelled(self, text: str) -> str:
        """A JSON text whose strings hold no escapes but JSON's own, with those that this spelling asks for."""
        if not self.ranges:
            return text
        return _STRING.sub(
            lambda match: "".join(_escape(c) if self._escapes(ord(c)) else c for c in match[0]),
            text,
        )

    def _escapes(self, code: int) -> bool:
        return any(first <= code <= last for first, last in self.ranges)


PLAIN = Spelling()


def _by_lead_byte(ranges: Iterable[Range]) -> Iterator[Range]:
    """Ranges cut where the first byte of their characters in UTF-8 changes."""
    borders = (*range(0x80, 0x800, 0x40), *range(0x800, 0x10000, 0x1000), *range(0x10000, NUM_CODES, 0x40000))
    for first, last in ranges:
        inside = [border for border in borders if first < border <= last]
        yield from zip([first, *inside], [*(border - 1 for border in inside), last], strict=True)


@functools.lru_cache(maxsize=256)
def runs(ranges: tuple[Range, ...]) -> tuple[tuple[int, int, str], ...]:
    """Ranges cut where the general category changes, each part with its category."""
    found: list[tuple[int, int, str]] = []
    for first, last in ranges:
        start, category = first, unicodedata.category(chr(first))
        for code in range(first + 1, last + 1):
            other = unicodedata.category(chr(code))
            if other != category:
                found.append((start, code - 1, category))
                start, category = code, other
        found.append((start, last, category))
    return tuple(found)


def escapes(ranges: Sequence[Range]) -> list[str]:
    """Regular expressions for the `\\u` escapes of the characters in some ranges."""
    found = []
    for first, last in ranges:
        if first < 0x10000:
            found += [rf"\\u{digits}" for digits in _hex(first, min(last, 0xFFFF), 4)]
        if last >= 0x10000:
            (high, low), (top, end) = _halves(max(first, 0x10000)), _halves(last)
            if high == top:
                found += _pairs(high, top, low, end)
                continue
            if low > 0xDC00:
                found += _pairs(high, high, low, 0xDFFF)
                high += 1
            if end < 0xDFFF:
                found += _pairs(top, top, 0xDC00, end)
                top -= 1
            if high <= top:
                found += _pairs(high, top, 0xDC00, 0xDFFF)
    return found


def _pairs(high: int, top: int, low: int, end: int) -> list[str]:
    return [rf"\\u({'|'.join(_hex(high, top, 4))})\\u({'|'.join(_hex(low, end, 4))})"]


def _halves(code: int) -> Range:
    return 0xD800 + (code - 0x10000 >> 10), 0xDC00 + (code & 0x3FF)


def _hex(low: int, high: int, width: int) -> list[str]:
    """Regular expressions for the numbers from `low` to `high` in so many hexadecimal digits."""
    if width == 0:
        return [""]
    size = 16 ** (width - 1)
    (first, below), (last, above) = divmod(low, size), divmod(high, size)
    if first == last:
        return [f"{first:x}{rest}" for rest in _hex(below, above, width - 1)]
    found = []
    if below:
        found += [f"{first:x}{rest}" for rest in _hex(below, size - 1, width - 1)]
        first += 1
    if above < size - 1:
        found += [f"{last:x}{rest}" for rest in _hex(0, above, width - 1)]
        last -= 1
    if first <= last:
        found.append("[" + "".join(f"{digit:x}" for digit in range(first, last + 1)) + "]" + "[0-9a-f]" * (width - 1))
    return found


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1] if character > "\x7f" else f"\\u{ord(character):04x}"


def _character(token: bytes) -> str:
    """The character that a token spells, or nothing where it spells none, or more."""
    if not 1 <= len(token) <= 4:
        return ""
    text = token.decode(errors="ignore")
    return text if len(text) == 1 and text.encode() == token else ""
