"""A second judge of finished texts: the Python package jsonschema, where it is installed. Its regular expressions are
Python's, not ECMA-262's, its numbers floats, its formats fewer; what may come of these is excused, and named.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

# What Python and ECMA-262 (with /u) read differently, or only one of them reads.
_DIFFERS = re.compile(r"\\[pPdDwWsSbBZAzcuk]|\(\?|\$|\[[^\]]*\[|\.")


@dataclass(frozen=True, slots=True)
class SecondOpinion:
    """The judge. `name` says which version."""

    name: str
    remotes: Mapping[str, Any]
    assert_formats: bool

    @classmethod
    def find(cls, remotes: Mapping[str, Any], *, assert_formats: bool) -> SecondOpinion | None:
        """The judge, or None where jsonschema is not installed."""
        if find_spec("jsonschema") is None or find_spec("referencing") is None:
            return None
        return cls(f"jsonschema {metadata.version('jsonschema')}", remotes, assert_formats)

    def problem(self, schema: str, text: str) -> tuple[str | None, str | None]:
        """What is wrong with the value of `text`, if anything is; and why a disagreement is excused, if it is."""
        rounded: list[str] = []

        def number(literal: str) -> float:
            value = float(literal)
            if math.isinf(value) or (value.is_integer() and value != Decimal(literal)):
                rounded.append(literal)
            return value

        value = json.loads(text, parse_float=number)
        validators, referencing = import_module("jsonschema.validators"), import_module("referencing")
        parsed = json.loads(schema)
        kind = validators.validator_for(parsed, default=validators.Draft202012Validator)
        default = import_module("referencing.jsonschema").DRAFT202012
        resources = [
            (address, referencing.Resource.from_contents(document, default_specification=default))
            for address, document in self.remotes.items()
        ]
        registry = referencing.Registry().with_resources(resources)
        judge = kind(parsed, registry=registry, format_checker=kind.FORMAT_CHECKER if self.assert_formats else None)
        try:
            error = next(judge.iter_errors(value), None)
        except (re.error, referencing.exceptions.Unresolvable) as failure:
            return None, f"{self.name} cannot judge: {type(failure).__name__}: {failure}"
        if error is None:
            return None, None
        if rounded:
            return None, f"{rounded[0]} is rounded to {float(rounded[0])}"
        for keyword, value in _keywords(error):
            if keyword == "format":
                return None, f"format {value!r} is checked otherwise"
            if keyword == "multipleOf" and isinstance(value, float):
                return None, f"multipleOf {value!r} is divided by in floats"
            patterns = [value] if keyword == "pattern" else list(value) if keyword == "patternProperties" else []
            if any(map(_DIFFERS.search, patterns)):
                return None, f"pattern {value!r} is read as Python's"
        return str(error.message)[:200], None


def _keywords(error: Any) -> Iterator[tuple[str, Any]]:
    """The keywords that an error hangs on, with their values."""
    yield error.validator, error.validator_value
    for inner in error.context or ():
        yield from _keywords(inner)
