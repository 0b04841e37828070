"""Texts of a tiny model under schemas: what the report counts, and that it would notice what is wrong."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from specdec.build import Options
from specdec.errors import ConstraintError, DeadEnd
from specdec.evals.cases import Case
from specdec.evals.generations import Settings, judged, measure
from specdec.evals.report import generation_tables
from specdec.llm import LLM
from tests.server.conftest import write_model

SCHEMAS = {
    "enum": {"enum": ["a", "b", 17]},
    "object": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["on", "n"],
        "additionalProperties": False,
    },
    "endless": {"type": "string", "minLength": 500},
    "refused": {"$ref": "https://example.org/not-at-hand.json"},
}
CASES = [Case(name, json.dumps(schema), ()) for name, schema in SCHEMAS.items()]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    options = Options(device="cpu", dtype="float32", max_model_len=512, kv_cache_tokens=2048, policy="fixed")
    return LLM(str(write_model(tmp_path_factory.mktemp("models") / "tiny")), options)


def test_every_text_is_counted_by_how_it_ends(llm: LLM) -> None:
    done: list[tuple[int, int]] = []
    found = measure(
        llm, CASES, Settings(max_tokens=60, batch=2, whitespace="compact"), progress=lambda *at: done.append(at)
    )
    assert (found["schemas"], found["compiled"], found["equal_texts"]) == (4, 3, 3)
    assert (found["failing"], found["different"]) == ([], [])
    assert [entry["id"] for entry in found["refused"]] == ["refused"]
    for kind in ("plain", "drafted"):
        part = found[kind]
        assert (part["finished"], part["valid"], part["unfinished"]) == (2, 2, 1)
        assert part["tokens"] >= 60
    assert found["plain"]["draft_tokens"] == 0
    assert found["drafted"]["accepted_tokens"] > 0
    assert done[-1] == (6, 6)
    shown = io.StringIO()
    for table in generation_tables({**found, "seed": 0}):
        Console(file=shown, width=200).print(table)
    assert "3 of 3" in shown.getvalue()


@pytest.mark.parametrize(
    ("data", "finish_reason", "error", "end", "words"),
    [
        (b"17", "stop", None, "valid", ""),
        (b"18", "stop", None, "invalid", "18"),
        (b'"a', "stop", None, "invalid", "not JSON"),
        (b"1", "length", None, "unfinished", ""),
        (b"1", "error", DeadEnd("nothing may follow"), "dead_end", "nothing may follow"),
        (b"18", "error", ConstraintError("passed the grammar but not its schema"), "failed", "passed"),
    ],
)
def test_a_text_is_judged_by_its_schema(
    data: bytes, finish_reason: str, error: ConstraintError | None, end: str, words: str
) -> None:
    found, reason = judged(CASES[0], data, finish_reason, error, Settings(), None)
    assert found == end
    assert words in reason
