"""Knobs: what files of one layout do not say, and publishers disagree about. A wrong one lowers acceptance silently.

Each family has a frozen dataclass of them; this page reads them from a config and lets a user override them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from specdec.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value")
Convention = TypeVar("Convention", bound="DataclassInstance")


def overridden(
    convention: Convention, overrides: Mapping[str, object], family: str, besides: tuple[str, ...] = ()
) -> Convention:
    """`convention` with the knobs in `overrides` (lists may stand for tuples); `besides` are names that the family has
    elsewhere.

    Raises `ConfigError` for a name that the family does not have, listing those it has, and for a value of the wrong
    type.
    """
    known = [*besides, *(field.name for field in fields(convention))]
    hints = get_type_hints(type(convention))
    values: dict[str, Any] = {}
    for name, value in overrides.items():
        if name not in known:
            raise ConfigError(f"{family} has no override {name!r}; it has: {', '.join(known)}")
        if name in besides:
            continue
        values[name] = _checked(hints[name], value, f"the override {name} of {family}", ConfigError)
    return replace(convention, **values)


class Raw:
    """Typed look-ups in a drafter's config, at top level or in the objects under the `nested` keys; the first that has
    a key wins. Complaints name the file and the key."""

    def __init__(self, raw: Mapping[str, Any], where: object, nested: tuple[str, ...] = ()) -> None:
        self.where = where
        self.levels = [raw]
        for level in self.levels:  # grows as it goes
            self.levels += [level[key] for key in nested if isinstance(level.get(key), Mapping)]

    def get(self, key: str, kind: type[Value], default: Value) -> Value:
        """The value of `key`, or `default` where it is absent or null. Raises `ModelError` for the wrong type."""
        value = next((level[key] for level in self.levels if level.get(key) is not None), None)
        return default if value is None else cast(Value, _checked(kind, value, f"{self.where}: {key}", ModelError))

    def number(self, key: str, default: float) -> float:
        """As `get`; an integer is a number too."""
        return self.get(key, cast(type[float], int | float), default)

    def ids(self, key: str) -> tuple[int, ...] | None:
        """A list of integers, or None."""
        value = next((level[key] for level in self.levels if level.get(key) is not None), None)
        if value is None:
            return None
        return cast(tuple[int, ...], _checked(tuple[int, ...], value, f"{self.where}: {key}", ModelError))


def _checked(kind: Any, value: object, what: str, error: type[ConfigError | ModelError]) -> Any:
    try:
        return TypeAdapter(kind).validate_python(tuple(value) if isinstance(value, list) else value, strict=True)
    except ValidationError as failure:
        shown = " ".join(repr(value).split())[:80]
        raise error(f"{what}: {failure.errors()[0]['msg'].lower()}, got {shown}") from None
