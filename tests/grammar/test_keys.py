"""No key comes twice in one object, whoever makes it up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.errors import ConstraintError
from specdec.evals.structured import Times, replay_text
from specdec.evals.vocabulary import byte_vocabulary
from specdec.grammar.checker import Judge
from specdec.grammar.json_text import JsonText
from specdec.grammar.narrowing import Narrowing
from specdec.grammar.spec import JsonObject, JsonSchema, Spec
from specdec.grammar.token_table import TokenTable
from tests.grammar.schema_texts import accepts, allowed, compiled
from tests.grammar.small_tokenizer import compiler, encode

MAPS: list[dict[str, Any]] = [
    {"type": "object"},
    {"additionalProperties": {"type": "integer"}},
    {"patternProperties": {"^[a-zé]": {}}, "additionalProperties": False},
    {"properties": {"n": {}}, "additionalProperties": {"type": ["integer", "object"]}},
    {"type": "object", "maxProperties": 5},
]


@pytest.mark.parametrize("schema", MAPS, ids=str)
@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"a":1,"b":2}', True),
        ('{"a":1,"a":2}', False),
        ('{"a":1,"ab":2,"abc":3}', True),
        ('{"abc":1,"ab":2,"a":3}', True),
        ('{"abc":1,"ab":2,"abc":3}', False),
        ('{"a":1,"b":2,"c":3,"a":4}', False),
        ('{"é":1,"é":2}', False),
        ('{"a\\n":1,"a":2}', True),
        ('{"a\\n":1,"a\\n":2}', False),
        ('{"a\\"b":1,"a\\"b":2}', False),
    ],
)
def test_a_key_comes_once(schema: dict[str, Any], text: str, right: bool) -> None:
    assert accepts(compiled(schema), text) is right
    vocabulary = byte_vocabulary()
    grammar = vocabulary.compiler({}).compile(JsonSchema(schema))
    assert (replay_text(grammar, text, vocabulary, Times()).place is None) is right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"a":{"a":{"a":1}},"b":{"a":1}}', True),
        ('{"a":{"b":1,"b":2}}', False),
        ('{"a":[{"b":1},{"b":1}],"b":"a"}', True),
        ('{"a":[{"b":1},{"b":1,"b":1}]}', False),
        ('{"b":1,"a":{"x":{},"y":[]},"b":2}', False),
    ],
)
def test_a_key_comes_once_in_each_object(text: str, right: bool) -> None:
    assert accepts(compiler().compile(JsonObject("compact")), text) is right


@pytest.mark.parametrize(
    "text", [b'{"a":1,"\\u0061":2}', b'{"\\u0061":1,"a":2}', b'{"\\ud83d\\ude00":1,"\xf0\x9f\x98\x80":2}']
)
def test_an_escape_is_the_character_that_it_spells(text: bytes) -> None:
    """Whatever a grammar lets keys be spelled like."""
    table = TokenTable.of([bytes([byte]) for byte in range(256)], np.zeros(8, np.int32))
    narrowing = Narrowing(table, Judge(None).start())
    place = narrowing.start()
    last = text.rindex(b'"')
    for index, byte in enumerate(text):
        row_W = np.zeros(8, np.uint32)
        row_W[byte >> 5] = 1 << (byte & 31)
        narrowing.narrow(row_W.view(np.int32), place)
        assert row_W.any() == (index < last)
        if index == last:
            assert narrowing.after(place, byte) is None
            return
        following = narrowing.after(place, byte)
        assert isinstance(following, JsonText)
        place = following


@pytest.mark.parametrize(
    ("pieces", "right"),
    [
        (['{"a":1,"b":2', ',"c":3}'], True),
        (['{"a":1,"b":2', ',"b":3}'], False),
        (['{"a":1,"a":2}'], False),
        (['{"ab', '":1,"a', '":1,"ab":2'], False),
        (['{"ab', '":1,"a', '":1,"abc":2'], True),
        (['{"a":"b', '","b":"', '","a":1'], False),
        (['{"a":"b', '","b":"', '","c":1'], True),
        (['{"a":{', '"a":1},"a":1'], False),
        (['{"a":{', '"a":1},"b":1'], True),
        (['{"a":"\\', '",a"', "}"], True),
        (['{"a":"\\', '"","b":3,"', 'c":3'], True),
        (['{"a":"\\', '"","b":3,"', 'a":3'], False),
        (['{"a":"\\', '"","b":3,"b":3'], False),
    ],
    ids=str,
)
def test_one_token_may_hold_whole_keys(pieces: list[str], right: bool) -> None:
    """The last piece is allowed exactly where no key comes twice."""
    table = TokenTable.of([piece.encode() for piece in pieces], np.zeros(1, np.int32))
    narrowing = Narrowing(table, Judge(None).start())
    place: JsonText | None = narrowing.start()
    for token in range(len(pieces)):
        assert place is not None
        row_W = np.full(1, 1 << token, np.int32)
        narrowing.narrow(row_W, place)
        assert row_W.any() == (right or token < len(pieces) - 1)
        place = narrowing.after(place, token)
    assert (place is not None) is right


@pytest.mark.parametrize(
    ("spec", "followed"),
    [
        (JsonObject(), True),
        (JsonSchema({"type": "object", "properties": {"a": {"type": "integer"}}}), True),
        (
            JsonSchema({"properties": {"a": {"type": "integer"}}, "type": "object", "additionalProperties": False}),
            False,
        ),
        (JsonSchema({"type": "array", "items": {"type": "string"}}), False),
        (
            JsonSchema(
                {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}}
            ),
            False,
        ),
    ],
    ids=str,
)
def test_only_objects_that_make_up_keys_are_followed(spec: Spec, followed: bool) -> None:
    inner = compiler().compile(spec).start()._inner  # type: ignore[attr-defined]
    assert (inner._narrowing is not None) is followed


def test_a_key_that_repeats_cannot_be_advanced_and_harms_nothing() -> None:
    constraint = compiler().compile(JsonObject("compact")).start()
    constraint.advance(encode('{"a":1,"a'))
    before = allowed(constraint)
    with pytest.raises(ConstraintError, match="cannot follow"):
        constraint.advance(encode('":'))
    np.testing.assert_array_equal(allowed(constraint), before)
    constraint.advance(encode('b":'))
