"""From keywords to shapes: what each keyword allows, and what it does not. Where a union would grow too large or a
keyword has no exact shape, the shape carries a refusal and allows too much; whoever writes the grammar decides.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any, Literal

from specdec.grammar import formats, numbers, patterns
from specdec.grammar.references import Documents, Place
from specdec.grammar.shapes import (
    ALL_ITEMS,
    ANY,
    FULL,
    NONE,
    Among,
    Array,
    AtLeast,
    Atom,
    Boolean,
    Child,
    Count,
    Either,
    Equals,
    Everything,
    Fits,
    Integral,
    Is,
    Length,
    MultipleOf,
    Never,
    Null,
    Number,
    Object,
    Pattern,
    Refusal,
    Residue,
    Shape,
    String,
    Tests,
    Union,
    child_of,
    found_in,
    meet,
    others,
    unite,
)
from specdec.grammar.spelling import PLAIN, Spelling

MAX_SHAPES = 256  # of one union
MAX_LISTED = 1_000  # numbers that are listed rather than checked
MAX_STEPS = 60_000  # shapes that meet, in all
MAX_SUBSETS = 6  # alternatives that may hold at once, where it matters which do
ENORMOUS = 1 << 31  # a bound on lengths and counts that nothing reaches

Verdict = Literal["enforced", "rewritten", "checked", "annotation", "refused"]


class ReferenceLoop(Exception):
    """A schema is defined as itself."""

    def __init__(self, place: Place) -> None:
        super().__init__(f"{place or '/'}: the reference leads back to where it stands")


class _InProgress(Exception):
    """What is asked for is being worked out further up."""


class TooManyShapes(Exception):
    """The alternatives multiply beyond the budget."""


class Lowering:
    """The shapes of a schema's parts, each worked out once. `verdicts` says of each keyword seen what it became."""

    def __init__(
        self, documents: Documents, *, assert_formats: bool, tracks_evaluated: bool, spelling: Spelling = PLAIN
    ) -> None:
        self.spelling = spelling
        self._documents = documents
        self._assert_formats = assert_formats
        self._tracks = tracks_evaluated
        self._expanded: dict[tuple[Atom, bool], Union] = {}
        self._nodes: dict[Child, Union] = {}
        self._expanding: set[tuple[Atom, bool]] = set()
        self._outer: frozenset[tuple[Atom, bool]] = frozenset()
        self._unknown: set[Child] = set()
        self._steps = 0
        self.verdicts: dict[str, tuple[str, Verdict, str]] = {}
        self.mentioned: dict[str, int] = {}  # strings of enums, by when they were come across
        self.lengths: dict[int, str] = {}  # the pointer of a keyword that says so, for each bound on lengths

    def node(self, child: Child) -> Union:
        """The shapes of a child, those that plainly allow nothing left out. Raises `ReferenceLoop`."""
        if child not in self._nodes:
            union: Union = FULL
            for atom, positive in sorted(child, key=repr):
                union = self._meet(union, self._expand(atom, positive), None)
            self._nodes[child] = unite(map(_forget, union))
        return self._nodes[child]

    def is_empty(self, child: Child) -> bool:
        """Whether a child plainly allows nothing. One that is being worked out further up counts as not empty."""
        if not child or child in self._unknown:
            return False
        if (Never(), True) in child:
            return True
        outer, expanding = self._outer, self._expanding
        self._outer, self._expanding = outer | expanding, set()
        try:
            return not self.node(child)
        except _InProgress:
            self._unknown.add(child)
            return False
        finally:
            self._outer, self._expanding = outer, expanding

    def holds(self, test: Any, text: str) -> bool:
        """Whether a string passes a test."""
        match test:
            case Among():
                return text in test.values
            case Pattern():
                return found_in(test.pattern, text)
            case Length():
                return len(text) >= test.least
            case Fits():
                return any(
                    all(self.holds(inner, text) is expected for inner, expected in shape.tests)
                    for shape in self.node(test.child)
                    if isinstance(shape, String)
                )
            case Everything():
                return True
        raise AssertionError(test)

    def _expand(self, atom: Atom, positive: bool) -> Union:
        key = (atom, positive)
        if key not in self._expanded:
            if key in self._expanding:
                assert isinstance(atom, Is)
                raise ReferenceLoop(atom.place)
            if key in self._outer:
                raise _InProgress
            self._expanding.add(key)
            try:
                self._expanded[key] = self._expand_anew(atom, positive)
            finally:
                self._expanding.discard(key)
        return self._expanded[key]

    def _expand_anew(self, atom: Atom, positive: bool) -> Union:
        match atom:
            case Never():
                return () if positive else FULL
            case Equals():
                return self._value(json.loads(atom.text, parse_float=Decimal), positive, atom.pointer)
            case Either():
                unions = [self._conjunction(child, positive) for child in atom.children]
                return unite(*unions) if positive else self._meet_all(unions, None)
            case Is():
                return self._schema(atom.place, atom.scope, positive)

    def _conjunction(self, child: Child, positive: bool) -> Union:
        unions = [self._expand(atom, holds is positive) for atom, holds in sorted(child, key=repr)]
        # What fails has looked at nothing, even where failing means that something else holds.
        return self._meet_all(unions, None) if positive else unite(map(_forget, itertools.chain(*unions)))

    def _schema(self, place: Place, scope: tuple[str, ...], positive: bool) -> Union:
        schema = self._documents.schema(place)
        if isinstance(schema, bool):
            return FULL if schema is positive else ()
        scope = scope_within(self._documents, place, scope)
        unions: list[Union] = []
        union: Union = FULL
        leftovers = [
            keyword
            for keyword in ("unevaluatedItems", "unevaluatedProperties")
            if keyword in schema and self._documents.draft(place) >= 2019
        ]
        for keyword, method in self._keywords(place, schema):
            site = _Site(place, scope, schema, keyword)
            if positive or leftovers:
                refusal = self._refusal(place, keyword, "the alternatives multiply")
                union = self._meet(union, method(self, site, True), refusal)
            if not positive:
                unions.append(method(self, site, False))
        for keyword in leftovers:
            site = _Site(place, scope, schema, keyword)
            if positive:
                union = self._unevaluated(site, union)
            else:
                unions.append(self._left_over(site, union))
        return union if positive else unite(*unions)

    def _keywords(self, place: Place, schema: dict[str, Any]) -> Iterator[tuple[str, Method]]:
        """The keywords of a schema that assert something, those that name keys first; notes what becomes of each."""
        draft = self._documents.draft(place)
        alone = draft <= 7 and "$ref" in schema
        ordered = sorted(schema, key=lambda keyword: keyword not in NAMING)
        for keyword in ordered:
            known = METHODS.get(keyword)
            verdict: Verdict = "annotation"
            reason = ""
            if known is not None and known[0] <= draft <= known[1]:
                verdict = "rewritten" if keyword in REWRITTEN else "enforced"
            elif keyword in ("unevaluatedItems", "unevaluatedProperties") and draft >= 2019:
                verdict = "rewritten"
            elif keyword in IDENTIFIERS:
                verdict = "enforced"
            elif keyword not in ANNOTATIONS:
                reason = "unknown in this draft"
            if alone and keyword not in ("$ref", *IDENTIFIERS):
                verdict, reason = "annotation", "beside $ref, in this draft"
            self._note(place, keyword, verdict, reason)
            if known is not None and verdict in ("enforced", "rewritten") and keyword not in IDENTIFIERS:
                yield keyword, known[2]

    def _note(self, place: Place, keyword: str, verdict: Verdict, reason: str = "") -> None:
        self.verdicts.setdefault(str(self._documents.child(place, keyword)), (keyword, verdict, reason))

    def _refusal(self, place: Place, keyword: str, reason: str, final: bool = False) -> Refusal:
        return Refusal(str(self._documents.child(place, keyword)), keyword, reason, final)

    def _pointer(self, site: _Site) -> str:
        return str(self._documents.child(site.place, site.keyword))

    def _refused(self, site: _Site, reason: str, kind: type[Shape] | None = None, *, final: bool = False) -> Union:
        """Everything, with a refusal on the shapes of one type, or all."""
        refusal = frozenset({self._refusal(site.place, site.keyword, reason, final)})
        return tuple(_marked(shape, refusal) if kind in (None, type(shape)) else shape for shape in FULL)

    # Unions

    def _meet_all(self, unions: Iterable[Union], refusal: Refusal | None) -> Union:
        union: Union = FULL
        for other in unions:
            union = self._meet(union, other, refusal)
        return union

    def _meet(self, first: Union, second: Union, refusal: Refusal | None) -> Union:
        """What both unions allow. Beyond the budget: the first, with the refusal; without one `TooManyShapes`."""
        if first is FULL and second is FULL:
            return FULL
        if first is FULL or second is FULL:
            return tuple(shape for shape in (second if first is FULL else first) if self._settled(shape) is not None)
        found: dict[Shape, None] = {}
        for one in first:
            for other in second:
                if type(one) is not type(other):
                    continue
                self._spend()
                shape = self._settled(meet(one, other, self.holds))
                if shape is not None:
                    found[shape] = None
            if len(found) > MAX_SHAPES:
                if refusal is None:
                    raise TooManyShapes
                return tuple(_marked(shape, frozenset({refusal})) for shape in first)
        return unite(found)

    def _overlap(self, first: Union, second: Union) -> bool:
        """Whether some value may be in both unions."""
        for one in first:
            for other in second:
                if type(one) is type(other):
                    self._spend()
                    if self._settled(meet(one, other, self.holds)) is not None:
                        return True
        return False

    def _spend(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TooManyShapes

    def _settled(self, shape: Shape | None) -> Shape | None:
        """The shape with its lists of values filtered; None where it plainly allows nothing."""
        match shape:
            case Number():
                return _settled_numbers(shape)
            case String():
                return self._settled_strings(shape)
            case Array():
                most = shape.most
                for index in range(shape.least if most is None else min(shape.least, most)):
                    if index > len(shape.prefix):
                        break
                    if self.is_empty(shape.prefix[index] if index < len(shape.prefix) else shape.items):
                        most = index
                        break
                if most is not None and shape.least > most:
                    return None
                for count in shape.counts:
                    if most is not None and count.least > max(0, most - count.offset):
                        return None
                    if count.most is not None and count.least > count.most:
                        return None
            case Object():
                most = shape.most
                if most is not None and max(shape.least, len(shape.required)) > most:
                    return None
                if any(self.is_empty(child_of(shape, name, self.holds)) for name in shape.required):
                    return None
        return shape

    def _settled_strings(self, shape: String) -> String | None:
        lists = [test.values for test, expected in shape.tests if expected and isinstance(test, Among)]
        if lists:
            rest = [(test, expected) for test, expected in shape.tests if not (expected and isinstance(test, Among))]
            values = frozenset.intersection(*lists)
            kept = frozenset(v for v in values if all(self.holds(test, v) is expected for test, expected in rest))
            return String(frozenset({(Among(kept), True)}), shape.residue) if kept else None
        least = max((test.least for test, expected in shape.tests if expected and isinstance(test, Length)), default=0)
        beyond = [test.least for test, expected in shape.tests if not expected and isinstance(test, Length)]
        return None if beyond and least >= min(beyond) else shape

    # Values

    def _value(self, value: Any, positive: bool, pointer: str) -> Union:
        match value:
            case None:
                return (Null(),) if positive else others(Null)
            case bool():
                return (
                    (Boolean(frozenset({value})),) if positive else (Boolean(frozenset({not value})), *others(Boolean))
                )
            case int() | Decimal():
                test = Among(frozenset({Decimal(value)}))
                return (Number(frozenset({(test, positive)})), *(() if positive else others(Number)))
            case str():
                self.mentioned.setdefault(value, len(self.mentioned))
                test = Among(frozenset({value}))
                return (String(frozenset({(test, positive)})), *(() if positive else others(String)))
            case list():
                children = [_equal(item, pointer) for item in value]
                size = len(value)
                if positive:
                    return (Array(tuple(children), NONE, size, size),)
                found: list[Shape] = [Array(least=size + 1)]
                if size:
                    found.append(Array(most=size - 1))
                for index, child in enumerate(children):
                    found.append(Array((*[ANY] * index, _opposite(child)), least=index + 1))
                return (*found, *others(Array))
            case dict():
                names = tuple(value)
                for name in names:
                    self.mentioned.setdefault(name, len(self.mentioned))
                if positive:
                    named = tuple((name, _equal(item, pointer)) for name, item in value.items())
                    return (Object(named, frozenset({(frozenset(), NONE)}), names, len(names)),)
                found = [Object(((name, NONE),)) for name in names]
                found += [
                    Object(((name, _opposite(_equal(item, pointer))),), required=(name,))
                    for name, item in value.items()
                ]
                refusal = Refusal(pointer, pointer.rpartition("/")[2], "an object of more keys is another value")
                found.append(Object(some=frozenset({(frozenset({(Among(frozenset(names)), False)}), ANY, refusal)})))
                return (*found, *others(Object))
        raise AssertionError(value)

    # Keywords, each with what it allows and (not positive) what it does not

    def _sub(self, site: _Site, *tokens: str | int) -> Child:
        return frozenset({(Is(self._documents.child(site.place, site.keyword, *tokens), site.scope), True)})

    def _type(self, site: _Site, positive: bool) -> Union:
        names = {site.value} if isinstance(site.value, str) else set(site.value)
        found: list[Shape] = [shape for shape in FULL if (_TYPES[type(shape)] in names) is positive]
        if "integer" in names and "number" not in names:
            found = [shape for shape in found if not isinstance(shape, Number)]
            found.append(Number(frozenset({(Integral(), positive)})))
        return unite(found)

    def _const(self, site: _Site, positive: bool) -> Union:
        return self._guarded(site, positive, lambda: self._value(site.value, positive, self._pointer(site)))

    def _enum(self, site: _Site, positive: bool) -> Union:
        def build() -> Union:
            if positive:
                return unite(*(self._value(value, True, self._pointer(site)) for value in site.value))
            scalars: list[Any] = [v for v in site.value if not isinstance(v, dict | list)]
            texts = frozenset(v for v in scalars if isinstance(v, str))
            values = frozenset(Decimal(v) for v in scalars if isinstance(v, int | Decimal) and not isinstance(v, bool))
            left = frozenset({True, False}) - {v for v in scalars if isinstance(v, bool)}
            union: Union = (
                *(() if None in scalars else (Null(),)),
                *((Boolean(left),) if left else ()),
                Number(frozenset({(Among(values), False)}) if values else frozenset()),
                String(frozenset({(Among(texts), False)}) if texts else frozenset()),
                Array(),
                Object(),
            )
            rest = [
                self._value(value, False, self._pointer(site)) for value in site.value if isinstance(value, dict | list)
            ]
            return self._meet_all([union, *rest], None)

        return self._guarded(site, positive, build)

    def _guarded(self, site: _Site, positive: bool, build: Callable[[], Union]) -> Union:
        """A union of values, or a refusal of those that cannot be written."""
        for value in _leaves(site.value):
            if isinstance(value, int | Decimal) and not isinstance(value, bool) and not numbers.fits(Decimal(value)):
                return self._refused(site, f"the number {value:.3e} cannot be written out", final=positive)
            if isinstance(value, str) and any(0xD800 <= ord(c) < 0xE000 for c in value):
                return self._refused(site, "a lone surrogate cannot be written", final=positive)
        return build()

    def _bound(self, site: _Site, positive: bool) -> Union:
        value, keyword = site.value, site.keyword
        if isinstance(value, bool):
            return FULL if positive else ()  # draft 4: read beside the bound
        bound = Decimal(value)
        if not numbers.fits(bound):
            return self._refused(site, "the bound cannot be written out", Number, final=bound.adjusted() > 0)
        exclusive = "exclusive" in keyword or site.schema.get("exclusive" + keyword.capitalize()) is True
        lower = "inimum" in keyword
        test = AtLeast(bound, exclusive) if lower else AtLeast(bound, not exclusive)
        expected = lower is positive
        return (Number(frozenset({(test, expected)})), *(others(Number) if positive else ()))

    def _multiple_of(self, site: _Site, positive: bool) -> Union:
        divisor = Decimal(site.value)
        tests: Tests = frozenset({(MultipleOf(divisor), positive)})
        reason = "only multiples, within bounds of up to 15 digits, can be written"
        doubts = frozenset({self._refusal(site.place, site.keyword, reason)})
        return (Number(tests, doubts), *(others(Number) if positive else ()))

    def _length(self, site: _Site, positive: bool) -> Union:
        least = int(site.value) + (site.keyword == "maxLength")
        self.lengths.setdefault(min(least, ENORMOUS), self._pointer(site))
        expected = (site.keyword == "minLength") is positive
        return (String(frozenset({(Length(min(least, ENORMOUS)), expected)})), *(others(String) if positive else ()))

    def _pattern(self, site: _Site, positive: bool) -> Union:
        try:
            patterns.content_expression(site.value, self.spelling)
        except patterns.PatternRefused as error:
            return self._refused(site, str(error), String, final=positive)
        return (String(frozenset({(Pattern(site.value), positive)})), *(others(String) if positive else ()))

    def _format(self, site: _Site, positive: bool) -> Union:
        name = site.value
        known = formats.FIRST_DRAFTS.get(name, 9999) <= self._documents.draft(site.place)
        if not self._assert_formats or not known:
            reason = "an unknown format" if self._assert_formats else "formats are annotations here"
            self._note_anew(site, "annotation", reason)
            return FULL if positive else ()
        if name in formats.CHECKED:
            pattern, reason = formats.CHECKED[name]
            if not positive:
                return self._refused(site, reason, String)
            refusal = frozenset({self._refusal(site.place, site.keyword, reason)})
            return (String(frozenset({(Pattern(pattern), True)}), refusal), *others(String))
        if not positive:
            return (String(frozenset({(Pattern(formats.SUPERSETS[name]), False)})),)
        tests: set[tuple[Any, bool]] = {(Pattern(formats.PATTERNS[name]), True)}
        if name in formats.MAX_LENGTHS:
            tests.add((Length(formats.MAX_LENGTHS[name] + 1), False))
        return (String(frozenset(tests)), *others(String))

    def _note_anew(self, site: _Site, verdict: Verdict, reason: str) -> None:
        self.verdicts[str(self._documents.child(site.place, site.keyword))] = (site.keyword, verdict, reason)

    def _prefix_items(self, site: _Site, positive: bool) -> Union:
        children = [self._sub(site, index) for index in range(len(site.value))]
        if positive:
            return (Array(tuple(children), evaluated=len(children) if self._tracks else 0), *others(Array))
        return tuple(Array((*[ANY] * index, _opposite(child)), least=index + 1) for index, child in enumerate(children))

    def _items(self, site: _Site, positive: bool) -> Union:
        draft = self._documents.draft(site.place)
        if isinstance(site.value, list):
            return self._prefix_items(site, positive)
        prefix = site.schema.get("prefixItems", ()) if draft >= 2020 else ()
        return self._rest(site, len(prefix), positive)

    def _additional_items(self, site: _Site, positive: bool) -> Union:
        prefix = site.schema.get("items")
        if not isinstance(prefix, list):
            return FULL if positive else ()
        return self._rest(site, len(prefix), positive)

    def _rest(self, site: _Site, offset: int, positive: bool) -> Union:
        child = self._sub(site)
        if positive:
            return (Array((ANY,) * offset, child, evaluated=ALL_ITEMS if self._tracks else 0), *others(Array))
        return (self._counted(site, Count(offset, _opposite(child), 1, None)),)

    def _counted(self, site: _Site, count: Count) -> Array:
        refusal = self._refusal(site.place, site.keyword, "the counts of items multiply beyond the budget")
        return Array(counts=frozenset({count}), doubts=frozenset({refusal}))

    def _item_bound(self, site: _Site, positive: bool) -> Union:
        value = min(int(site.value), ENORMOUS)
        if (site.keyword == "minItems") is positive:
            shape: Union = (Array(least=value if positive else value + 1),)
        elif positive:
            shape = (Array(most=value),)
        else:
            shape = (Array(most=value - 1),) if value else ()
        return (*shape, *(others(Array) if positive else ()))

    def _contains(self, site: _Site, positive: bool) -> Union:
        child, later = self._sub(site), self._documents.draft(site.place) >= 2019
        least = int(site.schema.get("minContains", 1)) if later else 1
        most = int(site.schema["maxContains"]) if later and "maxContains" in site.schema else None
        if positive:
            asks = least or most is not None
            shape = self._counted(site, Count(0, child, least, most)) if asks else Array()
            if self._tracks and self._documents.draft(site.place) >= 2020:
                shape = replace(shape, evaluated_by=frozenset({child}))
            return (shape, *others(Array))
        found: list[Shape] = []
        if least:
            found.append(self._counted(site, Count(0, child, 0, least - 1)))
        if most is not None:
            found.append(self._counted(site, Count(0, child, most + 1, None)))
        return tuple(found)

    def _beside(self, site: _Site, positive: bool) -> Union:
        """A keyword that another one reads."""
        return FULL if positive else ()

    def _unique_items(self, site: _Site, positive: bool) -> Union:
        if not site.value:
            return FULL if positive else ()
        refusal = self._refusal(site.place, site.keyword, "only a few items out of a finite set can be kept apart")
        if positive:
            return (Array(unique=frozenset({refusal})), *others(Array))
        return (Array(least=2, residue=frozenset({replace(refusal, reason="items that repeat cannot be asked for")})),)

    def _properties(self, site: _Site, positive: bool) -> Union:
        named = {name: self._sub(site, name) for name in site.value}
        if positive:
            seen = frozenset({Among(frozenset(named))}) if self._tracks and named else frozenset()
            return (Object(tuple(named.items()), evaluated=seen), *others(Object))
        return tuple(Object(((name, _opposite(child)),), required=(name,)) for name, child in named.items())

    def _pattern_properties(self, site: _Site, positive: bool) -> Union:
        rules: list[tuple[Tests, Child]] = []
        for pattern in site.value:
            try:
                patterns.content_expression(pattern, self.spelling)
            except patterns.PatternRefused as error:
                return self._refused(site, f"{pattern!r} {error}", Object)
            rules.append((frozenset({(Pattern(pattern), True)}), self._sub(site, pattern)))
        if positive:
            seen = frozenset(Pattern(pattern) for pattern in site.value) if self._tracks else frozenset()
            return (Object(rules=frozenset(rules), evaluated=seen, doubts=self._many_tests(site)), *others(Object))
        refusal = self._refusal(site.place, site.keyword, "a key that breaks the rule cannot be asked for")
        return tuple(Object(some=frozenset({(tests, _opposite(child), refusal)})) for tests, child in rules)

    def _many_tests(self, site: _Site) -> Residue:
        """The doubt about a rule for keys."""
        return frozenset({self._refusal(site.place, site.keyword, "more than six tests tell the keys apart")})

    def _additional_properties(self, site: _Site, positive: bool) -> Union:
        child = self._sub(site)
        tests: set[tuple[Any, bool]] = set()
        if site.schema.get("properties"):
            tests.add((Among(frozenset(site.schema["properties"])), False))
        tests.update((Pattern(pattern), False) for pattern in site.schema.get("patternProperties", ()))
        for test, _ in tests:
            if isinstance(test, Pattern):
                try:
                    patterns.content_expression(test.pattern, self.spelling)
                except patterns.PatternRefused as error:
                    return self._refused(site, f"{test.pattern!r} {error}", Object)
        if positive:
            seen = frozenset({Everything()}) if self._tracks else frozenset()
            rules = frozenset({(frozenset(tests), child)})
            return (Object(rules=rules, evaluated=seen, doubts=self._many_tests(site)), *others(Object))
        refusal = self._refusal(site.place, site.keyword, "a key that breaks the rule cannot be asked for")
        return (Object(some=frozenset({(frozenset(tests), _opposite(child), refusal)})),)

    def _property_names(self, site: _Site, positive: bool) -> Union:
        child = self._sub(site)
        tests: Tests = frozenset({(Fits(child), False)})
        if positive:
            return (Object(rules=frozenset({(tests, NONE)}), doubts=self._many_tests(site)), *others(Object))
        refusal = self._refusal(site.place, site.keyword, "a key that breaks the rule cannot be asked for")
        return (Object(some=frozenset({(tests, ANY, refusal)})),)

    def _required(self, site: _Site, positive: bool) -> Union:
        if not isinstance(site.value, list):
            return FULL if positive else ()
        if positive:
            return (Object(required=tuple(dict.fromkeys(site.value))), *others(Object))
        return tuple(Object(((name, NONE),)) for name in dict.fromkeys(site.value))

    def _property_bound(self, site: _Site, positive: bool) -> Union:
        value = min(int(site.value), ENORMOUS)
        counted = frozenset({self._refusal(site.place, site.keyword, "the counts of keys multiply beyond the budget")})
        if (site.keyword == "minProperties") is positive:
            shape: Union = (Object(least=value if positive else value + 1, doubts=counted),)
        elif positive:
            shape = (Object(most=value, doubts=counted),)
        else:
            shape = (Object(most=value - 1, doubts=counted),) if value else ()
        return (*shape, *(others(Object) if positive else ()))

    def _dependent(self, site: _Site, positive: bool) -> Union:
        found = []
        refusal = self._refusal(site.place, site.keyword, "the alternatives multiply")
        for name, needed in site.value.items():
            if needed == []:
                continue
            present: Union = (Object(required=(name,)),)
            if isinstance(needed, list):
                then: Union = (
                    (Object(required=tuple(dict.fromkeys(needed))),)
                    if positive
                    else tuple(Object(((other, NONE),)) for other in dict.fromkeys(needed))
                )
            else:
                then = self._conjunction(self._sub(site, name), positive)
            then = self._meet(present, then, refusal)
            found.append(unite((Object(((name, NONE),)),), then, others(Object)) if positive else then)
        if positive:
            return self._meet_all(found, refusal)
        return unite(*found)

    def _all_of(self, site: _Site, positive: bool) -> Union:
        unions = [self._conjunction(self._sub(site, index), positive) for index in range(len(site.value))]
        if not positive:
            return unite(*unions)
        return self._meet_all(unions, self._refusal(site.place, site.keyword, "the alternatives multiply"))

    def _any_of(self, site: _Site, positive: bool) -> Union:
        unions = [self._conjunction(self._sub(site, index), positive) for index in range(len(site.value))]
        if not positive:
            return self._meet_all(unions, self._refusal(site.place, site.keyword, "the alternatives multiply"))
        if not self._tracks:
            return unite(*unions)
        if len(unions) > MAX_SUBSETS:
            return self._refused(site, "too many alternatives may hold at once")
        # What has been looked at differs with the alternatives that hold, so every set of them stands for itself.
        found: Union = ()
        for union in unions:
            found = unite(found, union, self._meet(found, union, None))
        return found

    def _one_of(self, site: _Site, positive: bool) -> Union:
        children = [self._sub(site, index) for index in range(len(site.value))]
        unions = [self._conjunction(child, True) for child in children]
        refusal = self._refusal(site.place, site.keyword, "the alternatives overlap")
        if positive:
            found: list[Union] = []
            overlaps = [[self._overlap(union, other) for other in unions[:at]] for at, union in enumerate(unions)]
            for index, union in enumerate(unions):
                for other, child in enumerate(children):
                    if other == index or not overlaps[max(index, other)][min(index, other)]:
                        continue
                    if self._overlap(union, unions[other]):  # still, without what others allow
                        union = self._meet(union, self._conjunction(child, False), refusal)
                found.append(union)
            return unite(*found)
        both = [self._meet(union, other, refusal) for index, union in enumerate(unions) for other in unions[:index]]
        none = self._meet_all([self._conjunction(child, False) for child in children], refusal)
        return unite(none, *both)

    def _not(self, site: _Site, positive: bool) -> Union:
        return self._conjunction(self._sub(site), not positive)

    def _if(self, site: _Site, positive: bool) -> Union:
        refusal = self._refusal(site.place, site.keyword, "the alternatives multiply")
        condition = self._sub(site)
        found = []
        for holds, keyword in ((True, "then"), (False, "else")):
            union = self._conjunction(condition, holds)
            if keyword in site.schema:
                child = self._sub(site.beside(keyword))
                union = self._meet(union, self._conjunction(child, positive), refusal)
            elif not positive:
                continue
            found.append(union)
        return unite(*found) if found else ()

    def _reference(self, site: _Site, positive: bool) -> Union:
        return self._expand(target(self._documents, site.place, site.scope, site.keyword), positive)

    # What no other keyword has looked at

    def _unevaluated(self, site: _Site, union: Union) -> Union:
        child = self._sub(site)
        found: list[Shape] = []
        for shape in union:
            left: Shape | None = shape
            if isinstance(shape, Array) and site.keyword == "unevaluatedItems":
                left = self._unevaluated_items(shape, child)
            elif isinstance(shape, Object) and site.keyword == "unevaluatedProperties":
                left = self._unevaluated_properties(shape, child, self._many_tests(site))
            left = self._settled(left)
            if left is not None:
                found.append(left)
        return unite(found)

    def _left_over(self, site: _Site, union: Union) -> Union:
        """What the other keywords allow and this one does not. Exact where they leave one shape; else a refusal."""
        refusal = self._refusal(site.place, site.keyword, "that something is left over cannot be asked for")
        objects = [shape for shape in union if isinstance(shape, Object)]
        if site.keyword == "unevaluatedProperties" and len(objects) <= 1:
            tests: Tests = frozenset((test, False) for test in objects[0].evaluated) if objects else frozenset()
            asked = Object(some=frozenset({(tests, _opposite(self._sub(site)), refusal)}))
            return self._meet(tuple(map(_forget, objects)), (asked,), refusal)
        kind = Array if site.keyword == "unevaluatedItems" else Object
        return tuple(_marked(_forget(shape), frozenset({refusal})) for shape in union if isinstance(shape, kind))

    def _unevaluated_properties(self, shape: Object, child: Child, doubts: Residue) -> Shape | None:
        if Everything() in shape.evaluated:
            return shape
        tests: Tests = frozenset((test, False) for test in shape.evaluated)
        rule = Object(rules=frozenset({(tests, child)}), evaluated=frozenset({Everything()}), doubts=doubts)
        return meet(shape, rule, self.holds)

    def _unevaluated_items(self, shape: Array, child: Child) -> Array:
        if shape.evaluated == ALL_ITEMS:
            return shape
        if shape.evaluated_by:
            options = (child, *sorted(shape.evaluated_by, key=repr))
            child = frozenset({(Either(options), True)})
        rule = Array((ANY,) * shape.evaluated, child, evaluated=ALL_ITEMS)
        met = meet(shape, rule, self.holds)
        assert isinstance(met, Array)
        return met


class _Site:
    """A keyword of a schema: where it is, its value, and what stands beside it."""

    __slots__ = ("keyword", "place", "schema", "scope")

    def __init__(self, place: Place, scope: tuple[str, ...], schema: dict[str, Any], keyword: str) -> None:
        self.place, self.scope, self.schema, self.keyword = place, scope, schema, keyword

    @property
    def value(self) -> Any:
        return self.schema[self.keyword]

    def beside(self, keyword: str) -> _Site:
        """Another keyword of the same schema."""
        return _Site(self.place, self.scope, self.schema, keyword)


Method = Callable[[Lowering, _Site, bool], Union]

_TYPES: dict[type, str] = {
    Null: "null",
    Boolean: "boolean",
    Number: "number",
    String: "string",
    Array: "array",
    Object: "object",
}

# What reads each keyword, and the first and the last draft that has it.
METHODS: dict[str, tuple[int, int, Method]] = {
    "type": (4, 9999, Lowering._type),
    "const": (6, 9999, Lowering._const),
    "enum": (4, 9999, Lowering._enum),
    "minimum": (4, 9999, Lowering._bound),
    "maximum": (4, 9999, Lowering._bound),
    "exclusiveMinimum": (4, 9999, Lowering._bound),
    "exclusiveMaximum": (4, 9999, Lowering._bound),
    "multipleOf": (4, 9999, Lowering._multiple_of),
    "minLength": (4, 9999, Lowering._length),
    "maxLength": (4, 9999, Lowering._length),
    "pattern": (4, 9999, Lowering._pattern),
    "format": (4, 9999, Lowering._format),
    "prefixItems": (2020, 9999, Lowering._prefix_items),
    "items": (4, 9999, Lowering._items),
    "additionalItems": (4, 2019, Lowering._additional_items),
    "minItems": (4, 9999, Lowering._item_bound),
    "maxItems": (4, 9999, Lowering._item_bound),
    "contains": (6, 9999, Lowering._contains),
    "minContains": (2019, 9999, Lowering._beside),
    "maxContains": (2019, 9999, Lowering._beside),
    "uniqueItems": (4, 9999, Lowering._unique_items),
    "properties": (4, 9999, Lowering._properties),
    "patternProperties": (4, 9999, Lowering._pattern_properties),
    "additionalProperties": (4, 9999, Lowering._additional_properties),
    "propertyNames": (6, 9999, Lowering._property_names),
    "required": (4, 9999, Lowering._required),
    "minProperties": (4, 9999, Lowering._property_bound),
    "maxProperties": (4, 9999, Lowering._property_bound),
    "dependencies": (4, 7, Lowering._dependent),
    "dependentRequired": (2019, 9999, Lowering._dependent),
    "dependentSchemas": (2019, 9999, Lowering._dependent),
    "allOf": (4, 9999, Lowering._all_of),
    "anyOf": (4, 9999, Lowering._any_of),
    "oneOf": (4, 9999, Lowering._one_of),
    "not": (4, 9999, Lowering._not),
    "if": (7, 9999, Lowering._if),
    "then": (7, 9999, Lowering._beside),
    "else": (7, 9999, Lowering._beside),
    "$ref": (4, 9999, Lowering._reference),
    "$dynamicRef": (2020, 9999, Lowering._reference),
    "$recursiveRef": (2019, 2019, Lowering._reference),
}
NAMING = frozenset(
    ["properties", "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf"]
)  # they name keys, in order
REWRITTEN = frozenset(
    [
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "$dynamicRef",
        "$recursiveRef",
    ]
)
IDENTIFIERS = frozenset(
    ["$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$defs", "definitions"]
)
ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "readOnly",
        "writeOnly",
        "deprecated",
        "$comment",
        "$vocabulary",
        "contentMediaType",
        "contentEncoding",
        "contentSchema",
    ]
)


