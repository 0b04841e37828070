"""Keys in any order: every order of every valid value is allowed, and no other text is."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema_rs
import pytest

from specdec.errors import InvalidRequest
from specdec.evals.structured import Times
from specdec.grammar.schema import check_schema
from specdec.grammar.spec import JsonSchema
from specdec.grammar.validated import problem
from specdec.grammar.walk import has
from tests.grammar.schema_law import BYTES
from tests.grammar.schema_texts import accepts, compact
from tests.grammar.small_tokenizer import compiler
from tests.grammar.test_schema_random import loose_schema, loose_value

CLOSED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "nam": {"type": "integer"},
        "age": {"type": "integer", "minimum": 0},
        "tag": {"enum": ["x", "y"]},
    },
    "required": ["age", "name"],
    "additionalProperties": False,
}
NEGATED = {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"properties": {"a": {"type": "string"}}}}
EITHER = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "of": {}},
    "oneOf": [
        {"properties": {"kind": {"const": "a"}, "of": {"type": "integer"}}, "required": ["kind", "of"]},
        {"properties": {"kind": {"const": "b"}, "of": {"type": "string"}}, "required": ["kind"]},
    ],
}

IN_EITHER = {
    "oneOf": [
        {"properties": {"in": {"properties": dict.fromkeys(names, True), "additionalProperties": False}}}
        for names in ("ab", "ac")
    ]
}
IN_BOTH = {"allOf": IN_EITHER["oneOf"]}
FEW = {"properties": {key: {"enum": ["a", "b", 1]} for key in ("a", "b", "kind", "of")}, "additionalProperties": False}


def any_order(schema: Any) -> JsonSchema:
    return JsonSchema(schema, "compact", property_order="any")


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same value, its keys in another order."""
    if isinstance(value, list):
        return [shuffled(item, rng) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: shuffled(value[name], rng) for name in rng.sample(list(value), len(value))}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (CLOSED, {"name": "a", "nam": 1, "age": 3, "tag": "x"}),
        (CLOSED, {"name": "a", "age": 3}),
        ({"required": ["z", "a"], "properties": {"b": {"type": "null"}}}, {"a": 1, "z": 2, "b": None, "c": [1]}),
        ({"const": {"a": 1, "b": {"c": 2, "d": 3}}}, {"a": 1, "b": {"c": 2, "d": 3}}),
        (NEGATED, {"b": 1, "a": 2}),
        (EITHER, {"of": 1, "kind": "a", "more": 0}),
        (EITHER, {"of": "1", "kind": "b"}),
        ({"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, {"b": 1, "a": 2}),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 2, "maxProperties": 3}, {"b": 1, "a": 2, "c": 3}),
        *((IN_EITHER, {"in": inner}) for inner in ({"a": 1, "b": 2}, {"a": 1, "c": 2})),
        (IN_BOTH, {"in": {"a": 1}}),
    ],
    ids=str,
)
def test_every_order_of_a_valid_object_is_allowed(schema: Any, value: dict[str, Any]) -> None:
    grammar = compiler().compile(any_order(schema))
    for names in itertools.permutations(value):
        assert accepts(grammar, compact({name: value[name] for name in names})), names


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (CLOSED, "{}"),
        (CLOSED, '{"name":"a"}'),
        (CLOSED, '{"tag":"x","age":1,"nam":2}'),
        (CLOSED, '{"name":"a","age":1,"name":"b"}'),
        (CLOSED, '{"age":1,"name":"b","z":1}'),
        ({"const": {"a": 1, "b": 2}}, '{"b":2}'),
        (NEGATED, '{"b":1}'),
        (NEGATED, '{"b":1,"a":"x"}'),
        (EITHER, '{"of":1,"kind":"b"}'),
        (EITHER, '{"kind":"a"}'),
        ({"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, '{"c":1,"a":2}'),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, '{"b":1,"a":2}'),
        ({"properties": {"a": {}}, "minProperties": 2}, '{"a":2}'),
        (IN_EITHER, '{"in":{"a":1,"b":2,"c":3}}'),
        (IN_EITHER, '{"in":{"a":1}}'),
        (IN_BOTH, '{"in":{"a":1,"b":2}}'),
    ],
    ids=str,
)
def test_what_relates_the_keys_holds_in_any_order(schema: Any, text: str) -> None:
    assert not accepts(compiler().compile(any_order(schema)), text)


