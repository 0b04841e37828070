"""Where references lead, which draft a schema is read as, and what is refused, with its pointer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.errors import InvalidRequest
from specdec.grammar.schema import check_schema, prepare
from tests.grammar.schema_texts import accepts, compact, compiled

BASE = "http://example.com/root.json"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
REMOTES = {
    "http://remote.example/integer": {"type": "integer", "$defs": {"small": {"$anchor": "small", "maximum": 9}}},
    "http://remote.example/list": {"items": {"$ref": "integer"}},
}
TREE = {"$id": "http://example.com/tree", "$dynamicAnchor": "node", "type": "object"} | {
    "properties": {"data": True, "children": {"type": "array", "items": {"$dynamicRef": "#node"}}}
}

TABLE: list[tuple[str, Any, Any, Any]] = [
    ("pointer", {"$defs": {"x": {"type": "null"}}, "items": {"$ref": "#/$defs/x"}}, [None], [1]),
    ("escaped pointer", {"$defs": {"a/b": {"type": "null"}}, "items": {"$ref": "#/$defs/a~1b"}}, [None], [1]),
    ("percent in a pointer", {"$defs": {"c%d": {"type": "null"}}, "items": {"$ref": "#/$defs/c%25d"}}, [None], [1]),
    ("pointer into an unknown keyword", {"x": {"y": {"type": "null"}}, "items": {"$ref": "#/x/y"}}, [None], [1]),
    ("siblings", {"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "minimum": 5}, 5, 4),
    ("root", {"type": "object", "properties": {"n": {"$ref": "#"}}}, {"n": {"n": {}}}, {"n": {"n": 1}}),
    ("anchor", {"$defs": {"x": {"$anchor": "foo", "type": "null"}}, "items": {"$ref": "#foo"}}, [None], [1]),
    ("id", {"$id": BASE, "$defs": {"x": {"$id": "x.json", "type": "null"}}, "items": {"$ref": "x.json"}}, [None], [1]),
    ("urn", {"$id": "urn:example:a", "$defs": {"x": {"type": "null"}}, "items": {"$ref": "#/$defs/x"}}, [None], [1]),
    ("an id in an enum is none", {"enum": [{"$id": BASE, "type": "null"}]}, {"$id": BASE, "type": "null"}, None),
    ("remote", {"items": {"$ref": "http://remote.example/integer"}}, [1], ["a"]),
    ("remote anchor", {"items": {"$ref": "http://remote.example/integer#small"}}, [9], [10]),
    ("remote that refers on", {"$ref": "http://remote.example/list"}, [1], ["a"]),
    (
        "draft 7 id",
        {"$schema": DRAFT_7, "definitions": {"x": {"$id": "#x", "type": "null"}}} | {"items": {"$ref": "#x"}},
        [None],
        [1],
    ),
    (
        "draft 4 id",
        {"$schema": DRAFT_4, "id": BASE, "definitions": {"x": {"id": "x", "type": "null"}}} | {"items": {"$ref": "x"}},
        [None],
        [1],
    ),
    ("draft 4 has no const", {"$schema": DRAFT_4, "const": 1, "type": "integer"}, 2, "a"),
    ("dynamic, plain", TREE, {"children": [{"data": 1}]}, {"children": [1]}),
    (
        "dynamic, extended",
        {"$id": "http://example.com/strict", "$dynamicAnchor": "node", "$ref": "tree", "unevaluatedProperties": False}
        | {"$defs": {"tree": TREE}},
        {"children": [{"data": 1}]},
        {"children": [{"daat": 1}]},
    ),
    (
        "recursive",
        {
            "$schema": DRAFT_2019,
            "$recursiveAnchor": True,
            "type": "object",
            "additionalProperties": {"$recursiveRef": "#"},
        },
        {"a": {"b": {}}},
        {"a": {"b": 1}},
    ),
    (
        "mutual",
        {
            "$defs": {
                "a": {"items": {"$ref": "#/$defs/b"}},
                "b": {"type": "object", "additionalProperties": {"$ref": "#/$defs/a"}},
            },
            "$ref": "#/$defs/a",
        },
        [{"x": [{}]}],
        [{"x": [1]}],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_references_lead_where_the_drafts_say(schema: Any, valid: Any, invalid: Any) -> None:
    judge = prepare(json.dumps(schema), remotes=REMOTES).validator
    assert judge.is_valid(valid)
    assert not judge.is_valid(invalid)
    grammar = compiled(schema, remotes=REMOTES)
    assert accepts(grammar, compact(valid))
    assert not accepts(grammar, compact(invalid))


@pytest.mark.parametrize(
    ("schema", "draft"),
    [
        ({}, "2020-12"),
        ({"items": [{}]}, "draft-07"),
        ({"properties": {"a": {"dependencies": {}}}}, "draft-07"),
        ({"additionalItems": False}, "draft-07"),
        ({"$schema": DRAFT_4}, "draft-04"),
        ({"$schema": "http://json-schema.org/draft-06/schema"}, "draft-06"),
        ({"$schema": DRAFT_2019 + "#"}, "2019-09"),
    ],
    ids=str,
)
def test_a_schema_is_read_as_the_draft_it_names_or_looks_like(schema: dict[str, object], draft: str) -> None:
    assert draft in prepare(json.dumps(schema)).draft


@pytest.mark.parametrize(
    ("schema", "code", "words"),
    [
        ({"$ref": "#"}, "invalid_schema", "leads back"),
        ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "invalid_schema", "/$defs/a"),
        ({"not": {"$ref": "#"}}, "invalid_schema", "leads back"),
        ({"$ref": "#/$defs/none"}, "invalid_schema", "none"),
        ({"$ref": "http://elsewhere.example/x"}, "unsupported_schema", "nothing is fetched"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "unsupported_schema", "/$schema"),
        ({"properties": {"a": {"minLength": "x"}}}, "invalid_schema", "/properties/a/minLength"),
        ({"items": {"pattern": r"\bx"}}, "unsupported_schema", "/items/pattern"),
        (False, "unsatisfiable", "no value"),
        ({"enum": []}, "unsatisfiable", "no value"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "unsatisfiable", "no value"),
        ({"type": "string", "pattern": "^a{3}$", "maxLength": 2}, "unsatisfiable", "no value"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "unsatisfiable", "no value"),
        ({"const": "a", "type": "integer"}, "unsatisfiable", "no value"),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, None, ""),
        ({"type": "integer", "uniqueItems": True, "pattern": r"\b"}, None, ""),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused_with_its_pointer(schema: Any, code: str | None, words: str) -> None:
    if code is None:  # refused only where a value of that type could be
        assert check_schema(json.dumps(schema)).compiled
        return
    with pytest.raises(InvalidRequest) as caught:
        prepare(json.dumps(schema))
    assert caught.value.param == "schema"
    assert caught.value.code == code
    assert words in caught.value.message
    assert len(caught.value.message) <= 300


def test_every_keyword_gets_a_verdict() -> None:
    schema = {
        "title": "t",
        "type": "object",
        "x-mine": 1,
        "properties": {"a": {"format": "shoe-size"}, "b": {"not": {"type": "null"}, "uniqueItems": True}},
    }
    report = check_schema(json.dumps(schema))
    verdicts = {keyword.pointer: (keyword.verdict, keyword.reason) for keyword in report.keywords}
    assert verdicts["/title"] == ("annotation", "")
    assert verdicts["/x-mine"] == ("annotation", "unknown in this draft")
    assert verdicts["/type"] == ("enforced", "")
    assert verdicts["/properties/a/format"] == ("annotation", "an unknown format")
    assert verdicts["/properties/b/not"][0] == "rewritten"
    assert verdicts["/properties/b/uniqueItems"][0] == "checked"
    assert (report.compiled, report.code) == (True, "")