def target(documents: Documents, place: Place, scope: tuple[str, ...], keyword: str) -> Is:
    """Where `$ref`, `$dynamicRef` or `$recursiveRef` at a place leads; `scope` are the resources that a dynamic one
    looks through. Raises `Unresolvable`."""
    reference = documents.schema(place)[keyword]
    found = documents.resolve(place, reference)
    resource = documents.resource(found)
    if keyword == "$recursiveRef" and documents.is_recursive(resource):
        found = documents.root_of(next(uri for uri in (*scope, "") if documents.is_recursive(uri)))
    elif keyword == "$dynamicRef":
        name = reference.partition("#")[2]
        if documents.dynamic_anchor(resource, name) == found:
            places = (documents.dynamic_anchor(uri, name) for uri in scope)
            found = next((place for place in places if place is not None), found)
    return Is(found, scope)


def scope_within(documents: Documents, place: Place, scope: tuple[str, ...]) -> tuple[str, ...]:
    """The resources that dynamic references within a place look through, outermost first; only those in which one may
    find what it does not find further out."""
    resource = documents.resource(place)
    known = frozenset().union(*map(documents.dynamic_names, scope))
    return scope if documents.dynamic_names(resource) <= known else (*scope, resource)


def _equal(value: Any, pointer: str) -> Child:
    return frozenset({(Equals(_canonical(value), pointer), True)})


