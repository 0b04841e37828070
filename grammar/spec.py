"""What a caller may ask a text to be: frozen values, checked when they are made. They know no tokenizer and no backend.

Sizes are bounded here, before native code sees the text: one input can crash a grammar library or hold it for minutes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specdec.errors import InvalidRequest

MAX_SCHEMA_BYTES = 256_000
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_BRANCHES = 2_000  # properties and alternatives together; compiling grows with their square
MAX_WHITESPACE_BYTES = 200
MAX_REGEX_BYTES = 8_000
MAX_CHOICES = 5_000
MAX_CHOICE_BYTES = 64_000
MAX_GRAMMAR_BYTES = 64_000
MAX_GRAMMAR_RULES = 1_000
MAX_GRAMMAR_DEPTH = 200
MAX_POINTER = 150  # characters of one in a message

_Path = tuple["_Path", object] | None  # how one comes to a value: the path of what holds it, and its key there
Whitespace = str  # "flexible", "compact", or a regular expression of blanks
Formats = Literal["assert", "annotate"]
PropertyOrder = Literal["schema", "any"]

_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_EBNF_QUIET = re.compile(r'"(?:[^"\\\n]|\\.)*+"|\[(?:[^\]\\\n]|\\.)*+\]|#[^\n]*')
_EBNF_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w.-]*[ \t]*::=", re.MULTILINE)
_LARK_QUIET = re.compile(r'"(?:[^"\\\n]|\\.)*+"|/(?:[^/\\\n]|\\.)++/|//[^\n]*')
# Blanks, classes of them, groups, alternatives and counts: nothing that could match anything else.
_BLANKS = re.compile(r"(?:[ \t\r\n]|\\[tnr]|\[(?:[ \t\r\n]|\\[tnr])+\]|\(\?:|[()?*+|]|\{\d{1,4}(?:,\d{0,4})?\})+")
_BRANCHING = ("properties", "patternProperties", "$defs", "definitions", "anyOf", "oneOf", "allOf", "prefixItems")


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that a schema accepts. `schema` is the schema (an object, or true or false) or its JSON text; it is kept as
    JSON text. `formats` "assert" enforces `format` and refuses those it does not know; "annotate" ignores them all.

    `whitespace` "compact" allows none between tokens; "flexible" allows, wherever JSON allows whitespace inside the
    value, one space, or one line break and up to 40 spaces and tabs: enough for indented output, and a bound for models
    would run on in blanks. Anything else is a regular expression that matches such a run of blanks.

    Keys come in the order of the schema, or where `property_order` is "any" in any order; then more of the schema is
    checked while the text is written, which takes longer.

    Raises `InvalidRequest` for text that is not a JSON object or boolean, or one above 256 kB, 64 levels or 2,000
    branches (properties and alternatives in all).
    """

    schema: str | bool | Mapping[str, Any]
    whitespace: Whitespace = "flexible"
    formats: Formats = "assert"
    property_order: PropertyOrder = "schema"

    def __post_init__(self) -> None:
        _check_whitespace(self.whitespace)
        _check_formats(self.formats)
        if self.property_order not in ("schema", "any"):
            raise InvalidRequest("property_order", f"must be schema or any, got {self.property_order!r}")
        object.__setattr__(self, "schema", _schema_text(self.schema))

    @property
    def text(self) -> str:
        """The schema as JSON text, its keys in the caller's order."""
        assert isinstance(self.schema, str)
        return self.schema


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object. `whitespace` as in `JsonSchema`."""

    whitespace: Whitespace = "flexible"

    def __post_init__(self) -> None:
        _check_whitespace(self.whitespace)


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that a regular expression matches from end to end (Rust's dialect: no look-around, no back-references).

    Raises `InvalidRequest` for a pattern above 8 kB.
    """

    pattern: str

    def __post_init__(self) -> None:
        _check_text("pattern", self.pattern, MAX_REGEX_BYTES)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some strings. Raises `InvalidRequest` for none of them, an empty or repeated one, or more than 64 kB."""

    options: Sequence[str]

    def __post_init__(self) -> None:
        if not isinstance(self.options, list | tuple):
            raise InvalidRequest("options", f"must be a list of strings, got {type(self.options).__name__}")
        if not 1 <= len(self.options) <= MAX_CHOICES:
            raise InvalidRequest("options", f"must hold 1 to {MAX_CHOICES} strings, got {len(self.options)}")
        for option in self.options:
            _check_text("options", option, MAX_CHOICE_BYTES)
            if not option:
                raise InvalidRequest("options", "must hold strings that are not empty")
        if sum(map(len, self.options)) > MAX_CHOICE_BYTES:
            raise InvalidRequest("options", f"must be at most {MAX_CHOICE_BYTES} bytes together", code="too_large")
        if len(set(self.options)) < len(self.options):
            raise InvalidRequest("options", "must hold each string once")
        object.__setattr__(self, "options", tuple(self.options))


@dataclass(frozen=True, slots=True)
class Ebnf:
    """Text that a grammar derives from its rule `root`; rules are written `name ::= ...`, as in GBNF.

    Raises `InvalidRequest` for a grammar above 64 kB, 1,000 rules or 200 nested parentheses.
    """

    text: str

    def __post_init__(self) -> None:
        _check_text("text", self.text, MAX_GRAMMAR_BYTES)
        bare = _EBNF_QUIET.sub("", self.text)
        rules = bare.count("::=")
        if rules > MAX_GRAMMAR_RULES:
            raise InvalidRequest("text", f"must have at most {MAX_GRAMMAR_RULES} rules, got {rules}", code="too_large")
        if _nesting(bare, "(", ")") > MAX_GRAMMAR_DEPTH:
            raise InvalidRequest("text", f"must nest at most {MAX_GRAMMAR_DEPTH} parentheses", code="too_large")


@dataclass(frozen=True, slots=True)
class Lark:
    """Text that a grammar derives from its rule `start`, in llguidance's dialect of Lark (`name: ...`).

    What `%json` embeds is enforced by the backend alone, and strictly. Raises `InvalidRequest` for a grammar above
    64 kB, 1,000 rules or 200 nested brackets.
    """

    text: str

    def __post_init__(self) -> None:
        _check_text("text", self.text, MAX_GRAMMAR_BYTES)
        if "x-guidance" in self.text:
            raise InvalidRequest("text", "must not have x-guidance: it would loosen a schema", code="invalid_grammar")
        bare = _LARK_QUIET.sub("", self.text)
        rules = bare.count(":")
        if rules > MAX_GRAMMAR_RULES:
            raise InvalidRequest("text", f"must have at most {MAX_GRAMMAR_RULES} rules, got {rules}", code="too_large")
        if _nesting(bare, "([{", ")]}") > MAX_GRAMMAR_DEPTH:
            raise InvalidRequest("text", f"must nest at most {MAX_GRAMMAR_DEPTH} brackets", code="too_large")


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Text in which parts between tags follow schemas or patterns. `tag` is `{"format": {...}}` as xgrammar has it, or
    the older `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, or the JSON text of either; it is kept
    as JSON text. `whitespace` and `formats` are those of the JSON in it, as in `JsonSchema`.

    Raises `InvalidRequest` for what is not a JSON object, or one above 256 kB, 64 levels or 2,000 branches.
    """

    tag: str | Mapping[str, Any]
    whitespace: Whitespace = "flexible"
    formats: Formats = "assert"

    def __post_init__(self) -> None:
        _check_whitespace(self.whitespace)
        _check_formats(self.formats)
        try:
            text = _schema_text(self.tag)
        except InvalidRequest as error:
            code = "invalid_structural_tag" if error.code == "invalid_schema" else error.code
            raise InvalidRequest("tag", error.message, code=code) from error
        if text in ("true", "false"):
            raise InvalidRequest("tag", "must be a JSON object, got a boolean", code="invalid_structural_tag")
        object.__setattr__(self, "tag", text)

    @property
    def text(self) -> str:
        """The tag as JSON text, its keys in the caller's order."""
        assert isinstance(self.tag, str)
        return self.tag


