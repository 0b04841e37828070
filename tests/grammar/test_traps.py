"""No text is led where nothing may follow: all texts of small schemas are all that the schemas allow."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from specdec.errors import InvalidRequest
from specdec.evals.structured import Times, validator
from specdec.grammar.spec import JsonSchema
from specdec.grammar.token_table import tokens_of
from specdec.grammar.validated import read_json
from specdec.protocols import Grammar
from tests.grammar.schema_law import BYTES
from tests.grammar.schema_texts import compact

MAX_TEXTS = 6_000


def all_texts(grammar: Grammar) -> Iterator[str]:
    """Every text under a grammar, depth first. Fails where something leads to a place where nothing may follow."""
    pending: list[list[int]] = [[]]
    for _ in range(MAX_TEXTS):
        if not pending:
            return
        tokens = pending.pop()
        constraint = grammar.start()
        constraint.advance(tokens)
        row_W = constraint.row(())
        assert row_W is not None
        text = b"".join(map(BYTES.vocabulary.tokenizer.token_bytes, tokens)).decode()
        allowed = tokens_of(row_W).tolist()
        assert allowed, f"nothing may follow {text!r}"
        for token in allowed:
            if token in BYTES.vocabulary.end_ids:
                yield text
            else:
                pending.append([*tokens, token])
    raise AssertionError(f"more than {MAX_TEXTS} beginnings of texts")


def check_all_texts(schema: Any, texts: list[str]) -> None:
    """Of `texts`, those that the schema allows can be written under it, and no other text of any kind."""
    judge = validator(json.dumps(schema), {}, "assert")
    right = {text for text in texts if judge.is_valid(read_json(text))}
    try:
        grammar = BYTES.compiler.compile(JsonSchema(schema, "compact"))
    except InvalidRequest as error:
        assert (error.code, right) == ("unsatisfiable", set()), (json.dumps(schema), error)
        return
    assert right, f"{json.dumps(schema)} compiles, and nothing satisfies it"
    assert {text for text in all_texts(grammar) if text != "-0"} == right, json.dumps(schema)  # zero twice


def about_numbers(rng: random.Random) -> dict[str, Any]:
    """Something asked of a number that a grammar does not say."""
    divisor = rng.choice([2, 3, 4, 5, 7, 10, 11])
    other = rng.choice([2, 3, 6, 9])
    return rng.choice(
        [
            {"not": {"multipleOf": divisor}},
            {"multipleOf": other, "not": {"multipleOf": divisor}},
            {"oneOf": [{"multipleOf": divisor}, {"multipleOf": other}]},
            {"not": {"anyOf": [{"multipleOf": divisor}, {"multipleOf": other}]}},
            {"if": {"multipleOf": other}, "then": {"multipleOf": divisor}},
            {"not": {"enum": rng.sample(range(40), 5)}, "multipleOf": other},
        ]
    )


@pytest.mark.parametrize("seed", range(0, 60, 20))
def test_all_integers_between_bounds_that_hold_can_be_written_and_no_others(seed: int) -> None:
    print("seeds from", seed)
    for number in range(seed, seed + 20):
        rng = random.Random(number)
        least = rng.randrange(-30, 300)
        most = least + rng.randrange(60)
        schema = {"type": "integer", "minimum": least, "maximum": most, **about_numbers(rng)}
        check_all_texts(schema, [str(value) for value in range(least, most + 1)])


@pytest.mark.parametrize(
    "schema",
    [
        {"minimum": 0, "maximum": 3_000_000, "not": {"multipleOf": 3}},
        {"minimum": 1, "maximum": 10**9, "multipleOf": 99_991},
        {"minimum": 10**11, "maximum": 10**12, "multipleOf": 99_999_989},
        {"minimum": -(10**7), "maximum": -(10**6), "not": {"anyOf": [{"multipleOf": 2}, {"multipleOf": 7}]}},
        {"minimum": 5_000, "maximum": 9_000, "oneOf": [{"multipleOf": 7}, {"multipleOf": 11}, {"multipleOf": 2}]},
    ],
    ids=str,
)
def test_a_bounded_integer_with_a_checked_multiple_always_ends(schema: dict[str, Any]) -> None:
    grammar = BYTES.compiler.compile(JsonSchema({"type": "integer", **schema}, "compact"))
    judge = validator(json.dumps({"type": "integer", **schema}), {}, "assert")
    for seed in range(15):
        tokens, outcome, why = BYTES.walker.walk(grammar, random.Random(seed), 30, Times())
        assert outcome == "finished", why
        assert judge.is_valid(read_json(b"".join(map(BYTES.vocabulary.tokenizer.token_bytes, tokens)).decode()))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 99_991, "not": {"multipleOf": 99_989}},
        {"type": "array", "uniqueItems": True, "minItems": 96, "items": {"$ref": "#/$defs/pair"}},
    ],
    ids=str,
)
def test_a_text_that_goes_on_and_on_never_runs_into_a_dead_end(schema: dict[str, Any]) -> None:
    pair = {"type": "array", "items": {"enum": list(range(10))}, "minItems": 2, "maxItems": 2}
    grammar = BYTES.compiler.compile(JsonSchema({**schema, "$defs": {"pair": pair}}, "compact"))
    for seed in range(4, 7):
        _, outcome, why = BYTES.walker.walk(grammar, random.Random(seed), 100, Times())
        assert outcome != "dead_end", why


@pytest.mark.parametrize("seed", range(4))
def test_what_must_not_be_a_multiple_never_begins_as_zero(seed: int) -> None:
    """Every number but zero may get another digit, and be none."""
    few = {"contains": {"multipleOf": 12_347}, "maxContains": 1}
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 300, **few}
    grammar = BYTES.compiler.compile(JsonSchema(schema, "compact"))
    _, outcome, why = BYTES.walker.walk(grammar, random.Random(seed), 200, Times())
    assert outcome == "unfinished", why


@pytest.mark.parametrize("seed", range(0, 60, 20))
def test_all_short_arrays_that_hold_can_be_written_and_no_others(seed: int) -> None:
    print("seeds from", seed)
    for number in range(seed, seed + 20):
        rng = random.Random(number)
        items: list[Any] = rng.choice([[0, 1, 2], ["a", "b"], [True, False], [[], [1]], [{}, {"k": 1}], [5, 50, "5"]])
        least, most = sorted(rng.choices(range(4), k=2))
        schema: dict[str, Any] = {"type": "array", "items": {"enum": items}, "minItems": least, "maxItems": most}
        for _ in range(rng.randint(1, 2)):
            schema |= rng.choice(
                [
                    {"uniqueItems": True},
                    {"not": {"uniqueItems": True}},
                    {"contains": {"const": items[0]}, "maxContains": rng.randint(1, 2)},
                    {"contains": {"type": ["string", "boolean", "array"]}, "minContains": rng.randint(0, 2)},
                    {"not": {"contains": {"const": items[-1]}}},
                    {"oneOf": [{"uniqueItems": True}, {"contains": {"const": items[0]}}]},
                    {"anyOf": [{"uniqueItems": True}, {"minItems": 2, "contains": {"const": items[1]}}]},
                    {"if": {"uniqueItems": True}, "then": {"maxItems": 1}},
                ]
            )
        texts = [compact(list(values)) for size in range(most + 2) for values in product(items, repeat=size)]
        check_all_texts(schema, texts)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 3, "maximum": 3, "not": {"multipleOf": 3}},
        {"enum": ["*", "(", "["], "type": "string", "format": "regex"},
        {"type": "array", "maxItems": 1, "not": {"uniqueItems": True}},
        {
            "type": "array",
            "prefixItems": [{"const": 1}, {"const": 1}],
            "minItems": 2,
            "uniqueItems": True,
            "items": False,
        },
        {"required": ["a"], "type": "object", "properties": {"a": {"type": "string", "const": "*", "format": "regex"}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("whitespace", ["compact", "flexible", " +"])
def test_what_nothing_satisfies_is_refused_whoever_finds_out(schema: dict[str, Any], whitespace: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BYTES.compiler.compile(JsonSchema(schema, whitespace))
    assert caught.value.code == "unsatisfiable", caught.value


SPACED = [{"a b": 1}, {"a b": 2}]  # in keys and strings blanks are content


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"maxItems": 3, "items": {"enum": [1, {"c d": True}]}, "uniqueItems": True},
         ["[]", "[1]", '[{"c d":true}]', '[1,{"c d":true}]', '[{"c d":true},1]']),
        ({"minItems": 2, "maxItems": 2, "items": {"enum": SPACED}, "uniqueItems": True},
         ['[{"a b":1},{"a b":2}]', '[{"a b":2},{"a b":1}]']),
        ({"minItems": 2, "maxItems": 2, "items": {"enum": SPACED}, "not": {"uniqueItems": True}},
         ['[{"a b":1},{"a b":1}]', '[{"a b":2},{"a b":2}]']),
        ({"minItems": 2, "maxItems": 2, "items": {"enum": ["a b", "ab"]}, "contains": {"const": "a b"},
          "minContains": 2, "not": {"uniqueItems": True}}, ['["a b","a b"]']),
    ],
)  # fmt: skip
@pytest.mark.parametrize("whitespace", ["compact", "flexible"])
def test_blanks_in_keys_and_strings_are_no_blanks(schema: dict[str, Any], texts: list[str], whitespace: str) -> None:
    schema = {"type": "array", **schema}
    grammar = BYTES.compiler.compile(JsonSchema(schema, whitespace))
    for text in texts:
        constraint = grammar.start()
        constraint.advance(BYTES.vocabulary.encode(text))
        constraint.finish()
    if whitespace == "compact":
        assert sorted(all_texts(grammar)) == sorted(texts)


@pytest.mark.parametrize("length", [50, 500, 5_000])
@pytest.mark.parametrize(
    "schema",
    [
        {"minLength": 1, "not": {"pattern": "b"}},
        {"maxLength": 1, "not": {"pattern": "b"}},
        {"maxLength": 1, "anyOf": [{"pattern": "^a"}, {"pattern": "b$"}], "not": {"pattern": "c.d"}},
        {"minLength": 1, "allOf": [{"pattern": "a"}, {"pattern": "b"}, {"not": {"format": "email"}}]},
        {"maxLength": 1, "oneOf": [{"pattern": "a"}, {"pattern": "b+c"}]},
    ],
    ids=str,
)
def test_strings_of_too_many_states_are_refused_and_never_a_dead_end(schema: dict[str, Any], length: int) -> None:
    schema = {key: length if key in ("minLength", "maxLength") else value for key, value in schema.items()}
    try:
        grammar = BYTES.compiler.compile(JsonSchema({"type": "string", **schema}))
    except InvalidRequest as error:
        assert (error.code, length > 50) == ("too_large", True), error
        assert "/minLength" in error.message or "/maxLength" in error.message
        return
    for seed in range(3):
        _, outcome, why = BYTES.walker.walk(grammar, random.Random(seed), 150, Times())
        assert outcome != "dead_end", why


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"pattern": "a.{15}b"}},
        {"not": {"pattern": "(a|b)*a(a|b){20}"}},
        {"allOf": [{"not": {"pattern": "^a"}}, {"not": {"pattern": "x$"}}, {"not": {"pattern": "^(a|b)*a(a|b){20}$"}}]},
    ],
)
def test_complements_that_fail_in_the_middle_of_a_text_are_refused_without_a_bound_too(schema: dict[str, Any]) -> None:
    """Let through, each failed within 150 characters of a and b: "too many expressions constructed"."""
    with pytest.raises(InvalidRequest, match="too many states") as caught:
        BYTES.compiler.compile(JsonSchema({"type": "string", **schema}))
    assert caught.value.code == "too_large"