@pytest.mark.parametrize(("seed", "count"), [(30, 60), pytest.param(31, 600, marks=pytest.mark.slow)])
def test_in_any_order_exactly_what_the_schema_allows_is_allowed(seed: int, count: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    valid = invalid = refused = 0
    for _ in range(count):
        schema = loose_schema(rng)
        values = [shuffled(loose_value(rng), rng) for _ in range(12)]
        judge = jsonschema_rs.Draft202012Validator(schema)
        try:
            grammar = compiler().compile(any_order(schema))
        except InvalidRequest as error:
            refused += 1
            assert error.code != "unsatisfiable" or not any(map(judge.is_valid, values)), schema
            continue
        for value in values:
            assert accepts(grammar, compact(value)) is judge.is_valid(value), (schema, value)
            valid += judge.is_valid(value)
            invalid += not judge.is_valid(value)
    assert valid > 3 * count
    assert invalid > count
    assert refused < count / 2


@pytest.mark.parametrize("schema", [CLOSED, *({**schema, **FEW} for schema in (NEGATED, EITHER))], ids=str)
def test_random_texts_in_any_order_come_to_a_valid_end(schema: Any) -> None:
    grammar = BYTES.compiler.compile(any_order(schema))
    judge = jsonschema_rs.Draft202012Validator(schema)
    orders = set()
    finished = 0
    for seed in range(60):
        tokens, outcome, why = BYTES.walker.walk(grammar, random.Random(seed), 200, Times())
        assert outcome != "dead_end", (seed, why)
        if outcome == "finished":
            finished += 1
            text = b"".join(map(BYTES.vocabulary.tokenizer.token_bytes, tokens))
            assert problem(text, judge) is None, (seed, text)
            orders.add(tuple(json.loads(text)))
    assert finished > 40
    assert len(orders) > 8


def test_no_comma_and_no_key_is_begun_where_none_is_left() -> None:
    """Blanks would lead on for long, so looking ahead would not see it."""
    keys = {"aa": True, "ab": True, "b": True}
    grammar = BYTES.compiler.compile(
        JsonSchema({"type": "object", "properties": keys, "additionalProperties": False}, property_order="any")
    )

    def following(text: str) -> set[str]:
        constraint = grammar.start()
        constraint.advance(BYTES.vocabulary.encode(text))
        row_W = constraint.row(())
        assert row_W is not None
        return {character for character in '",ab}' if has(row_W, BYTES.vocabulary.encode(character)[0])}

    assert following('{"') == {"a", "b"}
    assert following('{"a') == {"a", "b"}
    assert following('{"aa":1,"a') == {"b"}
    assert following('{"ab":1,"aa":1,"') == {"b"}
    assert following('{"ab":null,"aa":true') == {",", "}"}
    assert following('{"ab":null,"aa":true,"b":"b"') == {"}"}


def test_a_key_of_an_alternative_that_is_ruled_out_is_not_begun() -> None:
    options = [
        {"type": "object", "properties": {n: True}, "required": [n], "additionalProperties": False} for n in "ab"
    ]
    grammar = BYTES.compiler.compile(any_order({"anyOf": options}))
    for seed in range(20):
        _, outcome, why = BYTES.walker.walk(grammar, random.Random(seed), 60, Times())
        assert outcome != "dead_end", (seed, why)
    assert not accepts(compiler().compile(any_order({"anyOf": options})), '{"a":1,"b":2}')


def test_what_relates_the_keys_is_reported_as_checked() -> None:
    report = check_schema(json.dumps(CLOSED), property_order="any")
    assert {k.pointer: k.verdict for k in report.keywords}["/required"] == "checked"
    report = check_schema(json.dumps(CLOSED))
    assert {k.pointer: k.verdict for k in report.keywords}["/required"] == "enforced"


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="property_order: must be schema or any, got 'given'"):
        JsonSchema({}, property_order="given")  # type: ignore[arg-type]