Spec = JsonSchema | JsonObject | Regex | Choice | Ebnf | Lark | StructuralTag


def written_grammar(text: object) -> Ebnf | Lark:
    """A grammar whose notation is told from its text: EBNF if a line begins with `name ::=`, else Lark. (vLLM's
    `structured_outputs.grammar` takes both.) Raises `InvalidRequest` as `Ebnf` and `Lark` do."""
    if isinstance(text, str) and _EBNF_RULE.search(text):
        return Ebnf(text)
    return Lark(text)  # type: ignore[arg-type]


def _check_formats(value: object) -> None:
    if value not in ("assert", "annotate"):
        raise InvalidRequest("formats", f'must be "assert" or "annotate", got {value!r}')


def _check_whitespace(value: object) -> None:
    if value in ("flexible", "compact"):
        return
    if not isinstance(value, str) or len(value) > MAX_WHITESPACE_BYTES or not _BLANKS.fullmatch(value):
        message = 'must be "flexible", "compact", or a regular expression of spaces, tabs and line breaks'
        raise InvalidRequest("whitespace", f"{message}, got {value!r}"[:300])
    try:
        re.compile(value)
    except re.error as error:
        raise InvalidRequest("whitespace", f"{value!r}: {error}") from error


def _check_text(param: str, value: object, max_bytes: int) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(param, f"must be a string, got {type(value).__name__}")
    if len(value) > max_bytes or len(_utf8(param, value)) > max_bytes:
        raise InvalidRequest(param, f"must be at most {max_bytes} bytes, got {len(value)} characters", code="too_large")


