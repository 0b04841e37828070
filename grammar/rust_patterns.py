"""Regular expressions in Rust's dialect, as a whole text must match them, reduced to what every backend understands
alike: ranges of characters, one after the other, choices and repeats. Knows no backend but llguidance, whose reading of
a character class is the law: every class is handed to it as it is written, and the characters that it allows are noted.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from specdec.grammar.patterns import EMPTY, Anchor, Choice, Class, Node, PatternRefused, Repeat, Sequence

MAX_GROUPS = 60
MAX_REPEAT = 10_000
MASKS = 4_000  # a class that takes more to be read may have a complement that takes fewer
NOTHING = Choice(())  # no text at all

_GROUP = re.compile(r"\((?:\?(?:P?<[^>]*>|(?P<flags>[A-Za-z-]*)(?P<closed>[:)])))?")
_QUANTIFIER = re.compile(r"[*+?]|\{(\d+)\}|\{(\d+),(\d*)\}")
_ESCAPE = re.compile(r"(?s)\\(?:[xuUpP]\{[^}]*\}|[pP][A-Za-z]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)")
_FLAGS = frozenset("isU")  # U swaps greedy and lazy, which matters to no whole text


def reduced(pattern: str) -> Node:
    """The texts that `pattern` matches from end to end: nodes without anchors, classes of plain ranges, and `NOTHING`
    only where there is no text at all. The pattern must be one that llguidance takes.

    Raises `PatternRefused` for what cannot be reduced: anchors that are not at an end, flags other than i, s and U.
    """
    return _resolved(_Reader(pattern).whole(), True, True)


def one_of(texts: Iterable[str]) -> Node:
    """Exactly the texts."""
    return Choice(tuple(Sequence(tuple(_single(ord(c)) for c in text)) for text in texts))


def without(node: Node, code: int) -> Node:
    """The texts of a reduced `node` in which the character `code` does not occur."""
    match node:
        case Class():
            ranges = [
                part
                for low, high in node.ranges
                for part in ((low, min(high, code - 1)), (max(low, code + 1), high))
                if part[0] <= part[1]
            ]
            return Class(tuple(ranges)) if ranges else NOTHING
        case Sequence():
            return _sequence([without(part, code) for part in node.parts])
        case Choice():
            return _choice([without(option, code) for option in node.options])
        case Repeat():
            return _repeat(without(node.body, code), node.least, node.most)
        case _:
            raise AssertionError(node)


def _resolved(node: Node, at_start: bool, at_end: bool) -> Node:
    """The node without its anchors, which hold where nothing stands before or after them."""
    match node:
        case Class():
            return node if node.ranges else NOTHING
        case Anchor():
            if not (at_start if node.start else at_end):
                raise PatternRefused("an anchor is possible only at either end of the pattern")
            return EMPTY
        case Choice():
            return _choice([_resolved(option, at_start, at_end) for option in node.options])
        case Sequence():
            bare = [_is_bare(part) for part in node.parts]
            return _sequence(
                [
                    _resolved(part, at_start and all(bare[:place]), at_end and all(bare[place + 1 :]))
                    for place, part in enumerate(node.parts)
                ]
            )
        case Repeat():
            return _repeat(_resolved(node.body, False, False), node.least, node.most)
        case _:
            raise AssertionError(node)


def _is_bare(node: Node) -> bool:
    """Whether nothing but anchors is in it."""
    return isinstance(node, Anchor) or (isinstance(node, Sequence) and all(map(_is_bare, node.parts)))


def _sequence(parts: list[Node]) -> Node:
    if NOTHING in parts:
        return NOTHING
    parts = [part for part in parts if part != EMPTY]
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def _choice(options: list[Node]) -> Node:
    options = [option for option in options if option != NOTHING]
    return options[0] if len(options) == 1 else Choice(tuple(options))


def _repeat(body: Node, least: int, most: int | None) -> Node:
    if body == EMPTY or most == 0 or (body == NOTHING and least == 0):
        return EMPTY
    return body if body == NOTHING or least == most == 1 else Repeat(body, least, most)


class _Reader:
    """A recursive descent over one pattern."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._flags: frozenset[str] = frozenset()

    def whole(self) -> Node:
        node = self._options()
        if self._at < len(self._text):
            raise PatternRefused(f"unmatched ) at character {self._at}")
        return node

    def _options(self) -> Node:
        """Alternatives up to the end of their group; flags that are set among them hold up to there."""
        self._depth += 1
        if self._depth > MAX_GROUPS:
            raise PatternRefused(f"nests more than {MAX_GROUPS} groups")
        outer, options = self._flags, [self._parts()]
        while self._text.startswith("|", self._at):
            self._at += 1
            options.append(self._parts())
        self._flags = outer
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _parts(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._quantified(self._atom()))
        return Sequence(tuple(parts))

    def _quantified(self, node: Node) -> Node:
        while (match := _QUANTIFIER.match(self._text, self._at)) is not None:
            self._at = match.end() + self._text.startswith("?", match.end())  # lazy: the same texts
            exactly, least, most = match.groups()
            if match[0] in "*+?":
                bounds = int(match[0] == "+"), 1 if match[0] == "?" else None
            elif exactly is not None:
                bounds = int(exactly), int(exactly)
            else:
                bounds = int(least), int(most) if most else None
            if max(bounds[0], bounds[1] or 0) > MAX_REPEAT:
                raise PatternRefused(f"repeats more than {MAX_REPEAT} times")
            node = Repeat(node, *bounds)
        return node

    def _atom(self) -> Node:
        match self._text[self._at]:
            case "(":
                return self._group()
            case "[":
                return self._class(self._bracket())
            case "\\":
                return self._escape()
            case ".":
                return self._class(".")
            case "{":
                raise PatternRefused(f"a repetition of an unknown form at character {self._at}")
            case "^" | "$" as sign:
                self._at += 1
                return Anchor(sign == "^")
            case character if "i" in self._flags:
                return self._class(character, f"\\x{{{ord(character):x}}}")
            case character:
                self._at += 1
                return _single(ord(character))

    def _group(self) -> Node:
        match = _GROUP.match(self._text, self._at)
        if match is None or self._text.startswith("?", match.end()):
            raise PatternRefused(f"a group of an unknown kind at character {self._at}")
        opened, self._at, outer = self._at, match.end(), self._flags
        flags, closed = match["flags"], match["closed"]
        if flags:
            on, _, off = flags.partition("-")
            unknown = sorted({*on, *off} - _FLAGS)
            if unknown:
                raise PatternRefused(f"the flag {unknown[0]} is not supported, only i, s and U")
            self._flags = (self._flags | {*on}) - {*off}
        if closed == ")":
            return EMPTY
        body = self._options()
        self._flags = outer
        if not self._text.startswith(")", self._at):
            raise PatternRefused(f"unclosed group at character {opened}")
        self._at += 1
        return body

    def _escape(self) -> Node:
        match = _ESCAPE.match(self._text, self._at)
        if match is None:
            raise PatternRefused("ends in a backslash")
        if match[0] in (r"\A", r"\z"):
            self._at = match.end()
            return Anchor(match[0] == r"\A")
        if match[0] in (r"\b", r"\B", r"\<", r"\>"):
            raise PatternRefused(f"a word boundary ({match[0]}) is not supported")
        return self._class(match[0])

    def _bracket(self) -> str:
        """The text of the class that begins here, with the classes inside it."""
        at, depth = self._at, 0
        while True:
            opening = re.compile(r"\[\^?-*").match(self._text, at)
            if opening is not None:
                depth += 1
                at = opening.end() + (self._text.startswith("]", opening.end()) and opening[0][-1] != "-")
                continue
            if at >= len(self._text):
                raise PatternRefused(f"unclosed class at character {self._at}")
            if self._text[at] == "\\":
                at += 2
                continue
            at += 1
            if self._text[at - 1] == "]":
                depth -= 1
                if depth == 0:
                    return self._text[self._at : at]

    def _class(self, written: str, asked: str | None = None) -> Class:
        """The characters of what is `written` here, asked for by another name where it has one."""
        self._at += len(written)
        return Class(class_ranges("".join(sorted(self._flags & {"i", "s"})), asked or written))


