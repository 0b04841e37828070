"""Structural tags: free text in which tags begin, whose contents follow a schema or a pattern. Read from xgrammar's
format, which vLLM and SGLang share, into one grammar for llguidance, since xgrammar enforces only a part of JSON
Schema. Knows no tokenizer.

Where a part of a text has no end of its own (free text, a pattern), it ends at the first place where what follows it
may stand. What would leave the end of a part, or the choice between two, to a guess is refused by its JSON pointer.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import InvalidRequest
from specdec.grammar.patterns import PatternRefused
from specdec.grammar.refusal import refusal
from specdec.grammar.rust_patterns import NOTHING, one_of, reduced, written
from specdec.grammar.schema import PreparedSchema
from specdec.grammar.spec import Regex

ANY = "(?s:.)"
NUMBER_GOES_ON = frozenset("0123456789.eE+-")
JSON_BEGINS = frozenset('{["-0123456789tfn')
MAX_CHARS = 10_000
MAX_DEPTH = 16

# What each format may say, with what it means where it is left out; `...` for what must be there.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "const_string": {"value": ...},
    "json_schema": {
        "json_schema": ...,
        "style": "json",
        "any_order": False,
        "max_whitespace_cnt": None,
        "excludes": [],
    },
    "any_text": {"excludes": [], "max_tokens": None, "max_chars": None},
    "regex": {"pattern": ...},
    "sequence": {"elements": ...},
    "or": {"elements": ...},
    "tag": {"begin": ..., "content": ..., "end": ...},
    "triggered_tags": {
        "triggers": ...,
        "tags": ...,
        "at_least_one": False,
        "stop_after_first": False,
        "excludes": [],
    },
}


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the regular expression `pattern`. `literals` are all the texts it can be, where these are few."""

    pattern: str
    literals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Json:
    """A value under the schema with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Either:
    """One of several rows of parts. `pointer` is where the format stands, here and below."""

    options: tuple[tuple[Part, ...], ...]
    pointer: str


@dataclass(frozen=True, slots=True)
class Tags:
    """Free text in which tags begin where a trigger ends. Each tag comes with its trigger, and its parts after it."""

    tags: tuple[tuple[str, tuple[Part, ...]], ...]
    at_least_one: bool
    stop_after_first: bool
    excludes: tuple[str, ...]
    pointer: str


Part = Text | Json | Either | Tags


@dataclass(frozen=True, slots=True)
class StructuralGrammar:
    """`lark` is the grammar of the whole text; in it `@schema0`, `@schema1` ... are the grammars of `schemas`, each
    with the whitespace (as in `JsonSchema`; None for the caller's own) that its JSON may have. What the rule of a
    schema matches is captured under its number."""

    lark: str
    schemas: tuple[tuple[PreparedSchema, str | None], ...]


def structural_grammar(
    tag: Mapping[str, Any],
    param: str,
    prepare: Callable[[str], PreparedSchema],
    check_regex: Callable[[Regex, str], object],
) -> StructuralGrammar:
    """The grammar of a structural tag: `{"format": {...}}`, or the older `{"structures": [...], "triggers": [...]}`.

    `prepare` makes a schema ready, and `check_regex` raises `InvalidRequest` for a pattern that llguidance does not
    take. Raises `InvalidRequest` for `param`, with the JSON pointer of what is wrong or cannot be enforced.
    """
    reader = _Reader(param, prepare, check_regex)
    parts, pointer = reader.whole(tag)
    return StructuralGrammar(_Writer(param).whole(parts, pointer), tuple(reader.schemas))


@dataclass(slots=True)
class _Reader:
    """From JSON to parts."""

    param: str
    prepare: Callable[[str], PreparedSchema]
    check_regex: Callable[[Regex, str], object]
    schemas: list[tuple[PreparedSchema, str | None]] = field(default_factory=list)

    def whole(self, tag: Mapping[str, Any]) -> tuple[tuple[Part, ...], str]:
        fields = {key: value for key, value in tag.items() if not (key == "type" and value == "structural_tag")}
        if set(fields) == {"format"}:
            return self.format(fields["format"], "/format", 0), "/format"
        if set(fields) != {"structures", "triggers"}:
            raise self.wrong("", "must hold format, or structures and triggers")
        tags = []
        for number, item in enumerate(self.list_of(dict, fields["structures"], "/structures", 1)):
            if set(item) != {"begin", "schema", "end"}:
                raise self.wrong(f"/structures/{number}", "must hold begin, schema and end")
            tags.append((item["begin"], {"type": "json_schema", "json_schema": item["schema"]}, item["end"]))
        pointers = [(f"/structures/{number}", f"/structures/{number}") for number in range(len(tags))]
        return (self.tags(fields["triggers"], tags, pointers, "", {}, 0),), ""

    def format(self, value: object, pointer: str, depth: int) -> tuple[Part, ...]:
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise self.wrong(pointer, "must be an object with a type")
        kind = value["type"]
        if kind not in FIELDS:
            raise self.refused(pointer, f"the type {kind!r} is not supported, only {', '.join(FIELDS)}")
        if depth > MAX_DEPTH:
            raise refusal(self.param, f"{pointer}: nests more than {MAX_DEPTH} formats", "too_large")
        given = self.fields(kind, {key: item for key, item in value.items() if key != "type"}, pointer)
        match kind:
            case "const_string":
                text = self.string(given["value"], f"{pointer}/value")
                return (_literal(text),) if text else ()
            case "any_text":
                return (self.any_text(given, pointer),)
            case "regex":
                return (self.regex(given["pattern"], f"{pointer}/pattern"),)
            case "json_schema":
                return (self.json(given, pointer),)
            case "sequence":
                elements = self.list_of(object, given["elements"], f"{pointer}/elements")
                parts = [self.format(item, f"{pointer}/elements/{i}", depth + 1) for i, item in enumerate(elements)]
                return tuple(itertools.chain(*parts))
            case "or":
                elements = self.list_of(object, given["elements"], f"{pointer}/elements", 1)
                options = [self.format(item, f"{pointer}/elements/{i}", depth + 1) for i, item in enumerate(elements)]
                return options[0] if len(options) == 1 else (Either(tuple(options), pointer),)
            case "tag":
                begin = self.string(given["begin"], f"{pointer}/begin")
                return self.tag(begin, given["content"], given["end"], (pointer, f"{pointer}/content"), depth)
            case _:
                return (self.triggered(given, pointer, depth),)

    def fields(self, kind: str, given: Mapping[str, object], pointer: str) -> dict[str, Any]:
        """What a format says, and what it means to say where it is silent."""
        for name in given:
            if name not in FIELDS[kind]:
                raise self.wrong(f"{pointer}/{name}", f"is not a field of {kind}")
        for name, value in FIELDS[kind].items():
            if value is ... and name not in given:
                raise self.wrong(pointer, f"{kind} needs {name}")
        return {**FIELDS[kind], **given}

    def any_text(self, given: Mapping[str, Any], pointer: str) -> Text:
        if given["max_tokens"] is not None:
            raise self.refused(f"{pointer}/max_tokens", "is not supported; max_chars is")
        excludes = self.list_of(str, given["excludes"], f"{pointer}/excludes")
        count, most = given["max_chars"], ""
        if count is not None:
            if type(count) is not int or not 0 <= count <= MAX_CHARS:
                raise self.wrong(f"{pointer}/max_chars", f"must be a whole number up to {MAX_CHARS}")
            most = str(count)
        text = f"/{ANY}{{0,{most}}}/" if most else f"/{ANY}*/"
        if not all(excludes):
            raise self.wrong(f"{pointer}/excludes", "must hold strings that are not empty")
        return Text(f"({text} & ~/{ANY}*{_any_of(excludes)}{ANY}*/)" if excludes else text)

    def regex(self, value: object, pointer: str) -> Text:
        pattern = self.string(value, pointer)
        try:
            spec = Regex(pattern)
            self.check_regex(spec, self.param)
            node = reduced(pattern)
        except PatternRefused as error:
            raise refusal(self.param, f"{pointer}: {error}", "invalid_regex") from error
        except InvalidRequest as error:
            raise refusal(self.param, f"{pointer}: {error.message}", error.code) from error
        if node == NOTHING:
            raise refusal(self.param, f"{pointer}: no text satisfies it", "unsatisfiable")
        return Text(f"/{written(node)}/")

    def json(self, given: Mapping[str, Any], pointer: str) -> Json:
        for name in ("style", "any_order", "excludes"):
            if given[name] != FIELDS["json_schema"][name]:
                raise self.refused(
                    f"{pointer}/{name}", f"is supported only where it is {FIELDS['json_schema'][name]!r}"
                )
        count = given["max_whitespace_cnt"]
        if count is not None and (type(count) is not int or not 0 <= count <= 1_000):
            raise self.wrong(f"{pointer}/max_whitespace_cnt", "must be a whole number up to 1000")
        whitespace = None if count is None else f"[ \\t\\r\\n]{{0,{count}}}" if count else "compact"
        schema = given["json_schema"]
        if not isinstance(schema, dict | bool):
            raise self.wrong(f"{pointer}/json_schema", f"must be an object or a boolean, got {type(schema).__name__}")
        try:
            prepared = self.prepare(json.dumps(schema, ensure_ascii=False))
        except InvalidRequest as error:
            raise refusal(self.param, f"{pointer}/json_schema: {error.message}", error.code) from error
        checked = [keyword.pointer for keyword in prepared.keywords if keyword.verdict == "checked"]
        if checked:
            message = f"{pointer}/json_schema: {checked[0]}: the grammar of a tag cannot say what this keyword asks for"
            raise refusal(self.param, message, "unsupported_schema")
        self.schemas.append((prepared, whitespace))
        return Json(len(self.schemas) - 1)

    def tag(self, begin: str, content: object, end: object, pointers: tuple[str, str], depth: int) -> tuple[Part, ...]:
        """The parts of a tag; `pointers` lead to it and to its content."""
        ends = self.list_of(str, end, f"{pointers[0]}/end", 1) if isinstance(end, list) else [end]
        ends = [self.string(item, f"{pointers[0]}/end") for item in ends]
        if len(ends) > 1 and not all(ends):
            raise self.wrong(f"{pointers[0]}/end", "must hold strings that are not empty")
        for first, second in itertools.permutations(ends, 2):
            if second.startswith(first):
                raise self.refused(f"{pointers[0]}/end", f"{second!r} begins with {first!r}")
        parts = self.format(content, pointers[1], depth + 1)
        return (*((_literal(begin),) if begin else ()), *parts, *((_literal(*ends),) if ends[0] else ()))

    def triggered(self, given: Mapping[str, Any], pointer: str, depth: int) -> Tags:
        tags, pointers = [], []
        for number, item in enumerate(self.list_of(dict, given["tags"], f"{pointer}/tags", 1)):
            place = f"{pointer}/tags/{number}"
            inner = self.fields("tag", {key: value for key, value in item.items() if key != "type"}, place)
            if item.get("type", "tag") != "tag":
                raise self.wrong(f"{place}/type", "must be tag")
            tags.append((inner["begin"], inner["content"], inner["end"]))
            pointers.append((place, f"{place}/content"))
        return self.tags(given["triggers"], tags, pointers, pointer, given, depth)

    def tags(
        self,
        triggers: object,
        tags: Seq[tuple[object, object, object]],
        pointers: Seq[tuple[str, str]],
        pointer: str,
        given: Mapping[str, Any],
        depth: int,
    ) -> Tags:
        """Triggered tags, each with where it stands and where its content does."""
        known = self.list_of(str, triggers, f"{pointer}/triggers", 1)
        excludes = self.list_of(str, given.get("excludes", []), f"{pointer}/excludes")
        if not all((*known, *excludes)):
            raise self.wrong(f"{pointer}/triggers", "triggers and excludes must hold strings that are not empty")
        flags = {name: given.get(name, False) for name in ("at_least_one", "stop_after_first")}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise self.wrong(f"{pointer}/{name}", "must be true or false")
        found = []
        for (begin, content, end), places in zip(tags, pointers, strict=True):
            text = self.string(begin, f"{places[0]}/begin")
            trigger = [item for item in known if text.startswith(item)]
            if len(trigger) != 1:
                raise self.wrong(f"{places[0]}/begin", f"must begin with exactly one of the triggers, got {text!r}")
            found.append((trigger[0], self.tag(text[len(trigger[0]) :], content, end, places, depth)))
        for number, item in enumerate(known):
            if item not in {trigger for trigger, _ in found}:
                raise self.wrong(f"{pointer}/triggers/{number}", f"no tag begins with {item!r}")
        return Tags(tuple(found), **flags, excludes=tuple(excludes), pointer=pointer)

    def string(self, value: object, pointer: str) -> str:
        if not isinstance(value, str):
            raise self.wrong(pointer, f"must be a string, got {type(value).__name__}")
        return value

    def list_of(self, kind: type, value: object, pointer: str, least: int = 0) -> list[Any]:
        if not isinstance(value, list) or len(value) < least:
            raise self.wrong(pointer, f"must be a list of {least} or more")
        for number, item in enumerate(value):
            if not isinstance(item, kind):
                raise self.wrong(f"{pointer}/{number}", f"must be a {kind.__name__}, got {type(item).__name__}")
        return value

    def wrong(self, pointer: str, message: str) -> InvalidRequest:
        return refusal(self.param, f"{pointer}: {message}" if pointer else message, "invalid_structural_tag")

    def refused(self, pointer: str, message: str) -> InvalidRequest:
        return refusal(self.param, f"{pointer}: {message}", "unsupported_structural_tag")


class _Writer:
    """From parts to Lark. Every rule is written with what may follow it: some literals, the end of the text, or
    nothing that is known here."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}
        self._schemas: set[int] = set()
        self._names = itertools.count()

    def whole(self, parts: tuple[Part, ...], pointer: str) -> str:
        body = self._row(parts, True, pointer)
        for number in sorted(self._schemas):
            self._lines.append(f'json{number}[capture="{number}"]: @schema{number}')
        lines = [f"start: {body}", *self._lines, *(f"{name}: {text}" for text, name in self._terminals.items())]
        return "\n".join(lines) + "\n"

    def _row(self, parts: tuple[Part, ...], at_end: bool, pointer: str) -> str:
        """The body of a rule for `parts` in a row; `at_end` where the text ends after them."""
        symbols: list[str] = []
        place = 0
        while place < len(parts):
            part = parts[place]
            stop = place + 1
            while isinstance(part, Text) and stop < len(parts) and isinstance(parts[stop], Text):
                stop += 1
            follow = parts[stop : stop + 1]
            match part:
                case Text():
                    run = [item for item in parts[place:stop] if isinstance(item, Text)]
                    symbols += self._texts(run, at_end and not follow, pointer)
                case Json():
                    symbols.append(self._json(part, follow, at_end, pointer))
                case Either():
                    options = part.options
                    if follow and isinstance(follow[0], Text) and follow[0].literals:
                        # What follows tells where each option ends, so it is part of each.
                        options = tuple((*option, follow[0]) for option in options)
                        stop += 1
                    symbols.append(self._either(options, at_end and stop == len(parts), part.pointer))
                case Tags():
                    closing: tuple[str, ...] = ()
                    if follow and isinstance(follow[0], Text) and follow[0].literals:
                        closing = follow[0].literals
                        stop += 1
                    elif follow or not at_end:
                        raise self._unclear(part.pointer, "nothing says where the free text after its tags ends")
                    symbols.append(self._tags(part, closing))
            place = stop
        return " ".join(symbols) or '""'

    def _texts(self, run: list[Text], at_end: bool, pointer: str) -> list[str]:
        """A run of texts: literals that begin it are tokens of their own, the others are one, up to the first place
        where it may end."""
        symbols = []
        while run and run[0].literals:
            symbols.append(self._terminal(run.pop(0).pattern))
        if not run:
            return symbols
        body = " ".join(item.pattern for item in run)
        if run[-1].literals:
            # Not [lazy]: llguidance misses an end at the first byte of a lazy token.
            whole = self._terminal(body)
            longer = self._terminal(f"{whole} /{ANY}+/")
            return [*symbols, self._terminal(f"{whole} & ~{longer}")]
        if not at_end:
            raise self._unclear(pointer, "a regex or any_text must be followed by a const_string, a tag or the end")
        return [*symbols, self._terminal(body)]

    def _json(self, part: Json, follow: tuple[Part, ...], at_end: bool, pointer: str) -> str:
        self._schemas.add(part.number)
        literals = follow[0].literals if follow and isinstance(follow[0], Text) else ()
        if not literals and (follow or not at_end):
            raise self._unclear(pointer, "a json_schema must be followed by a const_string, an end or a tag")
        if any(text[0] in NUMBER_GOES_ON for text in literals):
            raise self._unclear(pointer, f"a number of a json_schema could go on with {literals[0]!r}")
        return f"json{part.number}"

    def _either(self, options: tuple[tuple[Part, ...], ...], at_end: bool, pointer: str) -> str:
        self._tell_apart(options, pointer)
        if not at_end and not all(options):
            raise self._unclear(pointer, "an alternative that is empty must be followed by a const_string or the end")
        name = self._name("either")
        self._lines.append(f"{name}: " + " | ".join(self._row(option, at_end, pointer) for option in options))
        return name

    def _tags(self, part: Tags, closing: tuple[str, ...]) -> str:
        """Free text up to a trigger and the rest of a tag, again and again; free text up to `closing` or the end."""
        by_trigger: dict[str, list[tuple[Part, ...]]] = {}
        for trigger, parts in part.tags:
            by_trigger.setdefault(trigger, []).append(parts)
        marks = [*by_trigger, *part.excludes, *closing]
        for first, second in itertools.permutations(marks, 2):
            if first in second:
                raise self._unclear(part.pointer, f"{first!r} is a part of {second!r}")
        beginning = f"~/{ANY}*{_any_of(marks)}{ANY}+/"
        free = self._terminal(f"(/{ANY}*/ & ~/{ANY}*{_any_of(marks)}{ANY}*/)")
        until = {mark: self._terminal(f"(/{ANY}*{_any_of([mark])}/ & {beginning})") for mark in (*by_trigger, *closing)}
        # With `stop_after_first` the text goes on with `closing` right after the tag.
        one_only = part.stop_after_first
        ending = (_literal(*closing),) if closing and one_only else ()
        rests = {
            trigger: self._either(tuple((*rest, *ending) for rest in options), one_only and not closing, part.pointer)
            for trigger, options in by_trigger.items()
        }
        tagged = " | ".join(f"{until[trigger]} {rest}" for trigger, rest in rests.items())
        directly = " | ".join(f"{self._terminal(_literal(trigger).pattern)} {rest}" for trigger, rest in rests.items())
        last = f"({' | '.join(until[mark] for mark in closing)})" if closing else free
        name = self._name("tags")
        if one_only:
            self._lines.append(f"{name}: {directly}" if part.at_least_one else f"{name}: {tagged} | {last}")
        else:
            first = f"({directly}) " if part.at_least_one else ""
            self._lines.append(f"{name}: {first}({tagged})* {last}")
        return name

    def _tell_apart(self, options: tuple[tuple[Part, ...], ...], pointer: str) -> None:
        """Refuse options that begin alike: the text is cut into its parts without a look ahead."""
        for first, second in itertools.combinations(options, 2):
            (kind, literals), (other, others) = _lead(first), _lead(second)
            if {kind, other} & {"open", "nested"}:
                raise self._unclear(pointer, "alternatives must begin with different literals, or all with JSON")
            for text, another in itertools.product(literals, others):
                if text == another and not (_then_json(first) and _then_json(second)):
                    raise self._unclear(pointer, f"two alternatives begin with {text!r}")
                if text != another and (text.startswith(another) or another.startswith(text)):
                    raise self._unclear(
                        pointer, f"alternatives begin with {text!r} and {another!r}, one with the other"
                    )
            if "json" in (kind, other) and any(text[0] in JSON_BEGINS for text in (*literals, *others)):
                raise self._unclear(pointer, f"JSON could begin as {(*literals, *others)[0]!r} does")

    def _terminal(self, pattern: str) -> str:
        return self._terminals.setdefault(pattern, f"T{len(self._terminals)}")

    def _name(self, kind: str) -> str:
        return f"{kind}{next(self._names)}"

    def _unclear(self, pointer: str, message: str) -> InvalidRequest:
        return refusal(self._param, f"{pointer}: {message}" if pointer else message, "unsupported_structural_tag")


def _literal(*texts: str) -> Text:
    return Text(f"/{_any_of(texts)}/", texts)


def _any_of(texts: Seq[str]) -> str:
    return f"(?:{'|'.join(written(one_of([text])) for text in texts)})"


def _lead(parts: tuple[Part, ...]) -> tuple[str, tuple[str, ...]]:
    """How a row begins: "empty", "literal" with the literals, "json", "open" (a pattern) or "nested"."""
    match parts[:1]:
        case ():
            return "empty", ()
        case (Text() as text,) if text.literals:
            return "literal", text.literals
        case (Text(),):
            return "open", ()
        case (Json(),):
            return "json", ()
        case _:
            return "nested", ()


def _then_json(parts: tuple[Part, ...]) -> bool:
    return len(parts) > 1 and isinstance(parts[1], Json)
