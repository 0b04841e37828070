"""Speculative and constrained decoding for language models.

Public names are found on first use: importing this package imports neither torch nor any of its own parts.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

# GNU OpenMP reads this once, when torch loads it. Its default spins far longer: a step next to a busy neighbour on the
# same cores then takes up to a hundred times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from specdec.errors import (
        ConfigError,
        ConstraintError,
        ContextTooLong,
        DeadEnd,
        InvalidRequest,
        ModelError,
        NumericalError,
        QueueFull,
        SpecdecError,
    )
    from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Lark, Regex, StructuralTag
    from specdec.llm import LLM
    from specdec.request import Request, Sampling, Speculative, Stopping

__version__ = "0.1.0.dev0"

__all__ = [
    "LLM",
    "Choice",
    "ConfigError",
    "ConstraintError",
    "ContextTooLong",
    "DeadEnd",
    "Ebnf",
    "InvalidRequest",
    "JsonObject",
    "JsonSchema",
    "Lark",
    "ModelError",
    "NumericalError",
    "QueueFull",
    "Regex",
    "Request",
    "Sampling",
    "SpecdecError",
    "Speculative",
    "Stopping",
    "StructuralTag",
    "__version__",
]

_HOMES = {
    "specdec.errors": (
        "ConfigError",
        "ConstraintError",
        "ContextTooLong",
        "DeadEnd",
        "InvalidRequest",
        "ModelError",
        "NumericalError",
        "QueueFull",
        "SpecdecError",
    ),
    "specdec.grammar.spec": ("Choice", "Ebnf", "JsonObject", "JsonSchema", "Lark", "Regex", "StructuralTag"),
    "specdec.llm": ("LLM",),
    "specdec.request": ("Request", "Sampling", "Speculative", "Stopping"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # or a type checker would take any name

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'specdec' has no attribute {name!r}")
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | _HOME_OF.keys())