def written(node: Node) -> str:
    """A reduced pattern in Rust's dialect again, every class as ranges and without a slash."""
    match node:
        case Class():
            ranges = "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in node.ranges)
            return f"[{ranges}]"
        case Sequence():
            return "".join(map(written, node.parts))
        case Choice():
            return f"(?:{'|'.join(map(written, node.options))})"
        case Repeat():
            return f"(?:{written(node.body)}){{{node.least},{'' if node.most is None else node.most}}}"
        case _:
            raise AssertionError(node)


def _without_slashes(pattern: str) -> str:
    return re.sub(r"(?s)\\.|/", lambda match: r"\x2f" if match[0][-1] == "/" else match[0], pattern)


def _single(code: int) -> Class:
    return Class(((code, code),))


@functools.lru_cache(maxsize=1024)
def class_ranges(flags: str, atom: str) -> tuple[tuple[int, int], ...]:
    """The characters that `atom`, an expression for a single one, matches under `flags`, as rising ranges.

    Raises `PatternRefused` where it is no such expression.
    """
    atom = f"(?{flags}:{atom})"
    if (codes := _codes(LLMatcher.grammar_from_regex(atom), MASKS)) is not None:
        return _ranges(codes)
    others = f"start: OTHERS\nOTHERS: /(?s:.)/ & ~/{_without_slashes(atom)}/\n"
    if (codes := _codes(LLMatcher.grammar_from_lark(others), MASKS)) is not None:
        return _gaps(_ranges(codes))
    codes = _codes(LLMatcher.grammar_from_regex(atom), None)
    assert codes is not None
    return _ranges(codes)


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def _codes(grammar: str, max_masks: int | None) -> list[int] | None:
    """The code points, rising, of the single characters under `grammar`; None where more than `max_masks` masks would
    be needed to see them."""
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    if matcher.is_error():
        raise PatternRefused("holds a class that cannot be read")
    bits = np.zeros((_byte_tokenizer().vocab_size + 31) // 32, np.int32)
    found: list[int] = []
    # Lead bytes and what they make of the code point; each goes on with the bytes that its mask allows.
    masks, pending = 0, [((), 0, 0)]  # type: int, list[tuple[tuple[int, ...], int, int]]
    while pending:
        path, value, left = pending.pop()
        masks += 1
        if max_masks is not None and masks > max_masks:
            return None
        branch = matcher.deep_copy()
        branch.try_consume_tokens(list(path))
        branch.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:256]).tolist()
        deeper = []
        for byte in allowed:
            follow = left - 1 if path else 0 if byte < 0x80 else 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
            bits_of_byte = byte & 0x3F if path else byte if byte < 0x80 else byte & (0x3F >> follow)
            code = value << 6 | bits_of_byte
            if follow:
                deeper.append(((*path, byte), code, follow))
            else:
                found.append(code)
        pending.extend(reversed(deeper))
    return sorted(found)


def _ranges(codes: list[int]) -> tuple[tuple[int, int], ...]:
    """Rising code points as ranges."""
    found: list[tuple[int, int]] = []
    for code in codes:
        if found and code == found[-1][1] + 1:
            found[-1] = (found[-1][0], code)
        else:
            found.append((code, code))
    return tuple(found)


def _gaps(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """All characters that are in none of the ranges. Surrogates are no characters."""
    found, low = [], 0
    for first, last in (*ranges, (0x110000, 0x110000)):
        found += [(low, min(first - 1, 0xD7FF)), (max(low, 0xE000), first - 1)]
        low = last + 1
    return tuple(part for part in found if part[0] <= part[1])
