"""Regular expressions of ECMA-262 with the flag u, as JSON Schema has them, read into what a JSON string may hold.

The result is in the backend's dialect (Rust's), over the *escaped* text between the quotes of a JSON string. Anchors,
and look-around at either end of an anchored pattern, are resolved here; all other assertions are refused.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from specdec.grammar.spelling import ESCAPES, PLAIN, Range, Spelling, escapes, runs

MAX_REPEAT = 10_000  # more would be no bound that anyone can check
MAX_PATTERN = 32_000  # characters

NOTHING = "(/a/ & /b/)"

_SPACES: tuple[tuple[int, int], ...] = (
    *((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_CATEGORIES = {
    "Letter": "L",
    "Cased_Letter": "LC",
    "Uppercase_Letter": "Lu",
    "Lowercase_Letter": "Ll",
    "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm",
    "Other_Letter": "Lo",
    "Mark": "M",
    "Nonspacing_Mark": "Mn",
    "Spacing_Mark": "Mc",
    "Enclosing_Mark": "Me",
    "Number": "N",
    "Decimal_Number": "Nd",
    "digit": "Nd",
    "Letter_Number": "Nl",
    "Other_Number": "No",
    "Punctuation": "P",
    "punct": "P",
    "Connector_Punctuation": "Pc",
    "Dash_Punctuation": "Pd",
    "Open_Punctuation": "Ps",
    "Close_Punctuation": "Pe",
    "Initial_Punctuation": "Pi",
    "Final_Punctuation": "Pf",
    "Other_Punctuation": "Po",
    "Symbol": "S",
    "Math_Symbol": "Sm",
    "Currency_Symbol": "Sc",
    "Modifier_Symbol": "Sk",
    "Other_Symbol": "So",
    "Separator": "Z",
    "Space_Separator": "Zs",
    "Line_Separator": "Zl",
    "Paragraph_Separator": "Zp",
}
_SHORT_CATEGORIES = frozenset(_CATEGORIES.values())
_UNCASED = ("Alphabetic", "Uppercase", "Lowercase", "ID_Start", "ID_Continue", "Emoji_Presentation")


class PatternRefused(Exception):
    """The pattern is not ECMA-262, or asks for what is not a regular language."""


@dataclass(frozen=True, slots=True)
class Class:
    """One character out of `ranges` and `properties` (as `p{..}` or `P{..}`), or one that is in none of them."""

    ranges: tuple[tuple[int, int], ...] = ()
    properties: tuple[str, ...] = ()
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Anchor:
    """`^` or `$`."""

    start: bool


@dataclass(frozen=True, slots=True)
class Look:
    """A look-around assertion."""

    ahead: bool
    positive: bool
    body: Node


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other; empty for the empty text."""

    parts: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` times; None for no bound."""

    body: Node
    least: int
    most: int | None


Node = Class | Anchor | Look | Sequence | Choice | Repeat

EMPTY = Sequence()


@functools.lru_cache(maxsize=1024)
def content_expression(pattern: str, spelling: Spelling = PLAIN) -> str:
    """The terminal expression, in the backend's notation, of the string contents that `pattern` is found in.

    Raises `PatternRefused`."""
    if len(pattern) > MAX_PATTERN:
        raise PatternRefused(f"is longer than {MAX_PATTERN} characters")
    return _search(_Reader(pattern).whole(), spelling)


def literal(text: str) -> str:
    """A regular expression for exactly `text`, which is already escaped as JSON escapes it."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def length_expression(least: int, most: int | None, spelling: Spelling) -> str:
    """The string contents of `least` to `most` characters."""
    return f"/{spelling.character}{{{least},{'' if most is None else most}}}/"


def _search(node: Node, spelling: Spelling) -> str:
    options = node.options if isinstance(node, Choice) else (node,)
    expressions = [_option(option, spelling) for option in options]
    return expressions[0] if len(expressions) == 1 else "(" + " | ".join(expressions) + ")"


def _option(node: Node, spelling: Spelling) -> str:
    """One alternative of the whole pattern: look-around at its anchored ends becomes a conjunction."""
    parts = list(node.parts) if isinstance(node, Sequence) else [node]
    while len(parts) == 1 and isinstance(parts[0], Sequence):
        parts = list(parts[0].parts)
    conditions: list[str] = []
    if len(parts) > 1 and parts[0] == Anchor(True):
        while len(parts) > 1 and isinstance(look := parts[1], Look) and look.ahead:
            conditions.append(
                ("" if look.positive else "~") + _group(_search(_joined(Anchor(True), look.body), spelling))
            )
            del parts[1]
    if len(parts) > 1 and parts[-1] == Anchor(False):
        while len(parts) > 1 and isinstance(look := parts[-2], Look) and not look.ahead:
            conditions.append(
                ("" if look.positive else "~") + _group(_search(_joined(look.body, Anchor(False)), spelling))
            )
            del parts[-2]
    variants = _variants(Sequence(tuple(parts)))
    texts = []
    for (at_start, at_end), body in variants.items():
        before, after = "" if at_start else spelling.anything, "" if at_end else spelling.anything
        texts.append(before + _render(body, spelling) + after)
    found = f"/({'|'.join(texts)})/" if texts else NOTHING
    return "(" + " & ".join([found, *conditions]) + ")" if conditions else found


def _joined(first: Node, second: Node) -> Node:
    """The two in a row, with a choice on either side spread out so that each option is a sequence."""
    if isinstance(first, Choice):
        return Choice(tuple(_joined(option, second) for option in first.options))
    if isinstance(second, Choice):
        return Choice(tuple(_joined(first, option) for option in second.options))
    parts = [*(first.parts if isinstance(first, Sequence) else (first,))]
    return Sequence((*parts, *(second.parts if isinstance(second, Sequence) else (second,))))


def _group(expression: str) -> str:
    return expression if expression.startswith("(") else f"({expression})"


Variants = dict[tuple[bool, bool], Node]


def _variants(node: Node) -> Variants:
    """The node without anchors, by whether it must begin where the string begins and end where it ends."""
    match node:
        case Class():
            return {(False, False): node}
        case Anchor():
            return {(node.start, not node.start): EMPTY}
        case Look():
            raise PatternRefused("look-around is only possible next to an anchor at either end")
        case Choice():
            found: Variants = {}
            for option in node.options:
                for key, body in _variants(option).items():
                    found[key] = Choice((found[key], body)) if key in found else body
            return found
        case Sequence():
            found = {(False, False): EMPTY}
            for part in node.parts:
                found = _concatenated(found, _variants(part))
            return found
        case Repeat():
            inner = _variants(node.body)
            if set(inner) <= {(False, False)}:
                return {key: Repeat(body, node.least, node.most) for key, body in inner.items()}
            if node.most == 1:
                options = (EMPTY, node.body) if node.least == 0 else (node.body,)
                return _variants(Choice(options))
            raise PatternRefused("an anchor cannot be repeated")


def _concatenated(left: Variants, right: Variants) -> Variants:
    found: Variants = {}
    for (start, stop), first in left.items():
        for (begin, end), second in right.items():
            if not stop and not begin:
                key, body = (start, end), _pair(first, second)
            elif begin and not stop and _nullable(first):  # nothing stands before the start
                key, body = (True, end), second
            elif stop and not begin and _nullable(second):  # nothing follows the end
                key, body = (start, True), first
            elif stop and begin and _nullable(first) and _nullable(second):
                key, body = (True, True), EMPTY
            else:
                continue
            found[key] = Choice((found[key], body)) if key in found else body
    return found


def _pair(first: Node, second: Node) -> Node:
    if first == EMPTY:
        return second
    if second == EMPTY:
        return first
    return Sequence((*(first.parts if isinstance(first, Sequence) else (first,)), second))


def _nullable(node: Node) -> bool:
    match node:
        case Sequence():
            return all(map(_nullable, node.parts))
        case Choice():
            return any(map(_nullable, node.options))
        case Repeat():
            return node.least == 0 or _nullable(node.body)
        case _:
            return False


def _render(node: Node, spelling: Spelling) -> str:
    match node:
        case Class():
            return _render_class(node, spelling)
        case Sequence():
            return "".join(_render(part, spelling) for part in node.parts)
        case Choice():
            return "(" + "|".join(_render(option, spelling) for option in node.options) + ")"
        case Repeat():
            most = "" if node.most is None else str(node.most)
            return f"({_render(node.body, spelling)}){{{node.least},{most}}}"
        case _:
            raise AssertionError(node)


def _render_class(node: Class, spelling: Spelling) -> str:
    ranges = "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in node.ranges)
    members = ranges + "".join("\\" + name for name in node.properties)
    sign = "^" if node.negated else ""
    raw = f"[[{sign}{members}]&&{spelling.raw}]" if members else spelling.raw if node.negated else "[a&&b]"
    special = [
        literal(text) for code, text in ESCAPES.items() if _members(node, code, code, "Cc" if code < 32 else "Po")
    ]
    for run in runs(spelling.ranges):
        special += escapes(_members(node, *run))
    return "(" + "|".join([raw, *special]) + ")" if special else raw


def _members(node: Class, first: int, last: int, kind: str) -> list[Range]:
    """What a class holds of the characters from `first` to `last`, all of one category, `kind`."""
    found = [(max(low, first), min(high, last)) for low, high in node.ranges if low <= last and first <= high]
    for name in node.properties:
        found += _with_property(name, first, last, kind)
    return _between(found, first, last) if node.negated else found


def _with_property(name: str, first: int, last: int, kind: str) -> list[Range]:
    """Those of the characters from `first` to `last`, all of one category, `kind`, that have a property."""
    body, found = name[2:-1], list[Range]()
    key, _, value = body.rpartition("=")
    if key == "Script":
        if kind == "Cn" or last < 0x80:
            found = [(first, last)] if value == ("Unknown" if kind == "Cn" else "Common") else []
        else:
            raise PatternRefused(f"the property {body} is not known of characters that have no tokens")
    elif body in ("Any", "ASCII", "White_Space"):
        of = {"Any": ((0, 0x10FFFF),), "ASCII": ((0, 0x7F),), "White_Space": (*_SPACES[:-1], (0x85, 0x85))}[body]
        found = [(max(low, first), min(high, last)) for low, high in of if low <= last and first <= high]
    elif body in _UNCASED:
        if kind != "Cn" and last >= 0x80:
            raise PatternRefused(f"the property {body} is not known of characters that have no tokens")
    elif kind.startswith(_CATEGORIES.get(body, body)) or (body == "LC" and kind in ("Lu", "Ll", "Lt")):
        found = [(first, last)]
    return found if name[0] == "p" else _between(found, first, last)


def _between(ranges: list[Range], first: int, last: int) -> list[Range]:
    """What ranges leave of the characters from `first` to `last`."""
    found = []
    for low, high in (*sorted(ranges), (last + 1, last + 1)):
        if first < low:
            found.append((first, low - 1))
        first = max(first, high + 1)
    return found


class _Reader:
    """A recursive descent over one pattern."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        node = self._choice()
        if self._at < len(self._text):
            raise PatternRefused(f"unmatched ) at character {self._at}")
        return node

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > 60:
            raise PatternRefused("nests more than 60 groups")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._quantified(self._atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _quantified(self, node: Node) -> Node:
        match = re.compile(r"\*|\+|\?|\{([0-9]+)(,([0-9]*))?\}").match(self._text, self._at)
        if match is None:
            return node
        if isinstance(node, Anchor | Look):
            raise PatternRefused(f"nothing to repeat at character {self._at}")
        self._at = match.end()
        self._take("?")  # lazy: the same language
        if match[0] in "*+?":
            return Repeat(node, int(match[0] == "+"), 1 if match[0] == "?" else None)
        least = int(match[1])
        most = least if match[2] is None else int(match[3]) if match[3] else None
        if max(least, most or 0) > MAX_REPEAT:
            raise PatternRefused(f"repeats more than {MAX_REPEAT} times")
        if most is not None and most < least:
            raise PatternRefused(f"the repetition {match[0]} is out of order")
        return Repeat(node, least, most)

    def _atom(self) -> Node:
        character = self._text[self._at]
        if character == "(":
            return self._parenthesis()
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape()
        if character in "*+?{":
            raise PatternRefused(f"nothing to repeat at character {self._at}")
        self._at += 1
        if character == ".":
            return Class(((10, 10), (13, 13), (0x2028, 0x2029)), negated=True)
        if character in "^$":
            return Anchor(character == "^")
        return _single(character)

    def _parenthesis(self) -> Node:
        match = re.compile(r"\((\?(:|=|!|<=|<!|<[A-Za-z_$][\w$]*>))?").match(self._text, self._at)
        assert match is not None
        kind = match[2]
        self._at = match.end()
        if kind is None and self._text.startswith("?", self._at):
            raise PatternRefused(f"a group of an unknown kind at character {match.start()}")
        body = self._choice()
        if not self._take(")"):
            raise PatternRefused(f"unclosed group at character {match.start()}")
        if kind in ("=", "!", "<=", "<!"):
            return Look("<" not in kind, "=" in kind, body)
        return body

    def _escape(self) -> Node:
        found = self._escaped()
        return found if isinstance(found, Class) else _single(found)

    def _escaped(self, inside: bool = False) -> Class | str:
        """What follows a backslash: a class, or one character."""
        start = self._at
        self._at += 1
        if self._at >= len(self._text):
            raise PatternRefused("ends in a backslash")
        character = self._text[self._at]
        self._at += 1
        if character in "dDwWsS":
            ranges = {"d": ((48, 57),), "w": ((48, 57), (65, 90), (95, 95), (97, 122)), "s": _SPACES}
            return Class(ranges[character.lower()], negated=character.isupper())
        if character in "pP":
            return self._property(character)
        if character in "fnrtv":
            return {"f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}[character]
        if character == "b" and inside:
            return "\b"
        if character in "bB":
            raise PatternRefused(f"a word boundary (\\{character}) is not supported")
        if character == "0" and not self._text[self._at : self._at + 1].isdigit():
            return "\0"
        if character.isdigit() or character == "k":
            raise PatternRefused("a back-reference is not a regular language")
        for expression in (r"c([A-Za-z])", r"x([0-9A-Fa-f]{2})", r"u([0-9A-Fa-f]{4})", r"u\{([0-9A-Fa-f]+)\}"):
            match = re.compile(expression).match(self._text, self._at - 1)
            if match is not None:
                self._at = match.end()
                code = ord(match[1]) % 32 if character == "c" else int(match[1], 16)
                return self._paired(code)
        if character.isascii() and not character.isalnum():
            return character
        raise PatternRefused(f"an unknown escape \\{character} at character {start}")

    def _paired(self, code: int) -> str:
        """The character of a code unit, together with the low surrogate that may follow."""
        if 0xD800 <= code < 0xDC00:
            match = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(self._text, self._at)
            if match is not None:
                self._at = match.end()
                return chr(0x10000 + (code - 0xD800) * 0x400 + int(match[1], 16) - 0xDC00)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise PatternRefused(f"{code:#x} is no character")
        return chr(code)

    def _property(self, letter: str) -> Class:
        match = re.compile(r"\{([A-Za-z_]+(?:=[A-Za-z_]+)?)\}").match(self._text, self._at)
        if match is None:
            raise PatternRefused(f"\\{letter} needs the name of a property in braces")
        self._at = match.end()
        key, _, value = match[1].rpartition("=")
        known = value in _CATEGORIES or value in _SHORT_CATEGORIES
        if key in ("Script", "sc"):
            name = f"Script={value}"
        elif key in ("General_Category", "gc") or (not key and known):
            if not known:
                raise PatternRefused(f"the property {match[1]} is not supported")
            name = _CATEGORIES.get(value, value)
        elif not key and value in ("Any", "ASCII", "White_Space", *_UNCASED):
            name = value
        else:
            raise PatternRefused(f"the property {match[1]} is not supported")
        return Class(properties=(f"{letter}{{{name}}}",))

    def _class(self) -> Node:
        start = self._at
        self._at += 1
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        properties: list[str] = []
        nested: list[Class] = []
        while not self._take("]"):
            if self._at >= len(self._text):
                raise PatternRefused(f"unclosed class at character {start}")
            low = self._member()
            is_range = self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] != "]"
            if is_range and self._at + 1 < len(self._text):
                self._at += 1
                high = self._member()
                if isinstance(low, Class) or isinstance(high, Class) or high < low:
                    raise PatternRefused(f"a range out of order in the class at character {start}")
                ranges.append((ord(low), ord(high)))
            elif isinstance(low, Class):
                nested.append(low)
            else:
                ranges.append((ord(low), ord(low)))
        for item in nested:
            if item.negated:
                ranges.extend(_gaps(item.ranges))
            else:
                ranges.extend(item.ranges)
            properties.extend(item.properties)
        return Class(tuple(ranges), tuple(properties), negated)

    def _member(self) -> Class | str:
        if self._text[self._at] == "\\":
            return self._escaped(inside=True)
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False


def _single(character: str) -> Class:
    if 0xD800 <= ord(character) < 0xE000:
        raise PatternRefused("a lone surrogate is no character")
    return Class(((ord(character), ord(character)),))


def _gaps(ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """What lies between ranges; surrogates are no characters."""
    found, low = [], 0
    for first, last in (*sorted(ranges), (0x110000, 0x110000)):
        if low < first:
            found.append((low, first - 1))
        low = last + 1
    return [
        part
        for low, high in found
        for part in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high))
        if part[0] <= part[1]
    ]
