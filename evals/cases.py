"""Schemas with instances that are known to be valid or not, read from files. Knows JSON text, and no grammar.

Numbers keep the literals of the file: 1.0 is not 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError

DIALECTS: Mapping[str, str] = {
    "4": "http://json-schema.org/draft-04/schema#",
    "6": "http://json-schema.org/draft-06/schema#",
    "7": "http://json-schema.org/draft-07/schema#",
    "2019-09": "https://json-schema.org/draft/2019-09/schema",
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
}
SUITE_URL = "http://localhost:1234/"  # where the official suite says that its remote documents are


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written."""

    literal: str


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance: `value` as parsed (numbers as `Number`), or None and the exact `text` to write."""

    name: str
    valid: bool
    value: Any = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, as JSON text, and its instances."""

    id: str
    schema: str
    tests: tuple[Instance, ...]


def read_cases(paths: Sequence[Path], draft: str | None = None) -> list[Case]:
    """The cases of some paths: folders of the official suite (their own files, not those of folders inside), single
    files of it, and .jsonl files of `{id, schema, tests: [{valid, data}]}` or `{id, schema, valid: [text], invalid:
    [text]}`.

    `draft` ("4", "6", "7", "2019-09", "2020-12") is for schemas that do not say theirs; a folder of the suite says its
    own. Raises `ConfigError`, naming the file and the line, for what cannot be read.
    """
    if draft is not None and draft not in DIALECTS:
        raise ConfigError(f"draft must be one of {', '.join(DIALECTS)}, got {draft!r}")
    cases: list[Case] = []
    for path in paths:
        if path.is_dir():
            files = sorted(path.glob("*.json"))
            if not files:
                raise ConfigError(f"{path}: holds no .json files")
            for file in files:
                cases += _suite_cases(file, draft)
        elif path.suffix == ".jsonl":
            cases += _jsonl_cases(path, draft)
        else:
            cases += _suite_cases(path, draft)
    return cases


def read_remotes(folder: Path) -> dict[str, Any]:
    """The documents of a folder by address, as the official suite serves them. Raises `ConfigError`."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    return {
        SUITE_URL + file.relative_to(folder).as_posix(): json.loads(_read(file))
        for file in sorted(folder.rglob("*.json"))
    }


def parse(text: str) -> Any:
    """The value of a JSON text, with its numbers as they are written. Raises ValueError."""
    return json.loads(text, parse_int=Number, parse_float=Number, parse_constant=_constant)


def write(value: Any) -> str:
    """Compact JSON text of a value from `parse`: its numbers as they were, and only those escapes that must be."""
    if isinstance(value, Number):
        return value.literal
    if isinstance(value, str):
        return write_string(value)
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{write_string(key)}:{write(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def write_string(value: str) -> str:
    """A JSON string: escapes for quotes, backslashes, controls and halves of surrogate pairs, nothing else."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _suite_cases(file: Path, draft: str | None) -> Iterator[Case]:
    folder = next((part for part in reversed(file.resolve().parts[:-1]) if part.startswith("draft")), "")
    groups = _parsed(file, _read(file))
    if not isinstance(groups, list):
        raise ConfigError(f"{file}: must hold a list of groups, as the official test suite does")
    dialect = DIALECTS.get(draft or folder.removeprefix("draft"))
    for group in groups:
        try:
            tests = tuple(Instance(test["description"], test["valid"], test["data"]) for test in group["tests"])
            yield Case(f"{file.stem}/{group['description']}", _schema(group["schema"], dialect), tests)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{file}: a group must hold description, schema and tests: {error!r}") from error


def _jsonl_cases(file: Path, draft: str | None) -> Iterator[Case]:
    dialect = None if draft is None else DIALECTS[draft]
    for number, line in enumerate(_read(file).split("\n"), 1):
        if not line.strip():
            continue
        entry = _parsed(f"{file}:{number}", line)
        try:
            if "tests" in entry:
                tests = [Instance(str(i), test["valid"], test["data"]) for i, test in enumerate(entry["tests"])]
            else:
                tests = [Instance(text, True, text=text) for text in entry["valid"]]
                tests += [Instance(text, False, text=text) for text in entry["invalid"]]
            yield Case(entry["id"], _schema(entry["schema"], dialect), tuple(tests))
        except (KeyError, TypeError) as error:
            message = f"{file}:{number}: must hold id, schema, and tests or valid and invalid: {error!r}"
            raise ConfigError(message) from error


def _schema(schema: Any, dialect: str | None) -> str:
    """The text of a schema; one that does not name its dialect is given `dialect`."""
    if dialect is not None and isinstance(schema, dict) and "$schema" not in schema:
        schema = {"$schema": dialect, **schema}
    return write(schema)


def _parsed(place: object, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{place}: is not JSON: {error}") from error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