def _utf8(param: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(param, f"must be valid Unicode; character {error.start} is a lone surrogate") from error


def _nesting(text: str, opening: str, closing: str) -> int:
    """How deep the brackets in `text` nest at most."""
    depth = deepest = 0
    for character in text:
        if character in opening:
            depth += 1
            deepest = max(deepest, depth)
        elif character in closing:
            depth -= 1
    return deepest


def _schema_text(schema: object) -> str:
    """The schema as JSON text within the budgets, or `InvalidRequest`."""
    if isinstance(schema, str):
        _check_text("schema", schema, MAX_SCHEMA_BYTES)
        if _nesting(re.sub(r"[^{}\[\]]+", "", _JSON_STRING.sub("", schema)), "{[", "}]") > MAX_SCHEMA_DEPTH:
            raise InvalidRequest("schema", f"must nest at most {MAX_SCHEMA_DEPTH} levels", code="too_large")
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise InvalidRequest("schema", f"must be JSON: {error}", code="invalid_schema") from error
    if isinstance(schema, bool):
        return json.dumps(schema)
    if not isinstance(schema, Mapping):
        message = f"must be a JSON object or a boolean, got {type(schema).__name__}"
        raise InvalidRequest("schema", message, code="invalid_schema")
    if "x-guidance" in schema:
        raise InvalidRequest("schema", "must not have x-guidance; whitespace is set beside the schema")
    _check_json(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=dict)
    except (TypeError, ValueError) as error:
        raise InvalidRequest("schema", f"must hold JSON values only: {error}", code="invalid_schema") from error
    _check_text("schema", text, MAX_SCHEMA_BYTES)
    return text


def _check_json(schema: object) -> None:
    """Bounds on depth, on values and on branches, without recursion: what comes in may be a cycle."""
    pending: list[tuple[object, int, _Path]] = [(schema, 1, None)]
    values = branches = 0
    most, widest = 0, ""
    while pending:
        value, depth, path = pending.pop()
        inside: Iterable[tuple[object, object]]
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise InvalidRequest("schema", f"must have strings as keys, got {key!r}", code="invalid_schema")
            for key in (*_BRANCHING, "enum"):
                if isinstance(parts := value.get(key), Mapping | list | tuple):
                    _check_count(values + len(parts))
                    # Plain values of an enum cost next to nothing.
                    count = len(parts) if key != "enum" else sum(isinstance(i, Mapping | list | tuple) for i in parts)
                    branches += count
                    if count > most:
                        most, widest = count, _pointer((path, key))
            inside = value.items()
        elif isinstance(value, list | tuple):
            inside = enumerate(value)
        else:
            continue
        values += len(value)
        if depth > MAX_SCHEMA_DEPTH:
            message = f"{_pointer(path)}: must nest at most {MAX_SCHEMA_DEPTH} levels"
            raise InvalidRequest("schema", message, code="too_large")
        _check_count(values)
        if branches > MAX_SCHEMA_BRANCHES:
            message = f"must have at most {MAX_SCHEMA_BRANCHES} properties and alternatives in all"
            raise InvalidRequest("schema", f"{widest}: {message}, of which it has {most}", code="too_large")
        pending.extend((item, depth + 1, (path, key)) for key, item in inside)


def _check_count(values: int) -> None:
    # A value takes a character at least, and a comma or a bracket.
    if 2 * values > MAX_SCHEMA_BYTES:
        raise InvalidRequest("schema", f"must be at most {MAX_SCHEMA_BYTES} bytes", code="too_large")


def _pointer(path: _Path) -> str:
    """The JSON pointer of a place, its beginning left out where it is long."""
    tokens: list[str] = []
    while path is not None:
        path, token = path
        tokens.append(str(token).replace("~", "~0").replace("/", "~1"))
    text = "".join(f"/{token}" for token in reversed(tokens))
    return text if len(text) <= MAX_POINTER else f"...{text[-MAX_POINTER:]}"
