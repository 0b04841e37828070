"""A spec after its front end: Python has read it, and what is left is text that llguidance builds a grammar of. A
reading is plain data, so another process can hand it over. Knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from specdec.grammar.lark import Freedom
from specdec.grammar.schema import Keyword, PreparedSchema, prepare, reprepare
from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Lark, Regex, Spec, StructuralTag
from specdec.grammar.spelling import Spelling
from specdec.grammar.structural import structural_grammar

ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True, eq=False)
class ReadSchema:
    """A schema's own text, what the front end made of it, and the whitespace (as in `JsonSchema`) that its JSON has."""

    text: str
    prepared: PreparedSchema
    whitespace: str


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The schemas of a spec. `lark` is the text around them where the spec is a structural tag, else empty; a spec
    without schemas is its own grammar."""

    schemas: tuple[ReadSchema, ...] = ()
    lark: str = ""

    @property
    def num_characters(self) -> int:
        """Of all that is left to build."""
        return len(self.lark) + sum(len(schema.prepared.text) for schema in self.schemas)


def read(
    spec: Spec,
    param: str,
    check_regex: Callable[[Regex, str], object],
    *,
    remotes: Mapping[str, object],
    spelling: Spelling,
) -> Reading:
    """The reading of `spec`. `check_regex` raises `InvalidRequest` for a pattern that llguidance does not take. Raises
    `InvalidRequest` as `prepare` and `structural_grammar` do."""
    match spec:
        case JsonSchema():
            prepared = prepare(
                spec.text,
                formats=spec.formats,
                remotes=remotes,
                spelling=spelling,
                property_order=spec.property_order,
            )
            return Reading((ReadSchema(spec.text, prepared, spec.whitespace),))
        case JsonObject():
            prepared = prepare(ANY_OBJECT, remotes=remotes, spelling=spelling)
            return Reading((ReadSchema(ANY_OBJECT, prepared, spec.whitespace),))
        case StructuralTag():
            return _structural(spec, param, check_regex, remotes, spelling)
        case Regex() | Choice() | Lark():
            return Reading()
        case Ebnf():
            raise AssertionError("llguidance reads no EBNF")


def packed(reading: Reading) -> dict[str, Any]:
    """A reading as JSON."""
    schemas = [
        {
            "text": schema.text,
            "grammar": schema.prepared.text,
            "freedom": astuple(schema.prepared.freedom),
            "keywords": [astuple(keyword) for keyword in schema.prepared.keywords],
            "whitespace": schema.whitespace,
        }
        for schema in reading.schemas
    ]
    return {"lark": reading.lark, "schemas": schemas}


def unpacked(data: Mapping[str, Any], spec: Spec, remotes: Mapping[str, object]) -> Reading:
    """The reading of `spec` that `packed` made `data` of."""
    formats = spec.formats if isinstance(spec, JsonSchema | StructuralTag) else "assert"
    property_order = spec.property_order if isinstance(spec, JsonSchema) else "schema"
    schemas = []
    for item in data["schemas"]:
        keywords = tuple(Keyword(*keyword) for keyword in item["keywords"])
        prepared = reprepare(
            item["text"],
            item["grammar"],
            Freedom(*item["freedom"]),
            keywords,
            formats=formats,
            remotes=remotes,
            property_order=property_order,
        )
        schemas.append(ReadSchema(item["text"], prepared, item["whitespace"]))
    return Reading(tuple(schemas), data["lark"])


def _structural(
    spec: StructuralTag,
    param: str,
    check_regex: Callable[[Regex, str], object],
    remotes: Mapping[str, object],
    spelling: Spelling,
) -> Reading:
    texts: list[str] = []

    def prepare_one(schema: str) -> PreparedSchema:
        text = JsonSchema(schema).text
        prepared = prepare(text, formats=spec.formats, remotes=remotes, spelling=spelling)
        texts.append(text)
        return prepared

    structural = structural_grammar(json.loads(spec.text), param, prepare_one, check_regex)
    schemas = (
        ReadSchema(text, prepared, own or spec.whitespace)
        for text, (prepared, own) in zip(texts, structural.schemas, strict=True)
    )
    return Reading(tuple(schemas), structural.lark)
