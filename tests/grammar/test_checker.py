"""What a grammar leaves out is checked while the text is written: no token may make the whole value false."""

from __future__ import annotations

import json
import os
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from specdec.evals.structured import Times
from specdec.grammar.checker import Judge
from specdec.grammar.json_text import JsonText
from specdec.grammar.lowering import ReferenceLoop
from specdec.grammar.numbers import Beginning, Divisor
from specdec.grammar.references import Documents
from specdec.grammar.residue import VALIDATORS, residue
from specdec.grammar.schema import check_schema, prepare
from specdec.grammar.shapes import Is
from specdec.grammar.spec import JsonSchema
from specdec.grammar.validated import problem, read_json
from tests.grammar import schema_pairs
from tests.grammar.schema_law import BYTES
from tests.grammar.schema_texts import accepts, compact, compiled
from tests.grammar.test_schema_random import loose_schema, loose_value

SUITE = Path(os.environ.get("SPECDEC_SHARED", Path(__file__).parents[3] / "shared" / "data")) / "JSON-Schema-Test-Suite"
FEW_OF_MANY = [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(4)]} for i in range(9)]


def judge_of(schema: Any, draft: int = 2020, remotes: dict[str, Any] | None = None) -> Judge:
    """A judge of everything that a schema asks, as if there were no grammar."""
    documents = Documents(schema, draft, remotes or {})
    return Judge(residue(documents, Is(documents.root), {""}, assert_formats=True))


def forbidden_at(judge: Judge, text: str) -> int | None:
    """The first byte after which a text is forbidden; its length if it must not end, None if all of it is right."""
    place: JsonText | None = JsonText(judge.start())
    for index, byte in enumerate(text.encode()):
        assert place is not None
        place = place.after(bytes([byte]))
        if place is None:
            return index
    assert place is not None
    return None if place.ended() is not None else len(text.encode())


@pytest.mark.parametrize(
    ("schema", "pointer", "valid", "invalid"),
    [
        (
            {"uniqueItems": True},
            "/uniqueItems",
            ['[true,1,"1",[1],{"a":1}]', '[{"a":1,"b":2},{"a":1,"b":3}]'],
            ["[1,[2],[2]]", '[{"a":1,"b":2},{"b":2,"a":1}]'],
        ),
        ({"not": {"uniqueItems": True}}, "/not/uniqueItems", ["[1,1]", "[1,2,3,2]"], ["[1,2]", "1", "[]"]),
        ({"type": "number", "multipleOf": 123457}, "/multipleOf", ["246914", "0"], ["123458", "0.5"]),
        ({"type": "number", "not": {"multipleOf": 3}}, "/not/multipleOf", ["4", "0.5"], ["3", "-12"]),
        ({"contains": {"const": 1}, "minContains": 900}, "/contains", [compact([1] * 900)], ["[1,1]"]),
        (
            {"maxContains": 1, "contains": {"type": "array", "uniqueItems": True}},
            "/contains/uniqueItems",
            ["[[1],[1,1]]"],
            ["[[1],[2]]", "[[1,1]]"],
        ),
        ({"type": "string", "format": "regex"}, "/format", ['"a(b)"'], ['"a(b"', '"*"']),
        ({"type": "string", "not": {"format": "regex"}}, "/not/format", ['"a(b"', '"*"'], ['"a(b)"']),
        (
            {"patternProperties": {"(?=x)y|x": {"type": "null"}}},
            "/patternProperties",
            ['{"a":1,"x":null}'],
            ['{"x":1}'],
        ),
        (
            {"allOf": FEW_OF_MANY},
            "/allOf",
            [compact({f"a{i}1": i for i in range(9)})],
            [compact({f"a{i}1": i for i in range(8)})],
        ),
        (
            {"type": "object", "maxProperties": 900, "properties": {"a": {}, "b": {}, "c": {}}, "required": ["a"]},
            "/maxProperties",
            ['{"a":1,"c":1}'],
            [compact({"a": 1} | {f"k{i}": i for i in range(900)})],
        ),
    ],
    ids=str,
)
def test_what_the_grammar_leaves_out_is_checked(
    schema: Any, pointer: str, valid: list[str], invalid: list[str]
) -> None:
    report = check_schema(json.dumps(schema))
    assert [keyword.verdict for keyword in report.keywords if keyword.pointer == pointer] == ["checked"]
    grammar = compiled(schema)
    assert [text for text in valid if not accepts(grammar, text)] == []
    assert [text for text in invalid if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "additionalProperties": False},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "array", "items": {"const": 1}}]},
        {"oneOf": [{"type": "integer", "multipleOf": 3}, {"type": "string"}]},
    ],
    ids=str,
)
def test_what_the_grammar_says_is_not_checked_again(schema: Any) -> None:
    assert prepare(json.dumps(schema)).residue is None


