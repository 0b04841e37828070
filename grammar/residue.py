"""What is left of a schema once its grammar has said what it can, as rules. What the grammar enforces by itself is left
out, so most schemas leave nothing at all. Knows how keywords are read, and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jsonschema_rs

from specdec.grammar import formats
from specdec.grammar.lowering import METHODS, ReferenceLoop, scope_within, target
from specdec.grammar.numbers import Divisor
from specdec.grammar.references import Documents, Place
from specdec.grammar.rules import NEVER, Rule, canonical, equal
from specdec.grammar.shapes import Is, found_in

MAX_SCHEMAS = 20_000
VALIDATORS: dict[int, Any] = {
    4: jsonschema_rs.Draft4Validator,
    6: jsonschema_rs.Draft6Validator,
    7: jsonschema_rs.Draft7Validator,
    2019: jsonschema_rs.Draft201909Validator,
    2020: jsonschema_rs.Draft202012Validator,
}


class TooManyRules(Exception):
    """The parts of a schema that must be judged are too many."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A schema inside another: the keyword that leads there, and the name or index below it ("" where it is alone)."""

    keyword: str
    token: str | int
    schema: Is


@dataclass(frozen=True, slots=True)
class _Site:
    """A keyword that is written into a rule: the schema it is in, its draft, and the rules of the schemas below it."""

    rule: Rule
    schema: dict[str, Any]
    keyword: str
    draft: int
    inner: dict[str | int, Rule]
    assert_formats: bool

    @property
    def value(self) -> Any:
        return self.schema[self.keyword]


def residue(
    documents: Documents, root: Is, unsaid: Set[str], *, assert_formats: bool, any_order: bool = False
) -> Rule | None:
    """The rule of what `root` asks beyond its grammar; None where that is nothing. `unsaid` are the pointers of the
    keywords that the grammar leaves out; one that allows keys in any order leaves out all that relates them to each
    other. Raises `TooManyRules`, `ReferenceLoop`."""
    builder = _Builder(documents, unsaid, assert_formats, any_order)
    root = builder.within(root)
    builder.explore(root)
    return builder.whole(root) if root in builder.incomplete else None


