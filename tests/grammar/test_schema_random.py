"""Random schemas with instances that they allow: the grammar allows them too, and where it refuses, so does the schema.
And the official suite, where it is at hand.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from specdec.errors import InvalidRequest
from specdec.grammar.schema import prepare
from tests.grammar.schema_texts import accepts, compact, compiled

DATA = Path(os.environ.get("SPECDEC_SHARED", Path(__file__).parents[3] / "shared" / "data"))
SUITE = DATA / "JSON-Schema-Test-Suite"


def pair(random_: random.Random, depth: int) -> tuple[Any, Any]:
    """A schema of draft 2020-12 and an instance of it, built together."""
    kind = random_.choice(
        ["integer", "number", "string", "enum", "null"] + (["array", "object", "either"] * 3 if depth else [])
    )
    value: Any
    if kind == "integer":
        value = random_.randint(-2000, 2000)
        schema: Any = {"type": "integer", "minimum": value - random_.randint(0, 99), "exclusiveMaximum": value + 1}
        return (schema | {"multipleOf": abs(value)} if 0 < abs(value) < 100 else schema), value
    if kind == "number":
        value = random_.randint(-999, 999) / 8
        return {"type": "number", "exclusiveMinimum": value - 0.125, "maximum": value}, value
    if kind == "string":
        text = "".join(random_.choices('ab"\\\né😀', k=random_.randint(0, 4)))
        return {"type": "string", "minLength": len(text), "maxLength": len(text) + 1, "pattern": ".*"}, text
    if kind == "enum":
        value = random_.choice(["x", 3, None, True, [1, "a"], {"k": [None]}])
        return {"enum": ["y", [], value, {"k": 1}]}, value
    if kind == "null":
        return {"not": {"type": ["number", "string", "array", "object", "boolean"]}}, None
    if kind == "array":
        parts = [pair(random_, depth - 1) for _ in range(random_.randint(0, 3))]
        items = pair(random_, depth - 1)
        values = [value for _, value in parts] + [items[1]] * random_.randint(0, 2)
        schema = {"type": "array", "items": items[0], "minItems": len(values)}
        return (schema | {"prefixItems": [part for part, _ in parts]} if parts else schema), values
    if kind == "object":
        parts_by_name = {
            name: pair(random_, depth - 1) for name in random_.sample(["a", "b", "c d", 'q"'], random_.randint(0, 3))
        }
        kept = [name for name in parts_by_name if random_.random() < 0.7]
        schema = {
            "type": "object",
            "properties": {name: part for name, (part, _) in parts_by_name.items()},
            "required": random_.sample(kept, random_.randint(0, len(kept))),
            "dependentRequired": {kept[0]: kept[-1:]} if kept else {},
            "maxProperties": len(kept) + random_.randint(0, 1),
            "additionalProperties": random_.random() < 0.5,
        }
        return schema, {name: parts_by_name[name][1] for name in kept}
    schema, value = pair(random_, depth - 1)
    other, _ = pair(random_, depth - 1)
    return random_.choice(
        [{"anyOf": [other, schema]}, {"allOf": [schema, {"anyOf": [True, other]}]}, {"if": schema}]
    ), value


def test_an_instance_of_a_random_schema_can_be_written() -> None:
    seed = 20
    print(f"seed {seed}")
    random_ = random.Random(seed)
    refused = 0
    for number in range(150):
        schema, value = pair(random_, 3)
        judge = prepare_or_none(schema)
        if judge is None:
            refused += 1
            continue
        assert judge.is_valid(value), number
        grammar = compiled(schema)
        assert accepts(grammar, compact(value)), (number, schema, value)
        _, stranger = pair(random_, 2)
        if not judge.is_valid(stranger):
            assert not accepts(grammar, compact(stranger)), (number, schema, stranger)
    assert refused < 15


def prepare_or_none(schema: Any) -> Any:
    """The validator of a schema that compiles."""
    try:
        return prepare(json.dumps(schema)).validator
    except InvalidRequest as error:
        assert error.code in ("unsupported_schema", "too_large"), schema
        return None


def loose_value(random_: random.Random, depth: int = 2) -> Any:
    """Any small value, out of few, so that schemas and instances meet."""
    choices: list[Any] = [None, True, False, 0, 1, 2, 3, 5, 1.5, -1, "", "a", "b", "ab", "ba", "abc"]
    if depth and random_.random() < 0.6:
        if random_.random() < 0.4:
            return [loose_value(random_, depth - 1) for _ in range(random_.randint(0, 3))]
        names = sorted(random_.sample(["a", "b", "ab", "c"], random_.randint(0, 3)))
        return {name: loose_value(random_, depth - 1) for name in names}
    return random_.choice(choices)


def loose_schema(random_: random.Random, depth: int = 2) -> Any:
    """A schema of keywords thrown together, most of which say something about a value of `loose_value`."""
    if random_.random() < 0.08:
        return random_.random() < 0.6

    def below() -> Any:
        return loose_schema(random_, depth - 1) if depth else random_.choice([True, {"type": "integer"}, {"const": 1}])

    def one(*options: Any) -> Any:
        return random_.choice(options)

    makers: dict[str, Any] = {
        "type": lambda: one("object", "array", "string", "integer", "number", ["null", "object"], ["boolean", "array"]),
        "enum": lambda: [loose_value(random_)],
        "const": lambda: loose_value(random_),
        "minimum": lambda: one(0, 1, 1.5),
        "exclusiveMinimum": lambda: one(0, 1, 1.5),
        "maximum": lambda: one(1, 2, 2.5),
        "multipleOf": lambda: one(2, 5, 0.5),
        "minLength": lambda: one(1, 2),
        "maxLength": lambda: one(0, 1),
        "pattern": lambda: one("a", "^a", "b$", "^ab?$"),
        "properties": lambda: {name: below() for name in random_.sample(["a", "b", "ab"], 2)},
        "required": lambda: random_.sample(["a", "b", "c"], 2),
        "additionalProperties": below,
        "patternProperties": lambda: {one("^a", "b$", "c"): below()},
        "propertyNames": lambda: one({"pattern": "^a"}, {"enum": ["a", "b"]}, {"not": {"const": "a"}}),
        "minProperties": lambda: one(1, 2),
        "maxProperties": lambda: one(0, 1, 2),
        "items": below,
        "prefixItems": lambda: [below()],
        "contains": below,
        "maxContains": lambda: one(1, 2),
        "minItems": lambda: one(1, 2),
        "maxItems": lambda: one(0, 1, 2),
        "uniqueItems": lambda: True,
        "not": below,
        "anyOf": lambda: [below(), below()],
        "oneOf": lambda: [below(), below()],
        "allOf": lambda: [below(), below()],
        "if": below,
        "then": below,
        "else": below,
        "dependentRequired": lambda: {"a": ["b"]},
        "dependentSchemas": lambda: {one("a", "b"): below()},
        "unevaluatedProperties": below,
        "unevaluatedItems": below,
    }
    return {keyword: makers[keyword]() for keyword in random_.sample(sorted(makers), random_.randint(1, 5))}


def test_whatever_a_grammar_allows_its_schema_allows() -> None:
    seed = 30
    print(f"seed {seed}")
    random_ = random.Random(seed)
    allowed = refused = 0
    for _ in range(300):
        schema = loose_schema(random_)
        instances = [loose_value(random_) for _ in range(12)]
        judge = jsonschema_rs.Draft202012Validator(schema)
        try:
            grammar = compiled(schema)
        except InvalidRequest as error:
            refused += 1
            assert error.code != "unsatisfiable" or not any(map(judge.is_valid, instances)), schema
            continue
        for instance in instances:
            if accepts(grammar, compact(instance)):
                allowed += 1
                assert judge.is_valid(instance), (schema, instance)
    assert allowed > 1_000
    assert refused < 150


@pytest.mark.parametrize(("draft", "least"), [("draft2020-12", 0.93), ("draft7", 0.91)])
def test_the_official_suite_finds_no_invalid_instance_that_is_accepted(draft: str, least: float) -> None:
    if not SUITE.is_dir():
        pytest.skip(
            f"the JSON Schema test suite is not at {SUITE}; SPECDEC_SHARED names the folder with the evaluation data"
        )
    uri = {
        "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
        "draft7": "http://json-schema.org/draft-07/schema#",
    }
    remotes = {
        f"http://localhost:1234/{path.relative_to(SUITE / 'remotes')}": json.loads(path.read_text())
        for path in (SUITE / "remotes").rglob("*.json")
    }
    right = tests = 0
    for path in sorted((SUITE / "tests" / draft).glob("*.json")):
        for group in json.loads(path.read_text()):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": uri[draft], **schema}
            tests += len(group["tests"])
            try:
                grammar = compiled(schema, "annotate", remotes)
            except InvalidRequest as error:
                nothing = not any(test["valid"] for test in group["tests"])
                right += len(group["tests"]) if nothing and error.code == "unsatisfiable" else 0
                continue
            for test in group["tests"]:
                accepted = accepts(grammar, compact(test["data"]))
                assert test["valid"] or not accepted, (path.name, group["description"], test["description"])
                right += accepted == test["valid"]
    assert right / tests > least