def _canonical(value: Any) -> str:
    """JSON text, numbers written out."""
    match value:
        case dict():
            return "{" + ",".join(f"{json.dumps(k)}:{_canonical(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_canonical, value)) + "]"
        case Decimal():
            return numbers.spelling(value)
        case _:
            return json.dumps(value)


def _opposite(child: Child) -> Child:
    """What a child of one atom does not allow."""
    ((atom, positive),) = child
    return frozenset({(atom, not positive)})


def _marked(shape: Shape, residue: Residue) -> Shape:
    return replace(shape, residue=shape.residue | residue)


def _forget(shape: Shape) -> Shape:
    """A shape without what has been looked at, which only matters within its schema."""
    match shape:
        case Array():
            return replace(shape, evaluated=0, evaluated_by=frozenset())
        case Object():
            return replace(shape, evaluated=frozenset())
        case _:
            return shape


def _leaves(value: Any) -> Iterator[Any]:
    match value:
        case dict():
            for name, item in value.items():
                yield name
                yield from _leaves(item)
        case list():
            for item in value:
                yield from _leaves(item)
        case _:
            yield value


def number_holds(test: Any, value: Decimal) -> bool:
    """Whether a number passes a test."""
    match test:
        case Among():
            return value in test.values
        case Integral():
            return value == value.to_integral_value()
        case AtLeast():
            return value > test.bound or (value == test.bound and not test.exclusive)
        case MultipleOf():
            return value % test.divisor == 0
    raise AssertionError(test)


