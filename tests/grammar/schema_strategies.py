"""Schemas of draft 7, for hypothesis: what hypothesis-jsonschema can make instances of."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
Schemas = st.SearchStrategy[Any]

_KEYS = st.sampled_from(("a", "b", "ab", "name", "é", ""))
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-20, 20),
    st.sampled_from((0.5, -1.25, 100.125)),
    st.text('abé\n"\\😀', max_size=3),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda below: st.one_of(st.lists(below, max_size=2), st.dictionaries(_KEYS, below, max_size=2)),
    max_leaves=4,
)
_TYPES = st.sampled_from(("null", "boolean", "integer", "number", "string", "array", "object"))
_PATTERNS = st.sampled_from(("^a", "b$", "^[a-c]{1,3}$", "[0-9]+", "^(ab|é)*$", r"^\d{2}-x", "^[^a]"))
_FORMATS = st.sampled_from(("date", "ipv4", "ipv6", "json-pointer", "relative-json-pointer", "no-such-format"))


def _keywords(always: dict[str, Schemas], /, **optional: Schemas) -> Schemas:
    return st.fixed_dictionaries(always, optional=optional)


def _leaves() -> Schemas:
    small = st.integers(0, 4)
    bound = st.one_of(st.integers(-10, 10), st.sampled_from((0.5, -2.25)))
    return st.one_of(
        st.booleans(),
        _keywords({"type": _TYPES}),
        _keywords({"type": st.lists(_TYPES, min_size=1, max_size=3, unique=True)}),
        _keywords({"const": _VALUES}),
        _keywords({"enum": st.lists(_VALUES, min_size=1, max_size=4, unique_by=repr)}),
        _keywords({"type": st.just("integer")}, minimum=bound, exclusiveMaximum=bound, multipleOf=st.integers(1, 7)),
        _keywords({"type": st.just("number")}, exclusiveMinimum=bound, maximum=bound),
        _keywords({"type": st.just("string")}, minLength=small, maxLength=small),
        _keywords({"type": st.just("string"), "pattern": _PATTERNS}, maxLength=small),
        _keywords({"type": st.just("string"), "format": _FORMATS}),
    )


def _branches(below: Schemas) -> Schemas:
    small, few = st.integers(0, 3), st.lists(below, min_size=1, max_size=2)
    named = st.dictionaries(_KEYS, below, max_size=3)
    keys = st.lists(_KEYS, max_size=2, unique=True)
    return st.one_of(
        _keywords({"type": st.just("array")}, items=below, minItems=small, maxItems=small),
        _keywords({"items": few}, additionalItems=below, contains=below),
        _keywords({"type": st.just("array"), "contains": below}, items=below),
        _keywords({"type": st.just("object"), "properties": named}, required=keys, additionalProperties=below),
        _keywords(
            {"type": st.just("object")},
            properties=named,
            patternProperties=st.dictionaries(_PATTERNS, below, max_size=2),
            additionalProperties=below,
            required=keys,
        ),
        _keywords({"type": st.just("object"), "propertyNames": below}, minProperties=small, maxProperties=small),
        _keywords({"properties": named, "dependencies": st.dictionaries(_KEYS, st.one_of(keys, below), max_size=2)}),
        _keywords({"allOf": few}),
        _keywords({"anyOf": few}, properties=named, required=keys),
        _keywords({"oneOf": st.lists(below, min_size=1, max_size=3)}),
        _keywords({"not": below}, type=_TYPES),
        _keywords({"if": below}, **{"then": below, "else": below}),
    )


SCHEMAS_OF_DRAFT_7: Schemas = st.recursive(_leaves(), _branches, max_leaves=6)
