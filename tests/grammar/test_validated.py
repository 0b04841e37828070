"""A grammar that means less than its schema is found out at the end of the text, and says so."""

from __future__ import annotations

import json

import jsonschema_rs
import pytest

from specdec.config import EngineConfig
from specdec.drafters.forced import ForcedDrafter
from specdec.errors import ConstraintError
from specdec.evals.vocabulary import byte_vocabulary
from specdec.grammar.spec import JsonSchema, Regex, Spec
from specdec.grammar.validated import ValidatedGrammar, problem, read_json
from specdec.protocols import Grammar
from specdec.request import Request, Sampling, Stopping
from tests.fakes import hash_engine, run

BYTES = byte_vocabulary()
CONFIG = EngineConfig(max_model_len=256, num_slots=1024, block_size=16, max_num_seqs=4, max_rows=128)


def grammar(spec: Spec, schema: dict[str, object]) -> Grammar:
    """The grammar of `spec`, said to be that of `schema`."""
    compiled = BYTES.compiler({}).compile(spec)
    return ValidatedGrammar(compiled, jsonschema_rs.validator_for(schema), BYTES.tokenizer.token_bytes)


@pytest.mark.parametrize("speculative", [True, False])
def test_a_text_that_its_schema_refuses_ends_its_request_with_an_error(speculative: bool) -> None:
    wrong = grammar(JsonSchema({"enum": [11, 12, 13]}), {"minimum": 20})
    right = grammar(JsonSchema({"enum": [11, 12, 13]}), {"minimum": 10})
    engine = hash_engine(CONFIG, ForcedDrafter(), vocab_size=BYTES.size, end_tokens=BYTES.end_ids)
    sampling = Sampling(seed=3, speculative=speculative)
    found = run(engine, [Request((1, 2), sampling, grammar=wrong), Request((1, 2), sampling, grammar=right)])
    first, second = found["r0", 0][-1], found["r1", 0][-1]
    assert first.finish_reason == "error"
    assert isinstance(first.error, ConstraintError)
    assert "11 is less than the minimum of 20" in str(first.error).replace("12", "11").replace("13", "11")
    assert "bug in specdec" in str(first.error)
    assert second.finish_reason == "stop"
    assert second.error is None
    assert engine.metrics.constraint_errors == 1
    assert not engine.has_work


@pytest.mark.parametrize("stopping", [Stopping(max_tokens=1), Stopping(stop_token_ids=tuple(range(256)))])
def test_a_text_that_is_cut_short_is_not_judged(stopping: Stopping) -> None:
    wrong = grammar(JsonSchema({"enum": [11, 12, 13]}), {"minimum": 20})
    engine = hash_engine(CONFIG, ForcedDrafter(), vocab_size=BYTES.size, end_tokens=BYTES.end_ids)
    found = run(engine, [Request((1, 2), Sampling(seed=3), stopping, grammar=wrong)])
    assert found["r0", 0][-1].finish_reason in ("length", "stop")
    assert found["r0", 0][-1].error is None


def test_a_grammar_of_something_that_is_no_json_is_found_out() -> None:
    engine = hash_engine(CONFIG, ForcedDrafter(), vocab_size=BYTES.size, end_tokens=BYTES.end_ids)
    found = run(engine, [Request((1,), Sampling(seed=1), grammar=grammar(Regex("[a-c]"), {}))])
    assert "it is not JSON that can be judged" in str(found["r0", 0][-1].error)


@pytest.mark.parametrize(
    ("schema", "text", "valid"),
    [
        ({"type": "number"}, "2e871", True),
        ({"maximum": 1}, "1.0000000000000000000000001", False),
        ({"multipleOf": 0.01}, "0.07", True),
        ({"type": "integer"}, "1.0", True),
        ({"minimum": 0}, "-" + "9" * 5000, False),
        ({"properties": {"a": {"items": {"type": "null"}}}}, '{"a":[null,3]}', False),
        ({}, "NaN", False),
        ({}, '[{"a":1,"\\u0061":1}]', False),
        ({}, "[" * 100_000, False),
        ({}, "1e" + "9" * 40, False),
        ({}, '"\\ud800"', False),
    ],
)
def test_values_are_judged_exactly(schema: dict[str, object], text: str, valid: bool) -> None:
    found = problem(text.encode(), jsonschema_rs.validator_for(schema))
    assert (found is None) == valid, found
    if "properties" in schema:
        assert found is not None
        assert found.startswith("at /a/1: ")


def test_numbers_are_read_as_they_are_written() -> None:
    assert str(read_json("0.1000")) == "0.1000"
    assert read_json("9" * 100) == int("9" * 100)
    assert json.loads("3") == read_json("3")
