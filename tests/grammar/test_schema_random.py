"""Keywords thrown together at random: what the grammar allows, the schema allows."""

from __future__ import annotations

import random
from typing import Any

import jsonschema_rs

from specdec.errors import InvalidRequest
from tests.grammar.schema_texts import accepts, compact, compiled


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
