"""Prompts of evals: what a file may hold, and what a broken one is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ConfigError
from specdec.evals.prompts import DEFAULT_PROMPTS, EvalPrompt, read_prompts
from specdec.grammar.spec import JsonObject, JsonSchema

USER = [{"role": "user", "content": "hello"}]


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def test_the_packaged_prompts_are_read() -> None:
    prompts = read_prompts(DEFAULT_PROMPTS)
    assert len(prompts) == 20
    assert sum(isinstance(prompt.constraint, JsonSchema) for prompt in prompts) == 4
    assert len({prompt.category for prompt in prompts}) >= 5


def test_fields_arrive_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    schema = {"type": "object"}
    path = write(
        tmp_path / "p.jsonl",
        {"id": "a", "category": "x", "messages": USER},
        "",
        {"id": "b", "category": "x", "messages": USER, "response_format": {"type": "json_object"}},
        {
            "id": "c",
            "category": "y",
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        },
    )
    assert read_prompts(path, whitespace="compact") == [
        EvalPrompt("a", "x", tuple(USER)),
        EvalPrompt("b", "x", tuple(USER), JsonObject("compact")),
        EvalPrompt("c", "y", tuple(USER), JsonSchema(schema, "compact")),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "Expecting"),
        ("[]", "must be an object, got list"),
        ({"category": "x", "messages": USER}, "id: must be a string"),
        ({"id": "a", "category": 3, "messages": USER}, "category: must be a string"),
        ({"id": "a", "category": "x", "messages": []}, "messages: must be a list"),
        ({"id": "a", "category": "x", "messages": [{"role": "user"}]}, "messages.0: must be an object"),
        ({"id": "a", "category": "x", "messages": USER, "seed": 1}, "seed: no such field"),
        ({"id": "first", "category": "x", "messages": USER}, "'first' is there already"),
        (
            {"id": "a", "category": "x", "messages": USER, "response_format": {"type": "xml"}},
            "response_format: must be",
        ),
        (
            {
                "id": "a",
                "category": "x",
                "messages": USER,
                "response_format": {"type": "json_schema", "json_schema": {"schema": 1}},
            },
            "schema: must be a JSON object",
        ),
    ],
)
def test_a_bad_line_is_told_by_file_and_line(line: Any, complaint: str, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"id": "first", "category": "x", "messages": USER}, "", line)
    with pytest.raises(ConfigError) as refusal:
        read_prompts(path)
    assert str(refusal.value).startswith(f"{path}:3: ")
    assert complaint in str(refusal.value)


def test_a_file_that_is_missing_or_empty_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(write(tmp_path / "p.jsonl", ""))
