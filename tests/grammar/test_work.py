"""How much work a row takes, counted in calls, never in time: it must not grow with the text, nor with the schema."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from specdec.evals.vocabulary import byte_vocabulary
from specdec.grammar.llguidance import compile_json
from specdec.grammar.numbers import MULTIPLE_LENGTH, Beginning, Divisor, sure_length
from specdec.grammar.schema import prepare
from specdec.grammar.spec import JsonSchema
from specdec.grammar.words import Words
from specdec.protocols import Grammar
from tests.grammar.digit_tokenizer import digit_token, digit_tokens
from tests.grammar.schema_law import BYTES

PRIMES = [n for n in range(3, 300) if all(n % k for k in range(2, n))][:60]


def calls(work: Callable[[], object]) -> int:
    """How many functions are called, of Python and of C."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def calls_of_rows(grammar: Grammar, before: str, text: str) -> int:
    """The most calls for one row of `text`, written behind `before` in tokens of a byte."""
    constraint = grammar.start()
    constraint.advance(byte_vocabulary().encode(before))
    most = 0
    for token in byte_vocabulary().encode(text):
        most = max(most, calls(lambda: constraint.row(())))
        constraint.advance([token])
    return most


@pytest.mark.parametrize(
    ("schema", "write", "item"),
    [
        ({"items": {"type": "integer"}, "uniqueItems": True}, lambda n: f"3{n:04}", "31999"),
        ({"items": {"type": "string", "maxLength": 9}, "uniqueItems": True}, lambda n: f'"{n:05}"', '"xy"'),
        ({"items": {"type": "array"}, "uniqueItems": True}, lambda n: f"[{n}]", "[31999]"),
        ({"additionalProperties": {"type": "null"}}, lambda n: f'"k{n}":null', '"key":null'),
        ({"propertyNames": {"pattern": "^[a-z0-9]{1,9}$"}}, lambda n: f'"k{n}":null', '"key":null'),
        ({"prefixItems": [True], "anyOf": [{"items": {"type": "integer"}}, {"minItems": 2}], "unevaluatedItems": False},
         str, "31"),
    ],
    ids=lambda part: "written" if callable(part) else str(part),
)  # fmt: skip
def test_a_row_takes_no_more_work_behind_many_keys_or_items(
    schema: dict[str, Any], write: Callable[[int], str], item: str
) -> None:
    is_object = "additionalProperties" in schema or "propertyNames" in schema
    kind, (opening, closing) = ("object", "{}") if is_object else ("array", "[]")
    grammar = BYTES.compiler.compile(JsonSchema({"type": kind, **schema}, "compact"))
    work = [
        calls_of_rows(grammar, opening + "".join(write(n) + "," for n in range(many)), item + closing)
        for many in (200, 600)
    ]
    assert work[1] < 1.3 * work[0], work


@pytest.mark.parametrize(("keyword", "scale"), [("oneOf", 1), ("anyOf", 1000), ("oneOf", 0.001)])
def test_a_row_of_digits_takes_bounded_work_under_many_divisors(keyword: str, scale: float) -> None:
    """With tokens of three digits: a thousand of them are tried at once."""
    few, many = (calls_of_digits({"type": "number", keyword: options(count, scale), **CHECKED}) for count in (6, 60))
    assert max(many[1:4]) < 1.2 * max(few[1:4])  # far from its end a number may become any multiple
    assert max(many) < 10 * max(few)
    assert max(many) < 500_000


CHECKED = {"not": {"const": 0.5}}


def options(count: int, scale: float) -> list[dict[str, float]]:
    return [{"multipleOf": prime * scale} for prime in PRIMES[:count]]


def calls_of_digits(schema: dict[str, Any]) -> list[int]:
    """The calls for the first and the last rows of a number that is written digit by digit."""
    tokens, found = digit_tokens(), list[int]()
    grammar = compile_json(prepare(json.dumps(schema), spelling=tokens.spelling), "compact", tokens, "schema")
    constraint = grammar.start()
    for place, digit in enumerate("123456789012345678901234"):
        if not 4 <= place <= 16:
            found.append(calls(lambda: constraint.row(())))
        token = digit_token(digit)
        if not tokens.vocabulary.allows(constraint.row(()), token):
            break
        constraint.advance([token])
    return found


def test_beginnings_of_numbers_are_judged_as_by_trying_out() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        divisor = Decimal(rng.randrange(1, 10 ** rng.randrange(1, 5))).scaleb(-rng.randrange(4))
        left = rng.randrange(4)
        text = str(rng.randrange(10 ** (MULTIPLE_LENGTH - left - 2), 10 ** (MULTIPLE_LENGTH - left - 1)))
        place = rng.randrange(1, len(text))
        text = f"{text[:place]}.{text[place:]}" if rng.random() < 0.5 else text + "7"
        wanted = any(Fraction(text + more) % Fraction(divisor) == 0 for more in endings(left, "." in text))
        assert Beginning(text).may_become_multiple(Divisor.of(divisor)) is wanted, (seed, text, divisor)


def endings(most: int, has_point: bool) -> list[str]:
    """What may follow a number, up to `most` characters."""
    digits = ["".join(found) for size in range(most + 1) for found in itertools.product("0123456789", repeat=size)]
    if has_point:
        return digits
    pointed = (f"{ending[:place]}.{ending[place:]}" for ending in digits for place in range(len(ending)))
    return digits + [ending for ending in pointed if len(ending) <= most]


@pytest.mark.parametrize(("divisors", "length"), [((), 23), ((1,), 23), ((7, 9), 23), ((10, 3), 22), ((0.007, 11), 22)])
def test_short_numbers_may_become_multiples_of_all(divisors: tuple[float, ...], length: int) -> None:
    made = [Divisor.of(Decimal(str(value))) for value in divisors]
    assert sure_length(made) == length
    for seed in range(50):
        text = str(random.Random(seed).randrange(1, 10**length))
        assert all(Beginning(text).may_become_multiple(divisor) for divisor in made), (seed, text)


def test_words_are_found_by_how_they_begin() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        listed = ["".join(rng.choices("aé\0", k=rng.randrange(6))).encode() for _ in range(rng.randrange(12))]
        words = Words()
        for word in listed:
            words = words.with_word(word)
        beginning = "".join(rng.choices("aé", k=rng.randrange(3))).encode()[: rng.randrange(4)]
        begun = {word[len(beginning) :] for word in listed if word.startswith(beginning)}
        assert words.any_begins(beginning) is bool(begun), seed
        steps = list(words.steps(beginning, 3))
        assert len(steps) == len(set(steps)), seed
        assert set(steps) == {rest[:size] for rest in begun for size in range(1, min(len(rest), 3) + 1)}, seed
        assert len(words) == len(Words(listed)) == len(set(listed)), seed
