"""What JSON values a schema allows, as a union of shapes of one type each, and how two of them meet. Children are
named, not expanded, so a shape is finite where the schema is recursive. Knows no keywords and no grammar.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import jsonschema_rs

from specdec.grammar.references import Place


@dataclass(frozen=True, slots=True)
class Is:
    """A value that the schema at a place allows; `scope` are the resources that dynamic references look through."""

    place: Place
    scope: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Equals:
    """One value, as its canonical JSON text; `pointer` leads to the keyword that it comes from."""

    text: str
    pointer: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Either:
    """A value that one of several children allows."""

    children: tuple[Child, ...]


@dataclass(frozen=True, slots=True)
class Never:
    """No value."""


Atom = Is | Equals | Either | Never
# A conjunction of atoms, each of which holds (True) or does not.
Child = frozenset[tuple[Atom, bool]]
ANY: Child = frozenset()
NONE: Child = frozenset({(Never(), True)})


@dataclass(frozen=True, slots=True)
class Refusal:
    """A keyword that a shape leaves out, and why: the shape then allows too much. `final` where hardly any of that can
    be completed to what the keyword allows, so a later check is no way out."""

    pointer: str
    keyword: str
    reason: str
    final: bool = False


Residue = frozenset[Refusal]


@dataclass(frozen=True, slots=True)
class Among:
    """One of some strings or numbers."""

    values: frozenset[Any]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A string that an ECMA-262 pattern is found in."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Length:
    """A string of `least` characters or more."""

    least: int


@dataclass(frozen=True, slots=True)
class Fits:
    """A string that a child allows."""

    child: Child


@dataclass(frozen=True, slots=True)
class Everything:
    """Any string."""


StringTest = Among | Pattern | Length | Fits | Everything
Tests = frozenset[tuple[Any, bool]]
HoldsFunction = Callable[[Any, str], bool]  # whether a string passes a test


@dataclass(frozen=True, slots=True)
class Integral:
    """A whole number."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A number from `bound` on, or above it."""

    bound: Decimal
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """A multiple of `divisor`."""

    divisor: Decimal


@dataclass(frozen=True, slots=True)
class Null:
    """null."""

    residue: Residue = frozenset()


@dataclass(frozen=True, slots=True)
class Boolean:
    """true, false or both."""

    values: frozenset[bool] = frozenset({True, False})
    residue: Residue = frozenset()


@dataclass(frozen=True, slots=True)
class Number:
    """Numbers that pass tests. `doubts` are the refusals for what may prove impossible to write."""

    tests: Tests = frozenset()
    doubts: Residue = frozenset()
    residue: Residue = frozenset()


@dataclass(frozen=True, slots=True)
class String:
    """Strings that pass tests."""

    tests: Tests = frozenset()
    residue: Residue = frozenset()


@dataclass(frozen=True, slots=True)
class Count:
    """`least` to `most` of the items from index `offset` on are what `child` allows."""

    offset: int
    child: Child
    least: int
    most: int | None


ALL_ITEMS = 1 << 60


@dataclass(frozen=True, slots=True)
class Array:
    """Arrays: what stands at the first places, what at all others, and how many there are.

    `evaluated` items have been looked at by a keyword, and so have those that a child of `evaluated_by` allows.
    `doubts` as in `Number`.
    """

    prefix: tuple[Child, ...] = ()
    items: Child = ANY
    least: int = 0
    most: int | None = None
    counts: frozenset[Count] = frozenset()
    unique: Residue = frozenset()
    evaluated: int = 0
    evaluated_by: frozenset[Child] = frozenset()
    doubts: Residue = frozenset()
    residue: Residue = frozenset()


@dataclass(frozen=True, slots=True)
class Object:
    """Objects: what the named keys hold, and, by `rules`, all other keys that pass a rule's tests.

    `some` are rules of which each must be used by one key at least. Keys that pass a test of `evaluated` have been
    looked at by a keyword. `doubts` as in `Number`.
    """

    named: tuple[tuple[str, Child], ...] = ()
    rules: frozenset[tuple[Tests, Child]] = frozenset()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    some: frozenset[tuple[Tests, Child, Refusal]] = frozenset()
    doubts: Residue = frozenset()
    evaluated: frozenset[StringTest] = frozenset()
    residue: Residue = frozenset()


Shape = Null | Boolean | Number | String | Array | Object
Union = tuple[Shape, ...]

FULL: Union = (Null(), Boolean(), Number(), String(), Array(), Object())


def others(kind: type) -> Union:
    """All values but those of one type."""
    return tuple(shape for shape in FULL if type(shape) is not kind)


def is_full(union: Union) -> bool:
    """Whether a union plainly allows every value."""
    return all(shape in union for shape in FULL)