class _Builder:
    def __init__(self, documents: Documents, unsaid: Set[str], assert_formats: bool, any_order: bool) -> None:
        self._documents = documents
        self._any_order = any_order
        self._unsaid = unsaid
        self._assert_formats = assert_formats
        self._parts: dict[Is, tuple[_Part, ...]] = {}
        self._rules: dict[tuple[Is, bool], Rule] = {}
        self._unfilled: list[tuple[Rule, Is, bool]] = []
        self.incomplete: set[Is] = set()  # schemas that the grammar does not enforce as a whole

    def within(self, schema: Is) -> Is:
        """The schema with the scope that its own keywords have."""
        return Is(schema.place, scope_within(self._documents, schema.place, schema.scope))

    def explore(self, root: Is) -> None:
        """Find all schemas inside `root`, and which of them are incomplete."""
        outer: dict[Is, list[Is]] = {root: []}
        pending = [root]
        while pending:
            schema = pending.pop()
            self._parts[schema] = tuple(self._inside(schema))
            if any(self._is_unsaid(schema, keyword) for keyword in ("", *self._keywords(schema.place))):
                self.incomplete.add(schema)
            for part in self._parts[schema]:
                if part.schema not in outer:
                    outer[part.schema] = []
                    pending.append(part.schema)
                outer[part.schema].append(schema)
            if len(outer) > MAX_SCHEMAS:
                raise TooManyRules(f"has more than {MAX_SCHEMAS} parts")
        pending = list(self.incomplete)
        while pending:
            for schema in outer[pending.pop()]:
                if schema not in self.incomplete:
                    self.incomplete.add(schema)
                    pending.append(schema)
        self._check_loops()

    def whole(self, root: Is) -> Rule:
        """The rule of `root`, with all that it leads to."""
        rule = self._rule(root, sure=True)
        while self._unfilled:
            self._fill(*self._unfilled.pop())
        return rule

    # Reading

    def _keywords(self, place: Place) -> list[str]:
        """The keywords at a place that assert something, or say where another one does."""
        schema = self._documents.schema(place)
        if isinstance(schema, bool):
            return []
        draft = self._documents.draft(place)
        if draft <= 7 and "$ref" in schema:
            return ["$ref"]
        return [keyword for keyword in schema if keyword in _KEYWORDS and _FIRST[keyword] <= draft <= _LAST[keyword]]

    def _is_unsaid(self, schema: Is, keyword: str) -> bool:
        place = schema.place
        if self._any_order and keyword in RELATING_KEYS and self._relates_keys(place, keyword):
            return True
        asking = {keyword, _READ_BY.get(keyword, keyword), *(k for k, by in _READ_BY.items() if by == keyword)}
        pointers = (str(self._documents.child(place, name)) for name in asking)
        return str(place) in self._unsaid or any(pointer in self._unsaid for pointer in pointers)

    def _relates_keys(self, place: Place, keyword: str) -> bool:
        found = self._documents.schema(place)[keyword]
        if keyword == "const" or keyword == "enum":
            return _holds_objects(found)
        return keyword != "additionalProperties" or found is False

    def _inside(self, schema: Is) -> Iterator[_Part]:
        """The schemas that the keywords of a schema lead to."""
        place, scope = schema.place, schema.scope
        for keyword in self._keywords(place):
            found = self._documents.schema(place)[keyword]
            if keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
                yield _Part(keyword, "", self.within(target(self._documents, place, scope, keyword)))
            elif keyword in _ALONE and isinstance(found, dict | bool):
                yield _Part(keyword, "", self.within(Is(self._documents.child(place, keyword), scope)))
            elif keyword in _IN_LISTS and isinstance(found, list):
                for index in range(len(found)):
                    yield _Part(keyword, index, self.within(Is(self._documents.child(place, keyword, index), scope)))
            elif keyword in _IN_MAPS:
                for name, item in found.items():
                    if isinstance(item, dict | bool):
                        yield _Part(keyword, name, self.within(Is(self._documents.child(place, keyword, name), scope)))

    def _check_loops(self) -> None:
        """Raise `ReferenceLoop` where a schema asks of a value what it asks of it."""
        done: set[Is] = set()
        for start in self._parts:
            path: dict[Is, Iterator[_Part]] = {}
            if start not in done:
                path[start] = iter(self._parts[start])
            while path:
                schema, parts = next(reversed(path.items()))
                part = next((part for part in parts if part.keyword in _SAME_VALUE), None)
                if part is None:
                    del path[schema]
                    done.add(schema)
                elif part.schema in path:
                    raise ReferenceLoop(part.schema.place)
                elif part.schema not in done:
                    path[part.schema] = iter(self._parts[part.schema])

    # Writing

    def _rule(self, schema: Is, *, sure: bool) -> Rule:
        """The rule of a schema, yet to be filled; where it is `sure` that the value is what the grammar says, of what
        that leaves out."""
        # What looks at items and keys is judged as a whole: it matters which of the other keywords have looked.
        sure = sure and not any(keyword.startswith("unevaluated") for keyword in self._keywords(schema.place))
        if (schema, sure) not in self._rules:
            value = self._documents.schema(schema.place)
            if isinstance(value, bool):
                return Rule() if value else NEVER
            self._rules[schema, sure] = rule = Rule()
            self._unfilled.append((rule, schema, sure))
        return self._rules[schema, sure]

    def _fill(self, rule: Rule, schema: Is, sure: bool) -> None:
        value, draft = self._documents.schema(schema.place), self._documents.draft(schema.place)
        for keyword in self._keywords(schema.place):
            parts = [part for part in self._parts[schema] if part.keyword == keyword]
            if keyword in _RANGES:
                _note_range(rule, value, keyword)
            group = _READ_BY.get(keyword, keyword)
            whole = not sure or self._is_unsaid(schema, keyword)
            if (
                keyword not in _LIMITS
                and not whole
                and not any(
                    part.schema in self.incomplete
                    for part in self._parts[schema]
                    if _READ_BY.get(part.keyword, part.keyword) == group
                )
            ):
                continue
            # Where the keyword is enforced but for what is inside, its schemas hold if it asks for all of them.
            hold = not whole and keyword in _ASKS_FOR_ALL
            inner = {
                part.token: self._rule(part.schema, sure=hold)
                for part in parts
                if not hold or part.schema in self.incomplete
            }
            _KEYWORDS[keyword](_Site(rule, value, keyword, draft, inner, self._assert_formats))


