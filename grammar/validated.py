"""The last word on a JSON text: whatever its grammar let through, the finished value is judged by the schema as the
caller wrote it. Knows no backend.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.errors import ConstraintError
from specdec.mask import TokenMask
from specdec.protocols import Constraint, Grammar
from specdec.tree import DraftTree

MAX_SHOWN = 200


class Validator(Protocol):
    """What jsonschema-rs makes of a schema."""

    def iter_errors(self, instance: Any) -> Any:
        """What is wrong with a value."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ValidatedGrammar:
    """A grammar of JSON texts whose finished values are judged by `validator`. `spell` gives the bytes of a token."""

    grammar: Grammar
    validator: Validator
    spell: Callable[[int], bytes]

    def start(self) -> Validated:
        """See `Grammar.start`."""
        return Validated(self.grammar.start(), self.judge)

    def judge(self, tokens: Seq[int]) -> Complaint | None:
        """What the schema says of a whole text."""
        data = b"".join(map(self.spell, tokens))
        wrong = problem(data, self.validator)
        return None if wrong is None else Complaint(wrong, data)


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong with a JSON text."""

    wrong: str
    data: bytes


class Validated:
    """A `Constraint` that is another one until the text ends; then `judge` looks at its tokens."""

    __slots__ = ("_inner", "_judge", "_tokens")

    def __init__(self, inner: Constraint, judge: Callable[[Seq[int]], Complaint | None]) -> None:
        self._inner = inner
        self._judge = judge
        self._tokens: list[int] = []

    def prune(self, tree: DraftTree) -> DraftTree:
        """See `Constraint.prune`."""
        return self._inner.prune(tree)

    def mask(self, tree: DraftTree, first_row: int, mask: TokenMask) -> None:
        """See `Constraint.mask`."""
        self._inner.mask(tree, first_row, mask)

    def row(self, path: tuple[int, ...]) -> NDArray[np.int32] | None:
        """See `Constraint.row`."""
        return self._inner.row(path)

    def forced(self, path: tuple[int, ...] = ()) -> tuple[int, ...]:
        """See `Constraint.forced`."""
        return self._inner.forced(path)

    def advance(self, tokens: Seq[int]) -> None:
        """See `Constraint.advance`."""
        self._inner.advance(tokens)
        self._tokens.extend(tokens)

    def finish(self) -> None:
        """See `Constraint.finish`: a value that its schema refuses means that the grammar is wrong."""
        self._inner.finish()
        complaint = self._judge(self._tokens)
        if complaint is not None:
            shown = repr(complaint.data[-MAX_SHOWN:].decode(errors="replace"))
            raise ConstraintError(
                f"the text passed the grammar but not its schema: {complaint.wrong}. This is a bug in specdec; please "
                f"report it with the schema and the text, which ends with {shown}"
            )


def problem(data: bytes, validator: Validator) -> str | None:
    """What is wrong with a JSON text, or None where its value is valid."""
    try:
        value = read_json(data.decode())
        wrong = next(iter(validator.iter_errors(value)), None)
    except (ValueError, RecursionError) as error:  # ValueError also for half of a surrogate pair
        return f"it is not JSON that can be judged: {error}"
    if wrong is None:
        return None
    place = "".join(f"/{step}" for step in wrong.instance_path)
    return f"at {place or 'the root'}: {wrong.message[:MAX_SHOWN]}"


def read_json(text: str) -> Any:
    """The value of a JSON text, every number exact. Raises ValueError, also for an integer above 4,300 digits and for
    a key that an object has twice."""
    return json.loads(text, parse_float=_decimal, parse_constant=_constant, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"the exponent of {text[:MAX_SHOWN]} is too large") from error


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