def unite(*unions: Iterable[Shape]) -> Union:
    """All shapes of several unions, without those that another one plainly holds."""
    shapes = list(dict.fromkeys(shape for union in unions for shape in union))
    full = {type(shape) for shape in shapes if shape in FULL}
    kept: list[Shape] = []
    strings: dict[Residue, set[str]] = {}
    numbers: dict[Residue, set[Decimal]] = {}
    booleans: dict[Residue, set[bool]] = {}
    for shape in shapes:
        if type(shape) in full and not _has_evaluated(shape):
            if shape in FULL:
                kept.append(shape)
        elif isinstance(shape, Boolean):
            booleans.setdefault(shape.residue, set()).update(shape.values)
        elif isinstance(shape, String) and (values := _only(shape.tests)) is not None:
            strings.setdefault(shape.residue, set()).update(values)
        elif isinstance(shape, Number) and (values := _only(shape.tests)) is not None:
            numbers.setdefault(shape.residue, set()).update(values)
        else:
            kept.append(shape)
    kept.extend(Boolean(frozenset(found), residue) for residue, found in booleans.items())
    kept.extend(
        Number(frozenset({(Among(frozenset(found)), True)}), residue=residue) for residue, found in numbers.items()
    )
    kept.extend(String(frozenset({(Among(frozenset(found)), True)}), residue) for residue, found in strings.items())
    return tuple(dict.fromkeys(kept))


def _has_evaluated(shape: Shape) -> bool:
    match shape:
        case Array():
            return bool(shape.evaluated or shape.evaluated_by)
        case Object():
            return bool(shape.evaluated)
    return False


def _only(tests: Tests) -> frozenset[Any] | None:
    """The values of tests that are nothing but a list of values."""
    if len(tests) == 1:
        ((test, holds),) = tests
        if holds and isinstance(test, Among):
            return test.values
    return None


def child_of(object_: Object, name: str, holds: HoldsFunction) -> Child:
    """What the value of a key must be."""
    for key, child in object_.named:
        if key == name:
            return child
    found: Child = ANY
    for tests, child in object_.rules:
        if passes(tests, name, holds):
            found |= child
    return found


def passes(tests: Tests, name: str, holds: HoldsFunction) -> bool:
    """Whether a string passes all tests."""
    return all(holds(test, name) is expected for test, expected in tests)


def meet(first: Shape, second: Shape, holds: HoldsFunction) -> Shape | None:
    """What both shapes allow; None where that is plainly nothing."""
    match first, second:
        case Null(), Null():
            return Null(first.residue | second.residue)
        case Boolean(), Boolean():
            values = first.values & second.values
            return Boolean(values, first.residue | second.residue) if values else None
        case Number(), Number():
            tests = first.tests | second.tests
            return (
                None
                if _contradict(tests)
                else Number(tests, first.doubts | second.doubts, first.residue | second.residue)
            )
        case String(), String():
            tests = first.tests | second.tests
            return None if _contradict(tests) else String(tests, first.residue | second.residue)
        case Array(), Array():
            return _meet_arrays(first, second)
        case Object(), Object():
            return _meet_objects(first, second, holds)
    return None


def _contradict(tests: Tests) -> bool:
    return any((test, not expected) in tests for test, expected in tests)


def _meet_arrays(first: Array, second: Array) -> Array | None:
    size = max(len(first.prefix), len(second.prefix))
    padded = ((*a.prefix, *[a.items] * (size - len(a.prefix))) for a in (first, second))
    return Array(
        prefix=tuple(one | other for one, other in zip(*padded, strict=True)),
        items=first.items | second.items,
        least=max(first.least, second.least),
        most=_least(first.most, second.most),
        counts=first.counts | second.counts,
        unique=first.unique | second.unique,
        evaluated=max(first.evaluated, second.evaluated),
        evaluated_by=first.evaluated_by | second.evaluated_by,
        doubts=first.doubts | second.doubts,
        residue=first.residue | second.residue,
    )


def _meet_objects(first: Object, second: Object, holds: HoldsFunction) -> Object | None:
    mine, theirs = dict(first.named), dict(second.named)
    named = {
        name: child | (theirs[name] if name in theirs else child_of(second, name, holds))
        for name, child in mine.items()
    }
    for name, child in theirs.items():
        if name not in mine:
            named[name] = child | child_of(first, name, holds)
    return Object(
        named=tuple(named.items()),
        rules=first.rules | second.rules,
        required=tuple(dict.fromkeys((*first.required, *second.required))),
        least=max(first.least, second.least),
        most=_least(first.most, second.most),
        some=first.some | second.some,
        doubts=first.doubts | second.doubts,
        evaluated=first.evaluated | second.evaluated,
        residue=first.residue | second.residue,
    )


def _least(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


@functools.lru_cache(maxsize=512)
def _validator(pattern: str) -> Any:
    return jsonschema_rs.Draft202012Validator({"pattern": pattern})


def found_in(pattern: str, text: str) -> bool:
    """Whether an ECMA-262 pattern is found in a text."""
    return bool(_validator(pattern).is_valid(text))