def _holds_objects(value: Any) -> bool:
    """Whether there is an object in a value, or it is one."""
    if isinstance(value, list):
        return any(map(_holds_objects, value))
    return isinstance(value, dict)


def _type(site: _Site) -> None:
    site.rule.kinds = frozenset([site.value] if isinstance(site.value, str) else site.value)


def _values(site: _Site) -> None:
    values = site.value if site.keyword == "enum" else [site.value]
    listed = Rule()
    listed.listed = frozenset(canonical(item) for item in values if not isinstance(item, dict | list))
    options = tuple(equal(item) for item in values if isinstance(item, dict | list))
    if options:
        site.rule.any_of += ((listed, *options),)
    else:
        site.rule.all_of += (listed,)


def _bound(site: _Site) -> None:
    if isinstance(site.value, bool):
        return  # draft 4: read beside the bound
    limit = Decimal(site.value)
    exclusive = "exclusive" in site.keyword or site.schema.get("exclusive" + site.keyword.capitalize()) is True
    if "inimum" in site.keyword:
        site.rule.number_tests += (lambda number: number > limit or (number == limit and not exclusive),)
    else:
        site.rule.number_tests += (lambda number: number < limit or (number == limit and not exclusive),)


def _note_range(rule: Rule, schema: dict[str, Any], keyword: str) -> None:
    """Keep where the numbers lie that hold, whoever sees to it that they do."""
    value = schema[keyword]
    if keyword == "type":
        rule.whole = rule.whole or ("integer" in value and "number" not in value)
    elif keyword == "multipleOf":
        rule.steps += (Fraction(Decimal(value)),)
    elif isinstance(value, bool):
        return
    elif "inimum" in keyword:
        rule.least = Fraction(Decimal(value)) if rule.least is None else max(rule.least, Fraction(Decimal(value)))
    else:
        rule.most = Fraction(Decimal(value)) if rule.most is None else min(rule.most, Fraction(Decimal(value)))


def _multiple_of(site: _Site) -> None:
    divisor = Divisor.of(Decimal(site.value))
    site.rule.number_tests += (divisor.divides,)
    site.rule.multiples += (divisor,)


def _string(site: _Site) -> None:
    value = site.value
    match site.keyword:
        case "minLength":
            site.rule.string_tests += (lambda text: len(text) >= value,)
        case "maxLength":
            site.rule.string_tests += (lambda text: len(text) <= value,)
        case "pattern":
            site.rule.string_tests += (lambda text: found_in(value, text),)
        case "format":
            if site.assert_formats and formats.FIRST_DRAFTS.get(value, 9999) <= site.draft:
                site.rule.string_tests += (VALIDATORS[site.draft]({"format": value}, validate_formats=True).is_valid,)


def _items(site: _Site) -> None:
    rule, value = site.rule, site.value
    if site.keyword == "prefixItems" or (site.keyword == "items" and isinstance(value, list)):
        rule.prefix = tuple(site.inner.get(index) for index in range(len(value)))
    elif site.keyword == "items":
        rule.items = site.inner.get("")
        rule.items_from = len(site.schema.get("prefixItems", ())) if site.draft >= 2020 else 0
        rule.sees_items = True
    elif site.keyword == "unevaluatedItems":
        rule.unevaluated_items = site.inner.get("")
    elif isinstance(site.schema.get("items"), list):  # additionalItems
        rule.items = site.inner.get("")
        rule.items_from = len(site.schema["items"])
        rule.sees_items = True


def _array(site: _Site) -> None:
    match site.keyword:
        case "minItems":
            site.rule.least_items = int(site.value)
        case "maxItems":
            site.rule.most_items = int(site.value)
        case "uniqueItems":
            site.rule.unique = bool(site.value)
        case "contains":
            later = site.draft >= 2019
            site.rule.contained = site.inner[""]
            site.rule.least_contained = int(site.schema.get("minContains", 1)) if later else 1
            site.rule.most_contained = (
                int(site.schema["maxContains"]) if later and "maxContains" in site.schema else None
            )
            site.rule.sees_contained = later  # in 2019-09 by what jsonschema-rs says, not by the letter


