"""What each keyword allows, by itself and where it meets others: schemas with instances, judged under the mask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import InvalidRequest
from specdec.grammar.schema import prepare
from tests.grammar.schema_texts import accepts, allowed, compact, compiled
from tests.grammar.small_tokenizer import encode

A_OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CLOSED = {**A_OBJECT, "additionalProperties": False}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"

TABLE: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("true", True, [1, None, {"a": []}], []),
    ("type", {"type": ["string", "null"]}, ["", None], [1, [], False]),
    ("no type: only numbers are bounded", {"minimum": 5}, [5, "a", None, {}], [4]),
    ("no type: only objects have keys", {"required": ["a"]}, [1, [], {"a": 1}], [{}]),
    ("integer", {"type": "integer"}, [0, -7, 10**30], [1.5, "1"]),
    ("not integer", {"type": "number", "not": {"type": "integer"}}, [1.5, -0.25], [1, 0]),
    ("enum with a type", {"enum": [1, "a", None], "type": ["string", "null"]}, ["a", None], [1, "b"]),
    ("const of an object", {"const": {"a": [1, {"b": None}]}}, [{"a": [1, {"b": None}]}], [{"a": [1, {}]}, {}, 1]),
    ("not a constant object", {"type": "object", "not": {"const": {"a": 1}}}, [{}, {"a": 2}, {"b": 1}], [{"a": 1}]),
    ("const false is not 0", {"const": False}, [False], [0, None]),
    ("false in an enum is not 0", {"enum": [[False]]}, [[False]], [[0]]),
    ("the empty string", {"enum": ["", 1]}, ["", 1], ["a"]),
    ("not the empty string", {"type": "string", "not": {"const": ""}}, ["a"], [""]),
    ("a key that is empty", {"required": [""], "properties": {"": {"type": "null"}}}, [{"": None}], [{}, {"": 1}]),
    (
        "no multiple between bounds",
        {"properties": {"a": {"multipleOf": 5, "minimum": 6, "maximum": 9}}},
        [{}, {"a": "x"}],
        [{"a": 5}, {"a": 7}],
    ),
    ("not enum", {"not": {"enum": ["foo", 3]}, "type": ["string", "integer"]}, ["fo", "food", "", 33], ["foo", 3]),
    ("bounds", {"type": "number", "minimum": 0.5, "maximum": 2.25}, [0.5, 1, 2.25, 0.75], [0.4, 2.26, 3, -1]),
    ("exclusive bounds", {"exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5, 0.001, "a"], [0, 1, -3]),
    ("bounds beyond 64 bits", {"minimum": 2**64, "type": "integer"}, [2**64, 2**70], [2**64 - 1, 1]),
    ("bounds with fractions on integers", {"type": "integer", "minimum": 1.5, "maximum": 3.5}, [2, 3], [1, 4]),
    ("draft 4 exclusive", {"$schema": DRAFT_4, "minimum": 1, "exclusiveMinimum": True}, [2, 1.5], [1, 0]),
    ("multipleOf", {"multipleOf": 7, "minimum": 10, "maximum": 100}, [14, 98, "a"], [7, 15, 105]),
    ("multipleOf a decimal", {"type": "number", "multipleOf": 0.01}, [1.25, 3, 0], [1.255]),
    ("multipleOf two numbers", {"allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}, [0, 12, 24], [4, 6, 18]),
    (
        "lengths count characters",
        {"type": "string", "minLength": 2, "maxLength": 3},
        ["éé", "\n\t", "abc"],
        ["a", "abcd"],
    ),
    (
        "pattern, lengths and enum",
        {"pattern": "^[a-z]+$", "maxLength": 3, "minLength": 2},
        ["ab", 1],
        ["abcd", "A1", "a"],
    ),
    ("two patterns", {"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, ["ab", "xbxa"], ["a", "b", ""]),
    ("not pattern", {"type": "string", "not": {"pattern": "^a"}}, ["", "ba"], ["a", "ab"]),
    ("items", {"items": {"type": "integer"}, "maxItems": 2}, [[], [1, 2], "a"], [["a"], [1, 2, 3]]),
    ("prefixItems", {"prefixItems": [{"const": 1}, {"const": 2}], "items": False}, [[], [1], [1, 2]], [[2], [1, 2, 3]]),
    (
        "items as a list",
        {"items": [{"const": 1}], "additionalItems": {"type": "null"}},
        [[1], [1, None]],
        [[2], [1, 2]],
    ),
    ("minItems", {"type": "array", "minItems": 2}, [[1, 2], [{}, [], 1]], [[], [1]]),
    ("contains", {"type": "array", "contains": {"const": 5}}, [[5], [1, 5], [5, 1]], [[], [1, 2]]),
    (
        "contains, counted",
        {"contains": {"const": 5}, "minContains": 2, "maxContains": 2},
        [[5, 1, 5], [5, 5]],
        [[5], [5, 5, 5], []],
    ),
    ("contains in a short array", {"contains": {"const": 5}, "maxItems": 2}, [[1, 5], [5]], [[1, 2], [1, 2, 5]]),
    ("not contains", {"type": "array", "not": {"contains": {"const": 5}}}, [[], [1]], [[5], [1, 5]]),
    ("not items", {"type": "array", "not": {"items": {"type": "null"}}}, [[1], [None, 1]], [[], [None]]),
    (
        "uniqueItems of a few",
        {"items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
        [[], ["b", "a", 1]],
        [["a", "a"]],
    ),
    ("uniqueItems of one", {"maxItems": 1, "uniqueItems": True}, [[], [{}]], [[1, 1]]),
    ("required beyond properties", {"type": "object", "required": ["z"]}, [{"z": 1}], [{}, {"a": 1}]),
    ("closed", CLOSED, [{}, {"a": 1}, {"b": 2}, {"a": 1, "b": 2}], [{"a": "1"}, {"c": 1}]),
    ("additionalProperties", {**A_OBJECT, "additionalProperties": {"type": "null"}}, [{"a": 1, "c": None}], [{"c": 1}]),
    ("properties of false", {"type": "object", "properties": {"a": False}}, [{}, {"b": 1}], [{"a": 1}]),
    (
        "patternProperties overlap",
        {"patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 5}}, "additionalProperties": False},
        [{"ab": 7}, {"ac": 1}, {"xb": "s"}],
        [{"ab": 1}, {"ab": "s"}, {"xb": 1}, {"c": 1}],
    ),
    (
        "patternProperties and properties",
        {"properties": {"ab": {"maximum": 9}}, "patternProperties": {"^a": {"minimum": 5}}},
        [{"ab": 7}, {"b": 1}],
        [{"ab": 1}, {"ab": 10}, {"ac": 1}],
    ),
    ("propertyNames pattern", {"propertyNames": {"pattern": "^[a-z]+$"}}, [{}, {"ab": 1}, 3], [{"A": 1}, {"": 1}]),
    ("propertyNames enum", {"propertyNames": {"enum": ["a", "b"]}}, [{"a": 1, "b": 2}, {}], [{"c": 1}]),
    (
        "propertyNames enum, in its order",
        {"propertyNames": {"enum": ["b", "a"]}},
        [{"b": 1, "a": 2}, {"a": 1}],
        [{"c": 1}],
    ),
    ("propertyNames false", {"propertyNames": False}, [{}, []], [{"a": 1}]),
    ("minProperties, named", {**CLOSED, "minProperties": 2}, [{"a": 1, "b": 2}], [{}, {"a": 1}]),
    ("minProperties 1", {"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ("minProperties, one more", {"required": ["a"], "minProperties": 2}, [{"a": 1, "c": 2}], [{"a": 1}, {}]),
    ("maxProperties, named", {**CLOSED, "maxProperties": 1}, [{}, {"b": 1}], [{"a": 1, "b": 2}]),
    ("maxProperties of a map", {"maxProperties": 1}, [{}, {"x": 1}, []], [{"a": 1, "b": 2}]),
    ("dependentRequired", {**CLOSED, "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    (
        "dependentSchemas",
        {**A_OBJECT, "dependentSchemas": {"a": {"properties": {"b": {"minimum": 10}}}}},
        [{"a": 1, "b": 11}, {"b": 1}],
        [{"a": 1, "b": 1}],
    ),
    ("dependencies", {**CLOSED, "dependencies": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    ("not required", {**CLOSED, "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    (
        "a key that breaks the rule",
        {"type": "object", "not": {"additionalProperties": {"type": "integer"}}},
        [{"a": "x"}, {"a": 1, "b": "x"}],
        [{}, {"a": 1}],
    ),
    (
        "keys that break several rules",
        {"type": "object", "properties": {"a": {}, "b": {}}}
        | {"not": {"anyOf": [{"patternProperties": {"^a": {"type": "null"}}}, {"additionalProperties": {"const": 1}}]}},
        [{"a": 1, "c": 2}, {"a": 1, "b": 1, "d": 2}, {"ab": 3}, {"a": 0, "ab": 2}],
        [{}, {"a": 1}, {"c": 2}, {"a": None, "c": 2}, {"ab": 1}, {"a": 1, "c": 1}],
    ),
    (
        "another object than two",
        {"type": "object", "not": {"enum": [{"a": 1}, {"b": 1}]}, "additionalProperties": {"const": 1}},
        [{}, {"a": 1, "b": 1}, {"c": 1}, {"a": 1, "c": 1}],
        [{"a": 1}, {"b": 1}, {"c": 2}],
    ),
    ("anyOf beside properties", {**CLOSED, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}], [{}]),
    ("oneOf overlap", {"type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 5}]}, [2, 6], [3, 4, 5]),
    (
        "oneOf of objects",
        {"oneOf": [{"required": ["a"], **CLOSED}, {"required": ["b"], **CLOSED}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 2}],
    ),
    (
        "if, then and else",
        {
            "properties": {"k": {"enum": ["x", "y"]}, "v": {}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "x"}}},
            "then": {"required": ["v"]},
            "else": {"properties": {"v": False}},
        },
        [{"k": "x", "v": 1}, {"k": "y"}],
        [{"k": "x"}, {"k": "y", "v": 1}],
    ),
    ("not of not", {"not": {"not": {"type": "string"}}}, ["a"], [1]),
    (
        "unevaluatedProperties",
        {"allOf": [{"properties": {"a": {}}}], "anyOf": [{"required": ["b"], "properties": {"b": {}}}, True]}
        | {"unevaluatedProperties": False},
        [{"a": 1}, {"a": 1, "b": 2}, {}],
        [{"c": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
    (
        "unevaluatedItems",
        {"prefixItems": [{"const": 1}], "contains": {"const": 2}, "unevaluatedItems": False},
        [[1, 2], [1, 2, 2]],
        [[1], [1, 2, 3], [2]],
    ),
    ("draft 2019 list", {"$schema": DRAFT_2019, "items": [{}], "unevaluatedItems": False}, [[1], []], [[1, 2]]),
    ("$ref hides its siblings", {"$schema": DRAFT_7, "items": {"$ref": "#/x", "maximum": 1}, "x": {}}, [[5]], []),
    ("unknown keywords", {"type": "integer", "x-foo": 1, "nullable": True}, [1], [None, "a"]),
    ("quotes and breaks in keys", {"properties": {'a"b\n': {}}, "required": ['a"b\n']}, [{'a"b\n': 1}], [{"a": 1}]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_a_grammar_allows_what_its_schema_allows(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    judge = prepare(json.dumps(schema)).validator
    grammar = compiled(schema)
    for instance in valid:
        assert judge.is_valid(instance), instance
        assert accepts(grammar, compact(instance)), instance
    for instance in invalid:
        assert not judge.is_valid(instance), instance
        assert not accepts(grammar, compact(instance)), instance


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "not": {"const": {}}, "additionalProperties": False},
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "maxProperties": 1}
        | {"not": {"additionalProperties": {"type": "null"}}, "additionalProperties": {"type": "null"}},
        {"type": "array", "maxItems": 1, "allOf": [{"contains": {"const": 1}}, {"contains": {"const": 2}}]},
        {"type": "array", "items": {"const": 1}, "minItems": 1, "contains": {"const": 1}, "maxContains": 0}
        | {"minContains": 0},
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3},
    ],
    ids=str,
)
def test_what_nothing_can_finish_is_never_begun(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiled(schema)
    assert caught.value.code == "unsatisfiable"
    assert accepts(compiled({"anyOf": [schema, {"type": "null"}]}), "null")
    for begin in '[{"':
        assert not allowed(compiled({"anyOf": [schema, {"type": "null"}]}).start())[encode(begin)[0]]


def test_a_grammar_does_not_depend_on_how_sets_are_ordered() -> None:
    """Processes hash strings differently: the grammars of all schemas above must be the same to the letter in each."""
    program = (
        "import json\n"
        "from specdec.grammar.schema import prepare\n"
        "from tests.grammar.test_schema_keywords import TABLE\n"
        "print(json.dumps([prepare(json.dumps(row[1])).text for row in TABLE]))\n"
    )
    texts = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONHASHSEED": seed},
                cwd=Path(__file__).parents[2],
                capture_output=True,
                check=True,
            ).stdout
        )
        for seed in ("1", "2", "3")
    ]
    for row, *grammars in zip(TABLE, *texts, strict=True):
        assert len(set(grammars)) == 1, row[0]
