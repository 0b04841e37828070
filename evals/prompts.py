"""Prompts for evals: one JSON object a line, `{"id", "category", "messages", "response_format"?}`. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, InvalidRequest
from specdec.grammar.spec import JsonObject, JsonSchema, Spec, Whitespace

DEFAULT_PROMPTS = Path(__file__).parent / "data" / "eval_prompts.jsonl"
_FIELDS = ("id", "category", "messages", "response_format")


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """A conversation to answer; `constraint` None is free text."""

    id: str
    category: str
    messages: tuple[Mapping[str, Any], ...]
    constraint: Spec | None = None


def read_prompts(path: Path, *, whitespace: Whitespace = "flexible") -> list[EvalPrompt]:
    """All prompts of a file, in its order; `whitespace` goes to their JSON constraints.

    Raises `ConfigError` naming the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    prompts: dict[str, EvalPrompt] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = _prompt(line, whitespace)
        except (ValueError, InvalidRequest) as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        if prompt.id in prompts:
            raise ConfigError(f"{path}:{number}: id {prompt.id!r} is there already")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ConfigError(f"{path}: holds no prompts")
    return list(prompts.values())


def _prompt(line: str, whitespace: Whitespace) -> EvalPrompt:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"must be an object, got {type(record).__name__}")
    for name in record:
        if name not in _FIELDS:
            raise ValueError(f"{name}: no such field; there are {', '.join(_FIELDS)}")
    for name in ("id", "category"):
        if not isinstance(record.get(name), str) or not record[name]:
            raise ValueError(f"{name}: must be a string that is not empty, got {record.get(name)!r}")
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages: must be a list of at least one message")
    for place, message in enumerate(messages):
        for part in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(part), str):
                raise ValueError(f"messages.{place}: must be an object whose role and content are strings")
    return EvalPrompt(
        record["id"], record["category"], tuple(messages), _constraint(record.get("response_format"), whitespace)
    )


def _constraint(wanted: object, whitespace: Whitespace) -> Spec | None:
    match wanted:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return JsonObject(whitespace)
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return JsonSchema(schema, whitespace)
    raise ValueError(f"response_format: must be text, json_object or json_schema with a schema, got {wanted!r:.80}")


def categories(prompts: list[EvalPrompt]) -> Iterator[str]:
    """Each category once, in the order in which they come."""
    yield from dict.fromkeys(prompt.category for prompt in prompts)