def test_a_long_chain_of_parts_is_checked_to_its_end() -> None:
    count = 150
    parts: dict[str, Any] = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    schema = {"$ref": "#/$defs/d0", "$defs": parts | {f"d{count}": {"uniqueItems": True}}}
    judge = Judge(prepare(json.dumps(schema)).residue)
    right, wrong = ('{"x":' * count + items + "}" * count for items in ("[1,2]", "[1,1]"))
    assert forbidden_at(judge, right) is None
    assert forbidden_at(judge, wrong) == wrong.index("]")


def test_only_what_is_left_out_is_checked() -> None:
    """An enforced part that holds nothing unsaid has no rule; one that does keeps what leads there."""
    schema = {
        "type": "object",
        "properties": {
            "plain": {"type": "array", "items": {"type": "integer", "minimum": 3}},
            "set": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        },
        "required": ["set"],
    }
    rule = prepare(json.dumps(schema)).residue
    assert rule is not None
    assert (rule.kinds, rule.required, list(rule.properties)) == (None, (), ["plain", "set"])
    assert rule.properties["plain"] is None
    inner = rule.properties["set"]
    assert inner is not None
    assert (inner.kinds, inner.items, inner.unique) == (None, None, True)


@pytest.mark.parametrize(
    ("schema", "text", "place"),
    [
        # A text is forbidden as soon as nothing that follows could make it right.
        ({"type": "array"}, "true", "t"),
        ({"type": "object"}, "[1]", "["),
        ({"properties": {"a": {"type": "string"}}}, '{"b":1,"a":{"c":1}}', '{"b":1,"a":{'),
        ({"maxProperties": 1}, '{"a":1,"b":2}', '{"a":1,'),
        ({"required": ["x", "y"], "maxProperties": 2}, '{"a":1}', '{"a"'),
        ({"maxItems": 1}, "[1,2]", "[1,"),
        ({"propertyNames": {"maxLength": 1}}, '{"ab":1}', '{"ab"'),
        ({"contains": {"const": 1}, "maxItems": 2}, "[2,3]", "[2,3]"),
        ({"uniqueItems": True}, "[1,1]", "[1,1]"),
        ({"uniqueItems": True}, '["a","a"]', '["a","a"'),
        ({"const": {"a": [1, {"b": 2}]}}, '{"a":[1,{"c":2}]}', '{"a":[1,{"c"'),
        ({"enum": [[1, 2], [2, 1]]}, "[2,2]", "[2,2]"),
        ({"not": {"required": ["a"]}}, '{"b":1,"a":2}', '{"b":1,"a"'),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"b":1,"a":2}', '{"b":1,"a"'),
        ({"if": {"required": ["a"]}, "then": {"maxProperties": 2}}, '{"a":1,"b":2,"c":3}', '{"a":1,"b":2,'),
        ({"dependentSchemas": {"a": {"maxProperties": 1}}}, '{"b":1,"a":2}', '{"b":1,"a"'),
        ({"unevaluatedProperties": False, "properties": {"a": {}}}, '{"a":1,"b":2}', '{"a":1,"b"'),
        ({"anyOf": [{"type": "null"}, {"items": {"type": "null"}}]}, "[null,[]]", "[null,["),
        ({"anyOf": [{"maxItems": 1}, {"minItems": 3}]}, "[1,2]", "[1,2]"),
    ],
    ids=str,
)
def test_a_text_is_forbidden_where_it_goes_wrong(schema: Any, text: str, place: str) -> None:
    at = forbidden_at(judge_of(schema), text)
    assert at is not None
    shown = text.encode()[: at + 1].decode()
    # What only the byte behind a number completes is forbidden with that byte.
    assert shown == place or shown[:-1] == place[:-1]


