"""The law of a compiled schema: it allows the valid instances, token by token to their end, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from specdec.errors import InvalidRequest
from specdec.evals.cases import parse
from specdec.evals.orders import Orders, ranks
from specdec.evals.structured import Times, Walker, replay_text, validator
from specdec.evals.vocabulary import EvalVocabulary, byte_vocabulary
from specdec.grammar.compile import Compiler
from specdec.grammar.schema import prepare
from specdec.grammar.spec import Formats, JsonSchema
from specdec.grammar.validated import problem, read_json
from specdec.protocols import Grammar
from tests.grammar.schema_texts import compact

MAX_ORDERS = 400  # of the keys of one instance
WALKS, WALK_TOKENS = 3, 60


@dataclass(slots=True)
class Seen:
    """What a run of the law came across."""

    schemas: int = 0
    compiled: int = 0
    unsatisfiable: int = 0
    valid: int = 0
    invalid: int = 0
    reordered: int = 0
    walked: int = 0
    trapped: int = 0


@dataclass(frozen=True)
class Writer:
    """Whose tokens the texts are made of. With a token for every byte, each place of a text is asked about."""

    vocabulary: EvalVocabulary

    @cached_property
    def compiler(self) -> Compiler:
        """The compiler for all schemas."""
        return self.vocabulary.compiler({})

    @cached_property
    def walker(self) -> Walker:
        """What writes random texts."""
        return Walker(self.vocabulary)


BYTES = Writer(byte_vocabulary())


def check_law(
    schema: Any, instances: Iterable[Any], seen: Seen, formats: Formats = "assert", writer: Writer = BYTES
) -> None:
    """Replay instances under the schema's grammar, if it compiles, against what jsonschema-rs says of them.

    A valid one must pass with its keys in the schema's order, or, where alternatives name them otherwise, in some
    order; an invalid one in none that is tried. And random texts under the mask are valid where they come to an end.
    """
    seen.schemas += 1
    texts = list(dict.fromkeys(compact(canonical(instance)) for instance in instances))
    try:
        grammar = writer.compiler.compile(JsonSchema(schema, "compact", formats))
        prepared = prepare(json.dumps(schema), formats=formats)
        judge, checked = prepared.validator, prepared.residue is not None
    except InvalidRequest as error:
        loop = "leads back to where it stands" in error.message
        assert loop or error.code in ("unsupported_schema", "too_large", "unsatisfiable"), error
        if error.code == "unsatisfiable":
            seen.unsatisfiable += 1
            assert not any(map(validator(json.dumps(schema), {}, formats).is_valid, map(read_json, texts))), (
                "called unsatisfiable"
            )
        return
    seen.compiled += 1
    order = ranks(schema) if isinstance(schema, Mapping) else {}
    for text in texts:
        valid = judge.is_valid(read_json(text))
        tried, wrong = _tried(grammar, text, order, MAX_ORDERS if valid else MAX_ORDERS // 4, writer.vocabulary)
        assert (wrong is None) is valid, f"{text} is {'valid' if valid else 'not valid'}, yet: {wrong or 'accepted'}"
        seen.valid += valid
        seen.invalid += not valid
        seen.reordered += valid and tried > 1
    for number in range(WALKS):
        tokens, outcome, reason = writer.walker.walk(grammar, Random(f"{texts} {number}"), WALK_TOKENS, Times())
        # A check beside the grammar looks ahead as far as its steps go; a grammar alone is never trapped.
        assert outcome != "dead_end" or checked, reason
        seen.trapped += outcome == "dead_end"
        if outcome == "finished":
            data = b"".join(map(writer.vocabulary.tokenizer.token_bytes, tokens))
            wrong = problem(data, judge)
            assert wrong is None, f"{data!r} is accepted: {wrong}"
            seen.walked += 1


def canonical(instance: Any) -> Any:
    """The value with every number as it is written: whole ones as integers, fractions in few digits, so without an
    exponent."""
    match instance:
        case float():
            short = round(instance, 4) if abs(instance) < 1e9 else instance
            return int(short) if short.is_integer() or abs(instance) >= 1e9 else short
        case list():
            return [canonical(item) for item in instance]
        case dict():
            return {key: canonical(item) for key, item in instance.items()}
    return instance


def _tried(
    grammar: Grammar, text: str, order: Mapping[str, int], max_orders: int, vocabulary: EvalVocabulary
) -> tuple[int, str | None]:
    """How many orders of the keys were tried, and why none passed, or None."""
    orders = Orders(parse(text), order)
    refused_at: int | None = None
    first: str | None = None
    for tried in range(max_orders):
        written = orders.next(refused_at)
        if written is None:
            return tried, first
        other = vocabulary.spelling.respelled(written)
        replay = replay_text(grammar, other, vocabulary, Times())
        if replay.place is None:
            return tried + 1, None
        first = first or replay.reason
        if other == written:  # else the place is in a text that is spelled otherwise
            refused_at = len(other.encode()[: replay.place + 1].decode(errors="ignore"))
    return max_orders, first
