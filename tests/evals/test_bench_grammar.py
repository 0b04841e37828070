"""The benches of grammars: what they count, and that a text under a schema and a free one are as long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.build import Options
from specdec.evals.bench_grammar import SCHEMAS, bench_constrained, bench_grammar
from specdec.evals.cases import Case
from specdec.evals.report import constrained_tables, grammar_tables
from specdec.evals.vocabulary import byte_vocabulary
from specdec.llm import LLM
from tests.server.conftest import write_model

PLAIN = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("order", ["schema", "any"])
def test_rows_and_trees_are_counted_by_whether_a_checker_follows(order: str) -> None:
    schemas = {"plain": PLAIN, "unique": {"type": "array", "uniqueItems": True}, "refused": {"$schema": "mine"}}
    cases = [Case(name, json.dumps(schema), ()) for name, schema in schemas.items()]
    report = bench_grammar(cases, byte_vocabulary(), walks=2, property_order=order)  # type: ignore[arg-type]
    assert (report["plain"]["schemas"], report["checked"]["schemas"]) == ((1, 1) if order == "schema" else (0, 2))
    assert report["checked"]["rows"] > 0
    for found in report.values():
        for name in ("row_us", "tree_us", "walk_us"):
            assert (found[name]["p50"] is None) == (found["schemas"] == 0)
    assert grammar_tables(report)[0].row_count == 2


def test_free_and_constrained_texts_take_as_many_steps(tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path / "tiny")), Options(device="cpu", dtype="float32", max_model_len=1024))
    report = bench_constrained(llm, tokens=8, rounds=2)
    assert list(report["schemas"]) == list(SCHEMAS)
    assert all(found["steps"] == 16 and found["ratio"] > 0 for found in report["schemas"].values())
    assert constrained_tables(report)[0].row_count == len(SCHEMAS) + 1