@pytest.mark.parametrize("seed", range(0, 400, 40))
def test_the_verdict_on_a_whole_value_is_the_validator_s(seed: int) -> None:
    print("seeds from", seed)
    judged = 0
    for number in range(seed, seed + 40):
        rng = random.Random(number)
        if number % 2:
            schema, values = loose_schema(rng, 2), [loose_value(rng, 3) for _ in range(12)]
            draft = rng.choice([2020, 2020, 2019, 7, 6]) if isinstance(schema, dict) else 2020
        else:
            first = schema_pairs.value(rng, 3)
            schema, draft = schema_pairs.Maker(rng).whole(first, 2), 2020
            values = [first, *(schema_pairs.variant(rng, first) for _ in range(8))]
        try:
            judge = judge_of(read_json(json.dumps(schema)), draft)
            validator = VALIDATORS[draft](schema, validate_formats=True, offline=True)
        except (ReferenceLoop, ValueError):
            continue
        for value in values:
            text = compact(value)
            right = validator.is_valid(read_json(text))
            assert (forbidden_at(judge, text) is None) is right, (number, draft, json.dumps(schema), text)
            judged += 1
    assert judged > 200


@pytest.mark.parametrize("draft", [2020, 7])
def test_the_official_suite_is_judged_right_without_a_grammar(draft: int) -> None:
    folder = SUITE / "tests" / ("draft2020-12" if draft == 2020 else f"draft{draft}")
    if not folder.exists():
        pytest.skip(f"{folder} is not there; SPECDEC_SHARED names the folder with the evaluation data")
    remotes = {
        f"http://localhost:1234/{path.relative_to(SUITE / 'remotes')}": json.loads(path.read_text())
        for path in (SUITE / "remotes").rglob("*.json")
    }
    count = 0
    for path in sorted(folder.glob("*.json")):
        if path.name in ("vocabulary.json", "format.json"):  # metaschemas of one's own; formats as annotations
            continue
        for group in json.loads(path.read_text()):
            if draft == 7 and path.name == "refRemote.json":
                continue  # its documents are not among those at hand
            judge = judge_of(read_json(json.dumps(group["schema"])), draft, remotes)
            for test in group["tests"]:
                where = (path.name, group["description"], test["description"])
                assert (forbidden_at(judge, json.dumps(test["data"])) is None) is test["valid"], where
                count += 1
    assert count > 800


@pytest.mark.parametrize(
    ("beginning", "divisor", "may_be"),
    [
        ("", "7", True),
        ("-", "0.5", True),
        ("12", "123457", True),
        ("0", "123457", True),
        ("0.", "123457", True),  # 0.0
        ("0.1", "123457", False),
        ("123457", "123457", True),
        ("1.6", "0.5", False),
        ("1.5", "0.5", True),
        ("1.50", "0.5", True),
        ("1.51", "0.5", False),
        ("-1.", "0.25", True),
        ("1234567", "1000000007", True),
        ("12345678901234567890123", "1000000007", False),  # one digit is left
        ("1e5", "7", True),
    ],
)
def test_a_number_is_begun_only_where_it_may_become_a_multiple(beginning: str, divisor: str, may_be: bool) -> None:
    assert Beginning(beginning).may_become_multiple(Divisor.of(Decimal(divisor))) is may_be
    judge = judge_of({"type": "number", "multipleOf": read_json(divisor)})
    assert judge.start().may_begin(beginning) is may_be


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 0.123456789},
        {"type": "number", "multipleOf": 123457},
        {"type": "number", "multipleOf": 1e-20},
        {"type": "array", "items": {"type": "integer", "multipleOf": 1000003}, "minItems": 2, "maxItems": 3},
        {"type": "object", "additionalProperties": {"type": "number", "multipleOf": 0.0003}, "minProperties": 2},
        {"anyOf": [{"type": "number", "multipleOf": 99991}, {"type": "boolean"}]},
    ],
    ids=str,
)
def test_random_multiples_come_to_an_end(schema: Any) -> None:
    for number in range(8):
        tokens, outcome, why = BYTES.walker.walk(
            BYTES.compiler.compile(JsonSchema(schema, "compact")), random.Random(number), 120, Times()
        )
        assert outcome != "dead_end", why
        if outcome == "finished":
            text = b"".join(map(BYTES.vocabulary.tokenizer.token_bytes, tokens))
            assert problem(text, prepare(json.dumps(schema)).validator) is None
    assert outcome == "finished"
