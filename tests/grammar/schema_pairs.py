"""Schemas of draft 2020-12 made around an instance, with instances beside it that most keywords tell apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

KEYS = ("a", "b", "ab", "c d", "é")
LETTERS = ("a", "b", "é", "😀", '"', "\\", "\n", "0")
PATTERNS = ("a", "^a", "b$", "^[ab]*$", r"^\w+$", r"\s", "^.{2}$", r"[^a]", r"(ab|é)+", r"^(?!a)", r"\d", "^$")
NUMBERS = (0, 1, 2, 3, -1, 7, 10, 100, 2**53, 0.5, -2.25, 1.5, 0.1)
KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")


def value(random: Random, depth: int = 2) -> Any:
    """Any small value, out of few, so that schemas and instances meet."""
    kind = random.choice(("word", "number", "plain", *(("array", "object") * 2 if depth else ())))
    match kind:
        case "word":
            return "".join(random.choices(LETTERS, (5, 5, 2, 1, 1, 1, 1, 2), k=random.choice((0, 1, 1, 2, 2, 3))))
        case "number":
            return random.choice(NUMBERS)
        case "plain":
            return random.choice((None, True, False))
        case "array":
            items = [value(random, depth - 1) for _ in range(random.randint(0, 3))]
            return items + items[:1] if random.random() < 0.2 else items
        case _:
            return {key: value(random, depth - 1) for key in random.sample(KEYS, random.randint(0, 3))}


def variant(random: Random, instance: Any) -> Any:
    """A value that differs in one place, or nearly."""
    if isinstance(instance, list) and random.random() < 0.8:
        items = list(instance)
        where = random.randint(0, len(items))
        if where < len(items) and random.random() < 0.5:
            items[where] = variant(random, items[where])
        elif where < len(items) and random.random() < 0.6:
            del items[where]
        else:
            items.insert(where, random.choice([*items, value(random, 1)]))
        return items
    if isinstance(instance, dict) and random.random() < 0.8:
        members = dict(instance)
        key = random.choice([*members, *KEYS])
        if key in members and random.random() < 0.6:
            members[key] = variant(random, members[key])
        elif key in members:
            del members[key]
        else:
            members[key] = value(random, 1)
        return members
    if isinstance(instance, str) and random.random() < 0.7:
        where = random.randint(0, len(instance))
        return instance[:where] + random.choice(LETTERS) + instance[where + random.randint(0, 1) :]
    if isinstance(instance, int | float) and not isinstance(instance, bool) and random.random() < 0.8:
        return instance + random.choice((1, -1, 0.5, -0.25))
    return value(random, 1)


@dataclass(slots=True)
class Maker:
    """Makes one schema. What it defines may refer to itself while it is being made."""

    random: Random
    definitions: dict[str, Any] = field(default_factory=dict)

    def whole(self, instance: Any, depth: int) -> Any:
        """A schema that is likely to allow an instance, with keywords of keywords to a depth."""
        schema = self.schema(instance, depth)
        used = list(_references(schema))
        for name in used:  # it grows
            used.extend(found for found in _references(self.definitions[name]) if found not in used)
        return {**schema, "$defs": {name: self.definitions[name] for name in used}} if used else schema

    def schema(self, instance: Any, depth: int) -> Any:
        """The same, without definitions."""
        random = self.random
        if random.random() < 0.04:
            return random.random() < 0.8
        if random.random() < 0.06:
            return self._defined(instance, depth)
        if random.random() < 0.04 and self.definitions:
            return {"$ref": "#/$defs/" + random.choice(list(self.definitions))}
        schema: dict[str, Any] = {}
        for _ in range(random.choice((1, 1, 2, 2, 3))):
            part = self._keywords(instance, depth)
            if part.keys().isdisjoint(schema):
                schema |= part
        if depth and random.random() < 0.06:
            schema["unevaluatedItems" if isinstance(instance, list) else "unevaluatedProperties"] = random.choice(
                (False, False, self.schema(value(random, 1), depth - 1))
            )
        return schema

    def _defined(self, instance: Any, depth: int) -> Any:
        name = f"d{len(self.definitions)}"
        self.definitions[name] = True
        made = self.schema(instance, depth)
        self.definitions[name] = made
        return {"$ref": f"#/$defs/{name}"}

    def _other(self, instance: Any, depth: int) -> Any:
        """A schema that is as likely not to allow an instance."""
        random = self.random
        return self.schema(variant(random, instance) if random.random() < 0.6 else value(random, 1), depth)

    def _keywords(self, instance: Any, depth: int) -> dict[str, Any]:
        random = self.random
        if depth and random.random() < 0.35:
            return self._combination(instance, depth - 1)
        if random.random() < 0.25:
            return self._plain(instance)
        match instance:
            case None | bool():
                return self._plain(instance)
            case str():
                return self._string(instance)
            case int() | float():
                return self._number(instance)
            case list():
                return self._array(instance, depth)
            case _:
                return self._object(instance, depth)

    def _combination(self, instance: Any, depth: int) -> dict[str, Any]:
        random = self.random
        yes, no = self.schema(instance, depth), self._other(instance, depth)
        branches = random.sample([yes, no, self._other(instance, depth)], random.randint(2, 3))
        key = random.choice([*instance, *KEYS]) if isinstance(instance, dict) else random.choice(KEYS)
        return random.choice(
            (
                {"allOf": [yes, self.schema(instance, depth)]},
                {"anyOf": branches},
                {"oneOf": branches},
                {"not": no},
                {"if": yes, "then": self.schema(instance, depth), "else": no},
                {"if": no, "then": self._other(instance, depth), "else": yes},
                {"dependentSchemas": {key: yes}},
                {"dependentRequired": {key: random.sample(KEYS, random.randint(0, 2))}},
            )
        )

    def _plain(self, instance: Any) -> dict[str, Any]:
        random = self.random
        kinds = [kind_of(instance), *random.sample(KINDS, random.randint(0, 2))]
        values = [instance, value(random, 1), variant(random, instance)][: random.randint(1, 3)]
        return random.choice(
            (
                {"type": kinds[0] if len(kinds) == 1 else list(dict.fromkeys(kinds))},
                {"const": instance},
                {"enum": values},
                {"not": {"enum": values[1:] or [0]}},
                {"not": {"type": random.choice(KINDS)}},
            )
        )

    def _number(self, instance: float) -> dict[str, Any]:
        random = self.random
        step = random.choice((0, 0, 0.5, 1, 99))
        return random.choice(
            (
                {"minimum": instance - step},
                {"maximum": instance + step},
                {"exclusiveMinimum": instance - step - random.choice((0, 0.25))},
                {"exclusiveMaximum": instance + step + random.choice((0, 0.25))},
                {"multipleOf": random.choice((1, 2, 0.5, 0.1, 0.01, 3))},
                {"minimum": instance - step, "maximum": instance + 1, "type": kind_of(instance)},
                {"exclusiveMinimum": instance - 1, "exclusiveMaximum": instance + step, "type": kind_of(instance)},
            )
        )

    def _string(self, instance: str) -> dict[str, Any]:
        random = self.random
        found = instance[random.randint(0, len(instance)) :][:2]
        return random.choice(
            (
                {"minLength": max(0, len(instance) - random.randint(0, 1))},
                {"maxLength": len(instance) + random.randint(0, 1)},
                {"pattern": random.choice(PATTERNS)},
                {"pattern": re.escape(found).replace("\\\n", r"\n").replace("é", r"\u00e9")},
                {"pattern": random.choice(PATTERNS), "minLength": 1, "maxLength": 3},
            )
        )

    def _array(self, instance: list[Any], depth: int) -> dict[str, Any]:
        random, size = self.random, len(instance)
        below = max(0, depth - 1)
        chosen = random.choice(instance) if instance else value(random, 1)
        item = self.schema(chosen, below)
        prefix = [self.schema(entry, below) for entry in instance[: random.randint(1, 2)]] or [item]
        made: dict[str, Any] = random.choice(
            (
                {"items": {"anyOf": [item, self._other(chosen, 0)]}},
                {"items": item},
                {"prefixItems": prefix},
                {"prefixItems": prefix, "items": random.choice((False, True, item))},
                {"contains": item},
                {"contains": item, "minContains": random.randint(0, 2)},
                {"contains": item, "minContains": random.randint(0, 1), "maxContains": random.randint(1, 2)},
                {"minItems": max(0, size - random.randint(0, 1))},
                {"maxItems": size + random.randint(0, 1)},
                {"uniqueItems": True, "maxItems": 3, "items": {"enum": ["a", 1, True, None, chosen]}},
            )
        )
        if random.random() < 0.15:
            made["unevaluatedItems"] = random.choice((False, item))
        return made

    def _object(self, instance: dict[str, Any], depth: int) -> dict[str, Any]:
        random, size = self.random, len(instance)
        below = max(0, depth - 1)
        some = random.sample(list(instance), random.randint(0, size))
        named = {key: self.schema(instance[key], below) for key in some}
        for key in random.sample(KEYS, random.randint(0, 1)):
            named.setdefault(key, self._other(instance, below))
        ruled = {random.choice(("^a", "b", "é$", "^.$")): self.schema(next(iter(instance.values()), 0), below)}
        rest = random.choice((False, True, self.schema(next(iter(instance.values()), 0), below)))
        made: dict[str, Any] = random.choice(
            (
                {"properties": named},
                {"properties": named, "additionalProperties": rest},
                {"properties": named, "required": some},
                {"required": random.sample(KEYS, random.randint(0, 1)) + some[:1]},
                {"patternProperties": ruled},
                {"properties": named, "patternProperties": ruled, "additionalProperties": rest},
                {"additionalProperties": rest},
                {"propertyNames": self.schema(random.choice([*instance, "a"]), 0)},
                {"minProperties": max(0, size - random.randint(0, 1))},
                {"maxProperties": size + random.randint(0, 1)},
                {"properties": dict.fromkeys(KEYS, True), "additionalProperties": False, "minProperties": size},
            )
        )
        if "required" in made:
            made["required"] = list(dict.fromkeys(made["required"]))
        if random.random() < 0.15:
            made["unevaluatedProperties"] = random.choice((False, rest))
        return made


def _references(schema: Any) -> Iterator[str]:
    """The names of the definitions that a schema refers to."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        yield schema["$ref"].rpartition("/")[2]
    for below in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _references(below)


def kind_of(instance: Any) -> str:
    """The narrowest type of a value."""
    match instance:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
