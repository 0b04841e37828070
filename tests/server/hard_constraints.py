"""Constraints that hold other servers for minutes, fill their memory or end them: fields of a body, and what becomes of
them. Each is written once, so that all tests speak of the same ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Hard:
    """A field of a body, and the code of its refusal; None where it is taken."""

    name: str
    field: str
    value: Any
    code: str | None

    @property
    def body(self) -> dict[str, Any]:
        """A request for a text of a few tokens under it."""
        return {"prompt": "hi", "max_tokens": 4, "seed": 1, self.field: self.value}


def wide(count: int) -> dict[str, Any]:
    """An object of optional strings."""
    properties = {f"property_{number}": {"type": "string"} for number in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def nested(levels: int) -> dict[str, Any]:
    """Closed objects in each other."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def bush(width: int, levels: int) -> dict[str, Any]:
    """Objects of optional objects, written out."""
    if levels == 0:
        return {"type": "string"}
    properties = {f"key_{number}": bush(width, levels - 1) for number in range(width)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def layers(width: int, levels: int) -> dict[str, Any]:
    """Objects of optional objects, by reference."""
    definitions: dict[str, Any] = {"0": {"type": "string"}}
    for level in range(levels):
        properties = {f"key_{number}": {"$ref": f"#/$defs/{level}"} for number in range(width)}
        definitions[str(level + 1)] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"$defs": definitions, "$ref": f"#/$defs/{levels}"}


def doubled(times: int) -> dict[str, Any]:
    """A schema that asks for the same twice, for the same twice, ..."""
    definitions: dict[str, Any] = {"0": {"type": "object", "properties": {"a": {"type": "string"}}}}
    for number in range(times):
        definitions[str(number + 1)] = {"allOf": [{"$ref": f"#/$defs/{number}"}] * 2}
    return {"$defs": definitions, "$ref": f"#/$defs/{times}"}


def product(factors: int, options: int) -> dict[str, Any]:
    """All of some schemas that are any of others."""
    names = [[f"p{factor}_{option}" for option in range(options)] for factor in range(factors)]
    return {"allOf": [{"anyOf": [{"required": [name]} for name in row]} for row in names]}


def array(count: int, items: dict[str, Any]) -> dict[str, Any]:
    """An array of exactly that many."""
    return {"type": "array", "minItems": count, "maxItems": count, "items": items}


def chain(count: int, is_a: str) -> str:
    """Rules that each are the next one."""
    return "".join(f"r{number}{is_a}r{number + 1}\n" for number in range(count)) + f'r{count}{is_a}"a"\n'


def nullable(count: int, is_a: str) -> str:
    """Rules that each are the next one twice, or less."""
    rules = (f'r{number}{is_a}r{number + 1} r{number + 1} | "a" r{number + 1}\n' for number in range(count))
    return "".join(rules) + f'r{count}{is_a}"a" | ""\n'


