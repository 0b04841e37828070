"""What a schema asks of a value, by the type of the value: rules, whose keywords are resolved and whose references lead
to other rules, so they may form circles. Knows no grammar and no text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

from specdec.grammar.numbers import Divisor, Span, common_multiple

# A value as something that equals exactly what equals it in JSON: 1 is 1.0, and true is neither.
Canonical = None | str | Decimal | tuple[Any, ...]


class Rule:
    """What one schema asks of one value, by type; what it does not ask for is neutral. Written once, then shared.

    `kinds` are the names of types, None for all, and `listed` the scalars of an enum. Numbers that hold are multiples
    of all `steps`, `whole`, not below `least` and not above `most`; tests ask for it, or a grammar does, and for
    `multiples` tests do. `prefix` and `items` (from index `items_from` on) hold a rule an item, None where nothing is
    asked; `properties` and `patterns` a rule a key, and `additional` is for the keys that pass `is_additional`, and
    `closed` names the others where it allows none. Of each
    list in `any_of` one must hold. Where it `looks` at items and keys, those that it asks for and those of `sees_...`
    are evaluated for the rules around it.
    """

    __slots__ = (
        "_span",
        "_tests_all_numbers",
        "additional",
        "all_of",
        "any_of",
        "closed",
        "condition",
        "contained",
        "dependent",
        "dependent_rules",
        "is_additional",
        "items",
        "items_from",
        "kinds",
        "least",
        "least_contained",
        "least_items",
        "least_keys",
        "listed",
        "looks",
        "most",
        "most_contained",
        "most_items",
        "most_keys",
        "multiples",
        "names",
        "negated",
        "number_tests",
        "one_of",
        "otherwise",
        "patterns",
        "prefix",
        "properties",
        "required",
        "sees_contained",
        "sees_items",
        "sees_keys",
        "steps",
        "string_tests",
        "then",
        "unevaluated_items",
        "unevaluated_properties",
        "unique",
        "whole",
    )

    def __init__(self) -> None:
        self.kinds: frozenset[str] | None = None
        self.listed: frozenset[Canonical] | None = None
        self.number_tests: tuple[Callable[[Decimal], bool], ...] = ()
        self.multiples: tuple[Divisor, ...] = ()
        self.steps: tuple[Fraction, ...] = ()
        self.whole = False
        self.least: Fraction | None = None
        self.most: Fraction | None = None
        self._span: Span | bool | None = None
        self.string_tests: tuple[Callable[[str], bool], ...] = ()

        self.looks = True
        self.prefix: tuple[Rule | None, ...] = ()
        self.items: Rule | None = None
        self.items_from = 0
        self.least_items = 0
        self.most_items: int | None = None
        self.contained: Rule | None = None
        self.least_contained = 0
        self.most_contained: int | None = None
        self.unique = False
        self.sees_items = False
        self.sees_contained = False
        self.unevaluated_items: Rule | None = None

        self.properties: dict[str, Rule | None] = {}
        self.patterns: tuple[tuple[str, Rule | None], ...] = ()
        self.additional: Rule | None = None
        self.is_additional: Callable[[str], bool] = lambda name: True
        self.names: Rule | None = None
        self.closed: frozenset[str] | None = None
        self.required: tuple[str, ...] = ()
        self.least_keys = 0
        self.most_keys: int | None = None
        self.dependent: tuple[tuple[str, tuple[str, ...]], ...] = ()
        self.sees_keys = False
        self.unevaluated_properties: Rule | None = None

        self.all_of: tuple[Rule, ...] = ()
        self.any_of: tuple[tuple[Rule, ...], ...] = ()
        self.one_of: tuple[Rule, ...] | None = None
        self.negated: Rule | None = None
        self.condition: Rule | None = None
        self.then: Rule | None = None
        self.otherwise: Rule | None = None
        self.dependent_rules: tuple[tuple[str, Rule], ...] = ()
        self._tests_all_numbers: bool | None = None

    @property
    def tests_all_numbers(self) -> bool:
        """Whether each alternative that it is made of looks at how a number ends or is for none, so that of a number
        that is not complete none holds."""
        if self._tests_all_numbers is None:
            options = [*(option for options in self.any_of for option in options), *(self.one_of or ())]
            self._tests_all_numbers = bool(options) and all(option._waits_for_the_end() for option in options)
        return self._tests_all_numbers

    def _waits_for_the_end(self) -> bool:
        if self.number_tests or (self.kinds is not None and self.kinds.isdisjoint(("number", "integer"))):
            return True
        return self.tests_all_numbers or any(rule._waits_for_the_end() for rule in self.all_of)

    def possible_names(self) -> frozenset[str] | None:
        """The only keys that an object may have by this rule and those that it is made of; None where others may be."""
        found = [self.closed, *(rule.possible_names() for rule in self.all_of)]
        for options in (*self.any_of, *([self.one_of] if self.one_of else [])):
            names = [option.possible_names() for option in options]
            found.append(None if None in names else frozenset[str]().union(*(some for some in names if some)))
        listed = [names for names in found if names is not None]
        return frozenset.intersection(*listed) if listed else None

    def same(self) -> Iterator[Rule]:
        """The rules for the same value that hold wherever this one does, itself among them."""
        yield self
        for rule in self.all_of:
            yield from rule.same()

    def span(self) -> Span | None:
        """Where numbers that hold can be looked for one after the other, if there is a bound and a test asks for
        multiples."""
        if self._span is None:
            rules = list(self.same())
            steps = [step for rule in rules for step in rule.steps]
            if any(rule.whole for rule in rules):
                steps.append(Fraction(1))
            bounds = ([rule.least for rule in rules], [rule.most for rule in rules])
            least, most = ([bound for bound in found if bound is not None] for found in bounds)
            tested = bool(steps) and bool(least or most) and self.tests_multiples
            self._span = tested and Span(
                functools.reduce(common_multiple, steps), max(least, default=None), min(most, default=None)
            )
        return self._span if isinstance(self._span, Span) else None

    @property
    def tests_multiples(self) -> bool:
        """Whether a test asks for multiples, or for what is none."""
        return bool(self.multiples) or any(rule.tests_multiples for rule in self.inner())

    def named(self) -> Iterator[str]:
        """The keys whose presence this rule asks for, forbids or makes depend on something."""
        yield from self.properties
        yield from self.required
        yield from (name for name, _ in self.dependent_rules)
        for name, needed in self.dependent:
            yield from (name, *needed)

    def inner(self) -> Iterator[Rule]:
        """The rules for the same value that this one is made of."""
        yield from self.all_of
        for options in self.any_of:
            yield from options
        yield from self.one_of or ()
        yield from (rule for rule in (self.negated, self.condition, self.then, self.otherwise) if rule is not None)
        yield from (rule for _, rule in self.dependent_rules)


NEVER = Rule()
NEVER.kinds = frozenset()


def canonical(value: Any) -> Canonical:
    """A value that `read_json` has read."""
    match value:
        case bool():
            return ("true",) if value else ("false",)
        case int():
            return Decimal(value)
        case list():
            return ("[", *map(canonical, value))
        case dict():
            return ("{", frozenset((name, canonical(item)) for name, item in value.items()))
    return value  # type: ignore[no-any-return]


def equal(value: Any) -> Rule:
    """What one value is and no other."""
    rule = Rule()
    rule.looks = False
    if isinstance(value, list):
        rule.kinds = frozenset({"array"})
        rule.prefix = tuple(map(equal, value))
        rule.least_items = rule.most_items = len(value)
    elif isinstance(value, dict):
        rule.kinds = frozenset({"object"})
        rule.properties = {name: equal(item) for name, item in value.items()}
        rule.required = tuple(value)
        rule.additional = NEVER
        rule.is_additional = lambda name: name not in value
        rule.most_keys = len(value)
    else:
        rule.listed = frozenset({canonical(value)})
    return rule
