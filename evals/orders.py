"""The texts of one JSON value with its keys in different orders. Knows no grammar, only where a text was refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.evals.cases import write, write_string

NAMING = ("properties", "required", "dependencies", "dependentRequired", "dependentSchemas")


@dataclass(frozen=True, slots=True)
class _Choice:
    offset: int  # characters before the key
    taken: int
    options: int


class Orders:
    """Walks through the orders of all keys in `value`, depth first: the keys of lowest rank come first.

    A key without a rank comes after those with one, as it stands in the value.
    """

    def __init__(self, value: Any, ranks: Mapping[str, int]) -> None:
        self._value = value
        self._ranks = ranks
        self._prefix: list[int] | None = []
        self._choices: list[_Choice] | None = None

    def next(self, refused_at: int | None = None) -> str | None:
        """The next text, or None after the last. All texts that begin as the last one did, up to `refused_at`, the
        character that could not follow there, are passed over."""
        if self._choices is not None:
            self._prefix = _after([c for c in self._choices if refused_at is None or c.offset <= refused_at])
        if self._prefix is None:
            return None
        self._choices = []
        pieces: list[str] = []
        self._write(self._value, pieces, 0)
        return "".join(pieces)

    def _write(self, value: Any, pieces: list[str], offset: int) -> int:
        """Append the text of `value`, which begins at `offset`; where it ends."""
        if isinstance(value, list):
            offset = _put("[", pieces, offset)
            for index, item in enumerate(value):
                offset = self._write(item, pieces, _put("," if index else "", pieces, offset))
            return _put("]", pieces, offset)
        if not isinstance(value, dict):
            return _put(write(value), pieces, offset)
        keys = sorted(value, key=lambda key: self._ranks.get(key, len(self._ranks)))
        offset = _put("{", pieces, offset)
        while keys:
            key = keys.pop(self._choose(len(keys), offset))
            offset = _put(write_string(key) + ":", pieces, offset)
            offset = self._write(value[key], pieces, offset)
            offset = _put("," if keys else "", pieces, offset)
        return _put("}", pieces, offset)

    def _choose(self, options: int, offset: int) -> int:
        assert self._prefix is not None
        assert self._choices is not None
        place = len(self._choices)
        taken = self._prefix[place] if place < len(self._prefix) else 0
        self._choices.append(_Choice(offset, taken, options))
        return taken


def ranks(schema: Any) -> dict[str, int]:
    """The keys that a schema names: in `properties`, `required` and dependencies, and in what `const` and `enum` hold,
    in the order of the schema."""
    found: dict[str, int] = {}
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            for keyword in NAMING:
                for name in _names(value.get(keyword)):
                    found.setdefault(name, len(found))
            for name in _keys([value.get("const"), value.get("enum")]):
                found.setdefault(name, len(found))
            pending.extend(reversed(list(value.values())))
        elif isinstance(value, list):
            pending.extend(reversed(value))
    return found


def _names(value: Any) -> list[str]:
    """The strings of a list; or the keys of an object, and behind them those in lists that it holds."""
    if isinstance(value, dict):
        return [*value, *(name for held in value.values() if isinstance(held, list) for name in _names(held))]
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _keys(value: Any) -> list[str]:
    """The keys of all objects in a JSON value, an object's own before those below it."""
    if isinstance(value, dict):
        return [*value, *_keys(list(value.values()))]
    return [key for item in value for key in _keys(item)] if isinstance(value, list) else []


def _after(choices: list[_Choice]) -> list[int] | None:
    """The choices that lead to the next order, or None after the last."""
    for place in reversed(range(len(choices))):
        if choices[place].taken + 1 < choices[place].options:
            return [*(choice.taken for choice in choices[:place]), choices[place].taken + 1]
    return None


def _put(text: str, pieces: list[str], offset: int) -> int:
    pieces.append(text)
    return offset + len(text)