SCHEMAS: tuple[tuple[str, Any, str | None], ...] = (
    ("200 optional properties", wide(200), None),
    ("1,000 optional properties", wide(1_000), None),
    ("2,000 optional properties", wide(1_999), None),
    ("10,000 properties", wide(10_000), "too_large"),
    ("30 closed objects deep", nested(30), None),
    ("60 closed objects deep", nested(60), "too_large"),
    ("200 closed objects deep, as text", json.dumps(nested(200)), "too_large"),
    ("2,000 closed objects deep, as text", '{"items":' * 2_000 + "{}" + "}" * 2_000, "too_large"),
    ("65 arrays deep", '{"items":' * 65 + "{}" + "}" * 65, "too_large"),
    ("4 optional properties, 4 levels", bush(4, 4), None),
    ("4 optional properties, 6 levels", bush(4, 6), "too_large"),
    ("4 optional properties, 6 levels by reference", layers(4, 6), None),
    ("40 optional properties, 20 levels by reference", layers(40, 20), "too_large"),
    ("a string of up to a million", {"type": "string", "maxLength": 10**6}, None),
    ("a string of up to 10^9", {"type": "string", "maxLength": 10**9}, None),
    ("a string of at least 10^5", {"type": "string", "minLength": 10**5}, None),
    ("a string of at least 10^9", {"type": "string", "minLength": 10**9}, None),
    ("an array of up to 10^5", {"type": "array", "maxItems": 10**5, "items": {"type": "integer"}}, None),
    ("an array of up to 2^64", {"type": "array", "maxItems": 2**64 - 1}, None),
    ("100 x 100 x 100 items", array(100, array(100, array(100, {"type": "integer"}))), None),
    ("an enum of 20,000", {"enum": [f"value {number}" for number in range(20_000)]}, "too_large"),
    ("an enum of 3,000", {"enum": [f"value {number}" for number in range(3_000)]}, None),
    ("an enum of 100,000", {"enum": list(range(100_000))}, "too_large"),
    ("any of 5,000", {"anyOf": [{"const": number} for number in range(5_000)]}, "too_large"),
    ("2^18 of the same", doubled(18), None),
    ("4^9 alternatives", product(9, 4), None),
    ("a pattern of 300^3", {"type": "string", "pattern": "^((a{1,300}){1,300}){1,300}$"}, "invalid_schema"),
    ("a pattern with 2^20 states", {"type": "string", "pattern": "^(a|b)*a(a|b){20}$"}, None),
    ("not that pattern", {"type": "string", "not": {"pattern": "^(a|b)*a(a|b){20}$"}}, "too_large"),
    ("40 patterns of keys", {"patternProperties": {f"^[a-z]*x{i}": {} for i in range(40)}}, None),
    ("false", {"not": {}}, "unsatisfiable"),
    ("an empty enum", {"enum": []}, "unsatisfiable"),
    ("a minimum above the maximum", {"type": "integer", "minimum": 3, "maximum": 2}, "unsatisfiable"),
    ("itself", {"$ref": "#"}, "invalid_schema"),
    ("a reference to nothing", {"$ref": "#/$defs/nothing"}, "invalid_schema"),
    ("a reference elsewhere", {"$ref": "https://example.org/schema"}, "unsupported_schema"),
)
REGEXES: tuple[tuple[str, str, str | None], ...] = (
    ("300^3 letters", "((a{1,300}){1,300}){1,300}", "too_large"),
    ("1,000^2 letters", "(a{1,1000}){1,1000}", None),
    ("10^6 letters", "a{1,1000000}", None),
    ("10,000 of anything", ".{0,10000}", None),
    ("2^20 states", "(a|b)*a(a|b){20}", None),
    ("a repeated repeat", "(a+)+b", None),
    ("a doubled star", "foo**", None),
    ("look-ahead", "(?=a)b", "invalid_regex"),
    ("a back-reference", r"(a)\1", "invalid_regex"),
    ("NUL", "a\0b", None),
    ("100,000 parentheses", "(" * 100_000, "too_large"),
    ("4,000 parentheses", "(" * 3_900 + "a" + ")" * 3_900, "invalid_regex"),
)
GRAMMARS: tuple[tuple[str, str, str | None], ...] = (
    ("5,000 rules of Lark", "start: r0\n" + chain(5_000, ": "), "too_large"),
    ("900 rules of Lark", "start: r0\n" + chain(900, ": "), None),
    ("rules of Lark that are nothing", "start: r0\n" + nullable(300, ": "), "too_large"),
    ("Lark that is itself", "start: start", "unsatisfiable"),
    ("an undefined rule of Lark", "start: nothing", "invalid_grammar"),
    ("5,000 rules of EBNF", "root ::= r0\n" + chain(5_000, " ::= "), "too_large"),
    ("50,000 parentheses in EBNF", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000, "too_large"),
)
# These load a library that is slow to load.
EBNF: tuple[tuple[str, str, str | None], ...] = (
    ("EBNF that is itself", "root ::= root", "unsatisfiable"),
    ("an undefined rule of EBNF", "root ::= nothing", "invalid_grammar"),
    ("rules of EBNF that are nothing", "root ::= r0\n" + nullable(300, " ::= "), "too_large"),
    ("900 rules of EBNF", "root ::= r0\n" + chain(900, " ::= "), None),
)

HARD = (
    *(Hard(name, "json_schema", schema, code) for name, schema, code in SCHEMAS),
    *(Hard(name, "regex", pattern, code) for name, pattern, code in REGEXES),
    *(Hard(name, "grammar", text, code) for name, text, code in GRAMMARS),
)
HARD_EBNF = tuple(Hard(name, "ebnf", text, code) for name, text, code in EBNF)