def _settled_numbers(shape: Number) -> Number | None:
    lists = [test.values for test, expected in shape.tests if expected and isinstance(test, Among)]
    if lists:
        rest = [(test, expected) for test, expected in shape.tests if not (expected and isinstance(test, Among))]
        values = frozenset.intersection(*lists)
        kept = frozenset(v for v in values if all(number_holds(test, v) is expected for test, expected in rest))
        return Number(frozenset({(Among(kept), True)}), residue=shape.residue) if kept else None
    low, high = bounds(shape.tests)
    if low is None or high is None:
        return shape
    (least, below), (most, above) = low, high
    if least > most or (least == most and (below or above)):
        return None
    step = _step(shape.tests)
    if step is None:
        return shape
    first, last = numbers.integers_between(least / step, below, most / step, above)
    if first > last:
        return None
    if last - first < MAX_LISTED and not _is_written(shape.tests, step):
        kept = frozenset(
            value
            for value in (step * number for number in range(int(first), int(last) + 1))
            if all(number_holds(test, value) is expected for test, expected in shape.tests)
        )
        return Number(frozenset({(Among(kept), True)}), residue=shape.residue) if kept else None
    return shape


def _step(tests: Tests) -> Decimal | None:
    """What all numbers that pass the tests are multiples of; None where that is nothing in particular."""
    divisors = [test.divisor for test, expected in tests if expected and isinstance(test, MultipleOf)]
    if (Integral(), True) in tests:
        divisors.append(Decimal(1))
    return functools.reduce(numbers.common_decimal, divisors) if divisors else None


def _is_written(tests: Tests, step: Decimal) -> bool:
    """Whether a grammar can say by itself which multiples of `step` pass the tests."""
    if not any(isinstance(test, MultipleOf) for test, _ in tests):
        return True
    return numbers.is_small_divisor(step) and all(is_plain(test, expected) for test, expected in tests)


def is_plain(test: Any, expected: bool) -> bool:
    """Whether a test of numbers can stand beside a divisor in a grammar."""
    return isinstance(test, AtLeast) or (expected and isinstance(test, MultipleOf | Integral))


Bound = tuple[Decimal, bool]


def bounds(tests: Tests) -> tuple[Bound | None, Bound | None]:
    """The tightest bounds among tests, each with whether it is exclusive."""
    lows = [(test.bound, test.exclusive) for test, expected in tests if expected and isinstance(test, AtLeast)]
    highs = [
        (-test.bound, not test.exclusive) for test, expected in tests if not expected and isinstance(test, AtLeast)
    ]
    low, high = max(lows, default=None), max(highs, default=None)
    return low, None if high is None else (-high[0], high[1])