def _properties(site: _Site) -> None:
    rule = site.rule
    match site.keyword:
        case "properties":
            rule.properties = {name: site.inner.get(name) for name in site.value}
        case "patternProperties":
            rule.patterns = tuple((pattern, site.inner.get(pattern)) for pattern in site.value)
        case "additionalProperties":
            names, patterns = (
                frozenset(site.schema.get("properties", ())),
                tuple(site.schema.get("patternProperties", ())),
            )
            rule.additional = site.inner.get("")
            if site.value is False and not patterns:
                rule.closed = names
            rule.is_additional = lambda name: name not in names and not any(found_in(p, name) for p in patterns)
            rule.sees_keys = True
        case "unevaluatedProperties":
            rule.unevaluated_properties = site.inner.get("")
        case "propertyNames":
            rule.names = site.inner.get("")


def _object(site: _Site) -> None:
    match site.keyword:
        case "required":
            if isinstance(site.value, list):
                site.rule.required = tuple(dict.fromkeys(site.value))
        case "minProperties":
            site.rule.least_keys = int(site.value)
        case "maxProperties":
            site.rule.most_keys = int(site.value)


def _dependent(site: _Site) -> None:
    for name, needed in site.value.items():
        if isinstance(needed, list):
            site.rule.dependent += ((name, tuple(needed)),)
        elif name in site.inner:
            site.rule.dependent_rules += ((name, site.inner[name]),)


def _combined(site: _Site) -> None:
    rules = tuple(site.inner.values())
    match site.keyword:
        case "anyOf":
            site.rule.any_of += (rules,)
        case "oneOf":
            site.rule.one_of = rules
        case "not":
            site.rule.negated = site.inner[""]
        case "if":
            site.rule.condition = site.inner[""]
        case "then":
            site.rule.then = site.inner[""]
        case "else":
            site.rule.otherwise = site.inner[""]
        case _:
            site.rule.all_of += rules


# What asks of an object that it has some keys, or how many, or does not have them all with the values that they may
# have: a grammar of keys in any order says none of it.
RELATING_KEYS = frozenset(
    [
        *("required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("not", "oneOf", "if", "then", "else", "contains", "const", "enum", "additionalProperties"),
    ]
)
_KEYWORDS: dict[str, Callable[[_Site], None]] = {
    "type": _type,
    **dict.fromkeys(("enum", "const"), _values),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _bound),
    "multipleOf": _multiple_of,
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), _string),
    **dict.fromkeys(("prefixItems", "items", "additionalItems", "unevaluatedItems"), _items),
    **dict.fromkeys(("minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"), _array),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties"), _properties),
    **dict.fromkeys(("unevaluatedProperties", "propertyNames"), _properties),
    **dict.fromkeys(("required", "minProperties", "maxProperties"), _object),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), _dependent),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "not", "if", "then", "else"), _combined),
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), _combined),
}
_FIRST = {keyword: METHODS[keyword][0] if keyword in METHODS else 2019 for keyword in _KEYWORDS}
_LAST = {keyword: METHODS[keyword][1] if keyword in METHODS else 9999 for keyword in _KEYWORDS}
_READ_BY = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
_ALONE = frozenset(
    [
        *("additionalProperties", "unevaluatedProperties", "propertyNames", "items", "additionalItems"),
        *("unevaluatedItems", "contains", "not", "if", "then", "else"),
    ]
)
_IN_LISTS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems", "items"])
_IN_MAPS = frozenset(["properties", "patternProperties", "dependentSchemas", "dependencies"])
# What is kept though the grammar enforces it: there is no more to come where a limit is reached.
_LIMITS = frozenset(["minItems", "maxItems", "minProperties", "maxProperties"])
_RANGES = frozenset(["type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_SAME_VALUE = frozenset(
    [
        *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("dependentSchemas", "dependencies"),
    ]
)
_ASKS_FOR_ALL = frozenset(
    [
        *("properties", "patternProperties", "additionalProperties", "propertyNames"),
        *("prefixItems", "items", "additionalItems", "allOf", "$ref", "$dynamicRef", "$recursiveRef"),
    ]
)
