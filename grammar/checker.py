"""A watcher of JSON text that keeps what rules say of the value so far: true, false whatever follows, or still open.
It forbids what makes the whole value false, and every key that an object has already. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.grammar.json_text import Kind, Scalar
from specdec.grammar.numbers import Beginning, Divisor, Span, spelling, sure_length
from specdec.grammar.rules import Canonical, Rule, canonical
from specdec.grammar.shapes import found_in
from specdec.grammar.words import Words

# What is known of a value that is not complete: None while what follows decides.
Verdict = bool | None

MAX_REMEMBERED = 4_096  # layouts, and names of keys for each
MAX_TRIED = 64  # keys of one object, to see which alternatives leave
_KINDS = ("null", "boolean", "number", "string", "array", "object")
_KIND_NAMES = {Kind.OBJECT: "object", Kind.ARRAY: "array", Kind.STRING: "string", Kind.NUMBER: "number"}


def holds(rule: Rule, value: Scalar) -> bool:
    """Whether a scalar is what a rule asks for."""
    kind = _kind_of(value)
    if rule.kinds is not None and kind not in rule.kinds:
        whole = isinstance(value, Decimal) and value == value.to_integral_value()
        if not (whole and "integer" in rule.kinds):
            return False
    if rule.listed is not None and canonical(value) not in rule.listed:
        return False
    if isinstance(value, Decimal) and not all(test(value) for test in rule.number_tests):
        return False
    if isinstance(value, str) and not all(test(value) for test in rule.string_tests):
        return False
    return _combined(rule, lambda inner: holds(inner, value)) is True


def _begun(rule: Rule, kind: str, beginning: Beginning | None = None) -> Verdict:
    """What a rule says of a value of which no more than its kind is known, and how it begins if it is a number."""
    if beginning is not None:
        if not all(map(beginning.may_become_multiple, rule.multiples)):
            return False
        span = rule.few_span()
        if span is not None and not _may_become(rule, span, beginning.text):
            return False
    verdict: Verdict = None if kind in ("object", "array") else True
    if rule.kinds is not None and kind not in rule.kinds:
        if not (kind == "number" and "integer" in rule.kinds):
            return False
        verdict = None
    if rule.listed is not None:
        if not any(_kind_of(value) == kind for value in rule.listed):
            return False
        verdict = None
    if (rule.number_tests and kind == "number") or (rule.string_tests and kind == "string"):
        verdict = None
    return _and(verdict, _combined(rule, lambda inner: _begun(inner, kind, beginning), kind == "number"))


def _may_become(rule: Rule, span: Span, beginning: str) -> bool:
    """Whether a number that begins so may hold, where all that do are in `span`. True also where many would have to be
    tried, or it has an exponent."""
    if not beginning or "e" in beginning.lower():
        return True
    if beginning == "-":
        return any(_may_become(rule, span, f"-{digit}") for digit in range(10))
    few = span.few(beginning)
    return few is None or any(holds(rule, number) for number in few)


def _unknown(rule: Rule) -> Verdict:
    """What a rule says of a value of which nothing is known."""
    verdicts = {_begun(rule, kind) for kind in _KINDS}
    return verdicts.pop() if len(verdicts) == 1 else None


def _kind_of(value: Scalar | Canonical) -> str:
    """The type of a scalar, or of the canonical form of one."""
    if value is None:
        return "null"
    if isinstance(value, bool | tuple):
        return "boolean"
    return "string" if isinstance(value, str) else "number"


def _combined(rule: Rule, of: Callable[[Rule], Verdict], is_unfinished_number: bool = False) -> Verdict:
    """What a rule says by the rules for the same value that it is made of; `of` gives the verdict of each."""
    verdict: Verdict = True
    # Of alternatives that all wait for the last digit, one that is open is as good as many.
    one_will_do = is_unfinished_number and rule.tests_all_numbers
    for inner in rule.all_of:
        verdict = _and(verdict, of(inner))
        if verdict is False:
            return False
    for options in rule.any_of:
        found: Verdict = False
        for inner in options:
            found = _or(found, of(inner))
            if found or (found is None and one_will_do):
                break
        verdict = _and(verdict, found)
    if rule.one_of is not None:
        verdicts: list[Verdict] = []
        for inner in rule.one_of:
            verdicts.append(of(inner))
            if verdicts[-1] is None and one_will_do:
                break
        found = verdicts.count(True) == 1 if None not in verdicts else None
        verdict = _and(verdict, False if verdicts.count(True) > 1 else found)
    if rule.negated is not None:
        verdict = _and(verdict, _not(of(rule.negated)))
    if rule.condition is not None and (rule.then is not None or rule.otherwise is not None):
        condition = of(rule.condition)
        then = True if rule.then is None else of(rule.then)
        otherwise = True if rule.otherwise is None else of(rule.otherwise)
        found = then if condition else otherwise if condition is False else then if then is otherwise else None
        verdict = _and(verdict, found)
    return verdict


def _and(first: Verdict, second: Verdict) -> Verdict:
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def _or(first: Verdict, second: Verdict) -> Verdict:
    if first is True or second is True:
        return True
    return None if first is None or second is None else False


def _not(verdict: Verdict) -> Verdict:
    return None if verdict is None else not verdict


class Links:
    """What the rules at a container ask of one of its keys or items. Sets of rules are bits, by their places there.

    `attached` are the rules of the child; `asked[place]` says which of them the rule at a place asks for, `contained`
    and `unevaluated` which one it counts or asks of what nobody looks at. `seen_by` look at the child, and `unnamed`
    are false because of the key itself.
    """

    __slots__ = (
        "_begun",
        "_begun_numbers",
        "_divisors",
        "_sure_length",
        "_unknown",
        "asked",
        "attached",
        "contained",
        "seen_by",
        "unevaluated",
        "unnamed",
    )

    def __init__(self) -> None:
        self.attached: tuple[Rule, ...] = ()
        self.asked: dict[int, tuple[int, ...]] = {}
        self.contained: dict[int, int] = {}
        self.unevaluated: dict[int, int] = {}
        self.seen_by = 0
        self.unnamed = 0
        self._begun: dict[Kind, tuple[Verdict, ...]] = {}
        self._begun_numbers: dict[str, tuple[tuple[Verdict, ...], Beginning]] = {}
        self._divisors: frozenset[Divisor] | None = None
        self._sure_length = 0
        self._unknown: tuple[Verdict, ...] | None = None

    @property
    def unknown(self) -> tuple[Verdict, ...]:
        """What the attached rules say of a child before it begins."""
        if self._unknown is None:
            self._unknown = tuple(map(_unknown, self.attached))
        return self._unknown

    @property
    def divisors(self) -> frozenset[Divisor]:
        """What the attached rules, and those that they are made of, ask for multiples of."""
        if self._divisors is None:
            rules = _inner_first(self.attached)
            self._divisors = frozenset(divisor for rule in rules for divisor in rule.multiples)
            self._sure_length = sure_length(self._divisors, (span for rule in rules if (span := rule.few_span())))
        return self._divisors

    def of_kind(self, kind: Kind) -> tuple[Verdict, ...]:
        """What the attached rules say of a child of which only the kind is known."""
        if kind not in self._begun:
            self._begun[kind] = tuple(_begun(rule, _KIND_NAMES[kind]) for rule in self.attached)
        return self._begun[kind]

    def of_number(self, text: str) -> tuple[Verdict, ...]:
        """What the attached rules say of a child that is a number and begins so."""
        digits = text.lstrip("-")
        if self.divisors and len(digits) <= self._sure_length and digits.isdigit() and not digits.startswith("0"):
            text = ""  # whatever its digits, it may become a multiple of each
        if text not in self._begun_numbers:
            if len(self._begun_numbers) >= MAX_REMEMBERED:
                self._begun_numbers.clear()
            _, shorter = self._begun_numbers.get(text[:-1], (None, None))
            beginning = Beginning(text, shorter)
            verdicts = tuple(_begun(rule, "number", beginning) for rule in self.attached)
            self._begun_numbers[text] = verdicts, beginning
        return self._begun_numbers[text][0]

    @property
    def content(self) -> object:
        """What equals that of links which ask the same."""
        asked = (tuple(self.asked.items()), tuple(self.contained.items()), tuple(self.unevaluated.items()))
        return self.attached, asked, self.seen_by, self.unnamed

    def attach(self, rule: Rule) -> int:
        """Where the rule stands among those attached."""
        if rule not in self.attached:
            self.attached += (rule,)
        return self.attached.index(rule)


class Layout:
    """The rules that are judged at one container: `attached` ones at the places `own`, and all that these are made of,
    inner ones first. Of them the `firm` ones must hold. Shared by all containers with the same rules."""

    __slots__ = (
        "_item_links",
        "_key_links",
        "_rules_after",
        "_same_links",
        "counting",
        "is_object",
        "is_plain",
        "most",
        "named",
        "named_words",
        "never",
        "own",
        "place",
        "possible",
        "rules",
        "tracks",
        "unique",
    )

    def __init__(self, attached: tuple[Rule, ...], is_object: bool, firm: frozenset[Rule]) -> None:
        self.is_object = is_object
        self.rules = _inner_first(attached)
        self.place = {rule: place for place, rule in enumerate(self.rules)}
        self.own = tuple(self.place[rule] for rule in attached)
        kind = "object" if is_object else "array"
        self.never = tuple(
            (rule.kinds is not None and kind not in rule.kinds) or rule.listed is not None for rule in self.rules
        )
        self.most = tuple(_most(rule, is_object) for rule in attached)
        self.unique = not is_object and any(rule.unique for rule in self.rules)
        self.counting = {p: at for at, p in enumerate(p for p, rule in enumerate(self.rules) if rule.contained)}
        self.tracks = any(
            (rule.unevaluated_properties if is_object else rule.unevaluated_items) is not None for rule in self.rules
        )
        self._rules_after = max((max(len(rule.prefix), rule.items_from) for rule in self.rules), default=0)
        self._item_links: dict[int, Links] = {}
        self._key_links: dict[str, Links] = {}
        self._same_links: dict[object, Links] = {}
        self.named = frozenset(name for rule in self.rules for name in rule.named())
        names = [rule.possible_names() for rule in firm] if is_object else []
        closed = [some for some in names if some is not None]
        self.possible = frozenset.intersection(*closed) if closed else None
        self.named_words = Words(name.encode(errors="surrogatepass") for name in self.named)
        self.is_plain = not any(r.patterns or r.additional or r.names for r in self.rules)

    def item(self, index: int) -> Links:
        """What is asked of an item of an array."""
        index = min(index, self._rules_after)
        if index not in self._item_links:
            self._item_links[index] = self._of_item(index)
        return self._item_links[index]

    def key(self, name: str) -> Links:
        """What is asked of a key of an object."""
        if name not in self._key_links:
            if len(self._key_links) >= MAX_REMEMBERED:
                self._key_links.clear()
            links = self._of_key(name)
            self._key_links[name] = self._same_links.setdefault(links.content, links)
        return self._key_links[name]

    def _of_item(self, index: int) -> Links:
        links = Links()
        for place, rule in enumerate(self.rules):
            if index < len(rule.prefix):
                asked, seen = rule.prefix[index], True
            else:
                asked, seen = (rule.items, rule.sees_items) if index >= rule.items_from else (None, False)
            if asked is not None:
                links.asked[place] = (links.attach(asked),)
            if seen and rule.looks:
                links.seen_by |= 1 << place
            if rule.contained is not None:
                links.contained[place] = links.attach(rule.contained)
            if rule.unevaluated_items is not None:
                links.unevaluated[place] = links.attach(rule.unevaluated_items)
        return links

    def _of_key(self, name: str) -> Links:
        links = Links()
        for place, rule in enumerate(self.rules):
            matching = [inner for pattern, inner in rule.patterns if found_in(pattern, name)]
            asked = [rule.properties.get(name), *matching]
            if rule.additional is not None and rule.is_additional(name):
                asked.append(rule.additional)
            places = tuple(dict.fromkeys(links.attach(inner) for inner in asked if inner is not None))
            if places:
                links.asked[place] = places
            if rule.looks and (rule.sees_keys or matching or name in rule.properties):
                links.seen_by |= 1 << place
            if rule.names is not None and not holds(rule.names, name):
                links.unnamed |= 1 << place
            if rule.unevaluated_properties is not None:
                links.unevaluated[place] = links.attach(rule.unevaluated_properties)
        return links


def _most(rule: Rule, is_object: bool) -> int | None:
    """How many keys or items a rule allows, as far as it says so itself."""
    found = [rule.most_keys if is_object else rule.most_items, *(_most(inner, is_object) for inner in rule.all_of)]
    return min((most for most in found if most is not None), default=None)


def _inner_first(attached: tuple[Rule, ...]) -> tuple[Rule, ...]:
    found: dict[Rule, None] = {}

    def visit(rule: Rule) -> None:
        if rule not in found:
            for inner in rule.inner():
                visit(inner)
            found[rule] = None

    for rule in attached:
        visit(rule)
    return tuple(found)


class Judge:
    """The layouts of all containers under one root rule."""

    __slots__ = ("_layouts", "root")

    def __init__(self, rule: Rule | None) -> None:
        self.root = Links()
        if rule is not None:
            self.root.attach(rule)
        self._layouts: dict[tuple[tuple[Rule, ...], bool, frozenset[Rule]], Layout] = {}

    def layout(self, attached: tuple[Rule, ...], is_object: bool, firm: frozenset[Rule] = frozenset()) -> Layout:
        """The layout of a container with these rules, of which the `firm` ones must hold."""
        key = (attached, is_object, firm)
        if key not in self._layouts:
            if len(self._layouts) >= MAX_REMEMBERED:
                self._layouts.clear()
            self._layouts[key] = Layout(attached, is_object, firm)
        return self._layouts[key]

    def start(self) -> Checker:
        """The beginning of a text."""
        return Checker(self, None, self.layout((), False))


_ANY_KEY = "\0"
_NO_KEYS: frozenset[str] = frozenset()
_NO_VALUES: frozenset[Canonical] = frozenset()
_NO_WORDS = Words()
_BRACKETS = ("[", "{")  # that canonical values of containers begin with


class Checker:
    """The innermost open container and, through `outer`, those around it; the outermost holds the text's one value.

    `count` items, or keys; the `name` of the last key and, until its value is complete, its `links`; `more`: a comma
    asks for another. `bad` rules, as bits, are those that a child has made false; `hits` the items that count, for each
    counting rule; `loose`, for children that somebody must look at, who has and whom it makes false otherwise; `seen`
    the items, those of them that are `containers`, and whether one was `repeated`; `key_words`, `strings` and `numbers`
    those that must not come again, as they are written. Where it `records`, `parts` are the values so far, the last one
    first.
    `answers`, `leading_on` and `rows` are for whoever asks it what may follow.
    """

    __slots__ = (
        "_alike",
        "_judge",
        "_left",
        "_refuses",
        "_verdicts",
        "answers",
        "bad",
        "containers",
        "count",
        "hits",
        "key_words",
        "keys",
        "layout",
        "leading_on",
        "links",
        "loose",
        "more",
        "name",
        "numbers",
        "outer",
        "parts",
        "records",
        "repeated",
        "rows",
        "seen",
        "strings",
    )

    def __init__(self, judge: Judge, outer: Checker | None, layout: Layout) -> None:
        self._judge = judge
        self.outer = outer
        self.layout = layout
        self.keys = _NO_KEYS
        self.key_words = _NO_WORDS
        self.count = 0
        self.name = ""
        self.links: Links | None = None
        self.more = False
        self.bad = 0
        self.hits: tuple[int, ...] = (0,) * len(layout.counting)
        self.loose: tuple[tuple[int, int], ...] = ()
        self.seen = _NO_VALUES
        self.containers = _NO_VALUES
        self.strings = _NO_WORDS
        self.numbers = _NO_WORDS
        self.repeated = False
        self.records: bool = layout.unique or (outer is not None and outer.records)
        self.parts: Any = None
        self._alike: dict[object, Checker | None] = {}
        self._refuses: dict[Kind, bool] = {}
        self.answers: dict[tuple[bytes, bool], bool] = {}
        self.leading_on: set[int] = set()
        self._left: Words | None = None
        self.rows: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
        self._verdicts: dict[tuple[tuple[Verdict, ...] | None, bool], tuple[Verdict, ...]] = {}

    # Events

    def begins(self, kind: Kind) -> Checker | None:
        """See `Watcher.begins`."""
        links = self._links()
        if kind is Kind.OBJECT or kind is Kind.ARRAY:
            firm = frozenset(self._firm(links)) if kind is Kind.OBJECT else frozenset()
            layout = self._judge.layout(links.attached, kind is Kind.OBJECT, firm)
            child = Checker(self._judge, self, layout)
            return child if child._may_be(None) else None
        return self if self._may_be(links.of_kind(kind)) else None

    def _firm(self, links: Links) -> Iterator[Rule]:
        """The rules of an object that begins which must hold, of those that say which keys there may be at all."""
        for index, rule in enumerate(links.attached):
            if rule.possible_names() is not None:
                broken = (*links.unknown[:index], False, *links.unknown[index + 1 :])
                if not self._may_be(broken):
                    yield rule

    def key(self, name: str) -> Checker | None:
        """See `Watcher.key`."""
        if name in self.keys:
            return None
        after = self._copy()
        after.keys = self.keys | {name}
        after.key_words = self.key_words.with_word(name.encode(errors="surrogatepass"))
        after.count += 1
        after.more = False
        after.name = name
        after.links = self.layout.key(name)
        after.bad |= after.links.unnamed
        return after if after._may_be(after.links.unknown) else None

    def scalar(self, value: Scalar) -> Checker | None:
        """See `Watcher.scalar`."""
        results = tuple(holds(rule, value) for rule in self._links().attached)
        after = self._with_child(results, canonical(value) if self.records else None)
        return after if after._may_be(None) else None

    def scalar_like(self, value: Scalar) -> Checker | None:
        """What `scalar` gives for this value or for another that is told apart neither by the rules nor by what has
        been there before: so it differs only in what is recorded."""
        results = tuple(holds(rule, value) for rule in self._links().attached)
        alike = (results, self.layout.unique and canonical(value) in self.seen)
        if alike not in self._alike:
            after = self._with_child(results, canonical(value) if self.records else None)
            self._alike[alike] = after if after._may_be(None) else None
        return self._alike[alike]

    def may_refuse(self, kind: Kind) -> bool:
        """Whether a string or number that has not been there before may be forbidden, as far as is seen: where all that
        its kind leaves open turns out false, or true."""
        if kind not in self._refuses:
            verdicts = self._links().of_kind(kind)
            for found in (False, True):
                after = self._with_child(tuple(found if v is None else v for v in verdicts), (_ANY_KEY,))
                self._refuses[kind] = self._refuses.get(kind, False) or not after._may_be(None)
        return self._refuses[kind]

    @property
    def knows_numbers(self) -> bool:
        """Whether `may_begin` sees by itself how a number may go on: where it only matters whether rules about
        multiples can still hold, not whether they can still fail."""
        rules = self._links().attached
        if self.layout.unique or not all(rule.span() for rule in rules):
            return False
        return self._with_child((True,) * len(rules), (_ANY_KEY,))._may_be(None)

    @property
    def looks_at_multiples(self) -> bool:
        """Whether it matters how a number begins that comes next, in this container."""
        return bool(self._links().divisors)

    def may_begin(self, number: str, known: int = 0) -> bool:
        """Whether a number that begins so may come next, where that is `known` of so many characters of it."""
        links = self._links()
        if not links.divisors:
            return True
        # Many tokens that hold several digits fail with their first.
        return all(self._may_be(links.of_number(number[:end])) for end in range(known + 1, len(number) + 1))

    def any_string(self) -> Checker | None:
        """What `scalar` gives for all strings that have not been there before, as far as nothing tells them apart; None
        where something may, or where it forbids them."""
        links = self._links()
        if self.records and (self.outer is not None and self.outer.records):
            return None
        verdicts = links.of_kind(Kind.STRING)
        if None in verdicts:
            return None
        alike = (verdicts, False)
        if alike not in self._alike:
            after = self._with_child(verdicts, ("any",) if self.records else None)
            self._alike[alike] = after if after._may_be(None) else None
        return self._alike[alike]

    def any_key(self) -> Checker | None:
        """What `key` gives for all keys that are not there yet and not named, as far as nothing tells them apart."""
        return self.key_like(_ANY_KEY) if self.layout.is_plain else None

    def key_like(self, name: str) -> Checker | None:
        """What `key` gives for this name or for another of which the rules ask the same."""
        if name in self.keys or name in self.layout.named:
            return self.key(name)
        alike = self.layout.key(name)
        if alike not in self._alike:
            self._alike[alike] = self.key(name)
        return self._alike[alike]

    def closes(self) -> Checker | None:
        """See `Watcher.closes`."""
        assert self.outer is not None
        results = self._judged(None, True)
        assert None not in results
        value = self.recorded() if self.outer.records else None
        after = self.outer._with_child(results, value)
        return after if after._may_be(None) else None

    def continues(self) -> Checker | None:
        """See `Watcher.continues`."""
        after = self._copy()
        after.more = True
        if not self.layout.rules:
            return after
        if self.layout.is_object and not after.has_key_left(b""):
            return None
        item = None if self.layout.is_object else after._links().unknown
        return after if after._may_be(item) else None

    def has_key_left(self, beginning: bytes) -> bool:
        """Whether a key that begins so may still come, as far as it is known which keys there may be at all."""
        if self.layout.possible is None:
            return True
        if self._left is None:
            names = self.layout.possible - self.keys
            if len(self.layout.rules) > 1 and len(names) <= MAX_TRIED:
                names = frozenset(name for name in names if self.key(name) is not None)
            self._left = Words(name.encode(errors="surrogatepass") for name in names)
        return self._left.any_begins(beginning)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked of what stands in the innermost container."""
        return not (self._judge.root.attached if self.outer is None else self.layout.rules)

    @property
    def is_watched(self) -> bool:
        """Whether anything is asked of the text at all, so that the end of an idle container may matter."""
        return bool(self._judge.root.attached)

    # What has been written

    def _copy(self) -> Checker:
        copy = Checker.__new__(Checker)
        copy._judge = self._judge
        copy.outer = self.outer
        copy.layout = self.layout
        copy.keys = self.keys
        copy.key_words = self.key_words
        copy.count = self.count
        copy.name = self.name
        copy.links = self.links
        copy.more = self.more
        copy.bad = self.bad
        copy.hits = self.hits
        copy.loose = self.loose
        copy.seen = self.seen
        copy.containers = self.containers
        copy.strings = self.strings
        copy.numbers = self.numbers
        copy.repeated = self.repeated
        copy.records = self.records
        copy.parts = self.parts
        copy._verdicts = {}
        copy._alike = {}
        copy._refuses = {}
        copy.answers = {}
        copy.leading_on = set()
        copy._left = None
        copy.rows = None
        return copy

    def _links(self) -> Links:
        """What is asked of the value that is next, or open."""
        if self.outer is None:
            return self._judge.root
        if self.links is not None:
            return self.links
        return self.layout.item(self.count)

    def _with_child(self, results: tuple[Verdict, ...], value: Canonical) -> Checker:
        """The container with one more child, of which its attached rules say `results`."""
        links = self._links()
        after = self._copy()
        after.links = None
        after.more = False
        if self.outer is None:
            after.bad = int(False in results)
            return after
        if not self.layout.is_object:
            after.count += 1
        if self.records:
            after.parts = (self.parts, (self.name, value) if self.layout.is_object else value)
        for place, children in links.asked.items():
            if any(results[child] is False for child in children):
                after.bad |= 1 << place
        seen_by = links.seen_by
        if links.contained:
            hits = list(self.hits)
            for place, child in links.contained.items():
                if results[child]:
                    hits[self.layout.counting[place]] += 1
                    if self.layout.rules[place].sees_contained:
                        seen_by |= 1 << place
            after.hits = tuple(hits)
        failing = sum(1 << place for place, child in links.unevaluated.items() if results[child] is False)
        if failing and (seen_by, failing) not in self.loose:
            after.loose = (*self.loose, (seen_by, failing))
        if self.layout.unique:
            after.repeated = self.repeated or value in self.seen
            after.seen = self.seen | {value}
            if isinstance(value, str):
                after.strings = self.strings.with_word(value.encode(errors="surrogatepass"))
            elif isinstance(value, tuple) and value[0] in _BRACKETS:
                after.containers = self.containers | {value}
            elif isinstance(value, Decimal):
                after.numbers = self.numbers.with_word(spelling(value).encode())
                if not value:
                    after.numbers = after.numbers.with_word(b"-0")
        return after

    def recorded(self) -> tuple[Any, ...]:
        """The value of a container, as far as its items are complete."""
        found = []
        parts = self.parts
        while parts is not None:
            parts, part = parts
            found.append(part)
        return ("{", frozenset(found)) if self.layout.is_object else ("[", *reversed(found))

    # What it means

    def _may_be(self, child: tuple[Verdict, ...] | None) -> bool:
        """Whether the whole value may still be true, where this is known of the open child, if there is one."""
        container = self
        while container.outer is not None:
            if not container.layout.rules:
                return True  # nobody asks: what has been true before still is
            child = container._judged(child, False)
            container = container.outer
        return not container.bad and (child is None or False not in child)

    def _judged(self, child: tuple[Verdict, ...] | None, closed: bool) -> tuple[Verdict, ...]:
        """What the attached rules say of the container, with what is known of the open child."""
        key = (child, closed)
        if key not in self._verdicts:
            verdicts: list[Verdict] = []
            for place, rule in enumerate(self.layout.rules):
                verdicts.append(self._verdict(place, rule, verdicts, child, closed))
            own = [verdicts[place] for place in self.layout.own]
            if child is None and not closed and not self.more:
                # Where a rule allows no more keys or items, it holds only if it holds of what there is.
                for index, most in enumerate(self.layout.most):
                    if most is not None and self.count >= most and self._judged(None, True)[index] is False:
                        own[index] = False
            self._verdicts[key] = tuple(own)
        return self._verdicts[key]

    def _verdict(
        self,
        place: int,
        rule: Rule,
        verdicts: list[Verdict],
        child: tuple[Verdict, ...] | None,
        closed: bool,
    ) -> Verdict:
        """What one rule says; `verdicts` are those of the rules before it."""
        if self.layout.never[place] or self.bad >> place & 1:
            return False
        verdict = self._of_child(place, child)
        if verdict is not False:
            own = self._of_keys(rule, closed) if self.layout.is_object else self._of_items(place, rule, child, closed)
            verdict = _and(verdict, own)
        if verdict is not False:
            verdict = _and(verdict, _combined(rule, lambda inner: verdicts[self.layout.place[inner]]))
        if verdict is not False and self.layout.is_object:
            for name, inner in rule.dependent_rules:
                if name in self.keys:
                    verdict = _and(verdict, verdicts[self.layout.place[inner]])
                elif not closed and verdicts[self.layout.place[inner]] is not True:
                    verdict = _and(verdict, None)
        if verdict is not False and self.layout.tracks:
            verdict = _and(verdict, self._of_what_is_left(place, rule, verdicts, child, closed))
        return verdict

    def _of_child(self, place: int, child: tuple[Verdict, ...] | None) -> Verdict:
        """What a rule says of the open child alone."""
        if child is None:
            return True
        verdict: Verdict = True
        for index in self._links().asked.get(place, ()):
            verdict = _and(verdict, child[index])
        return verdict

    def _of_keys(self, rule: Rule, closed: bool) -> Verdict:
        """What a rule says of the keys of an object."""
        count = self.count + self.more
        missing = sum(name not in self.keys for name in rule.required)
        if rule.most_keys is not None and count + missing - (self.more and missing > 0) > rule.most_keys:
            return False
        if missing or count < rule.least_keys:
            return False if closed else None
        verdict: Verdict = True
        if not closed:
            more_asked = rule.patterns or rule.additional is not None or rule.names is not None
            if (
                more_asked
                or rule.most_keys is not None
                or any(inner is not None and name not in self.keys for name, inner in rule.properties.items())
            ):
                verdict = None
        for name, needed in rule.dependent:
            if name in self.keys:
                if any(other not in self.keys for other in needed):
                    return False if closed else None
            elif not closed:
                verdict = None
        return verdict

    def _of_items(self, place: int, rule: Rule, child: tuple[Verdict, ...] | None, closed: bool) -> Verdict:
        """What a rule says of how many items there are, and which."""
        count = self.count + (child is not None or self.more)
        if rule.most_items is not None and count > rule.most_items:
            return False
        if rule.unique and self.repeated:
            return False
        verdict: Verdict = True
        if count < rule.least_items:
            if closed:
                return False
            verdict = None
        if rule.contained is not None:
            verdict = _and(verdict, self._of_hits(place, rule, child, closed))
        if not closed:
            asked = rule.items is not None or any(inner is not None for inner in rule.prefix[self.count :])
            if asked or rule.unique or rule.most_items is not None:
                verdict = _and(verdict, None)
        return verdict

    def _of_hits(self, place: int, rule: Rule, child: tuple[Verdict, ...] | None, closed: bool) -> Verdict:
        """What a rule says of how many items count."""
        hits = self.hits[self.layout.counting[place]]
        hit = False if child is None else child[self._links().contained[place]]
        if rule.most_contained is not None and hits + (hit is True) > rule.most_contained:
            return False
        if hits + (hit is True) < rule.least_contained:
            room = (
                None if rule.most_items is None else rule.most_items - self.count - (hit is False and child is not None)
            )
            if closed or (room is not None and hits + room < rule.least_contained):
                return False
            return None
        return True if closed or rule.most_contained is None else None

    def _of_what_is_left(
        self,
        place: int,
        rule: Rule,
        verdicts: list[Verdict],
        child: tuple[Verdict, ...] | None,
        closed: bool,
    ) -> Verdict:
        """What a rule says of the items or keys that no other one has looked at."""
        inner = rule.unevaluated_properties if self.layout.is_object else rule.unevaluated_items
        if inner is None:
            return True
        verdict: Verdict = True if closed else None
        loose = list(self.loose)
        if child is not None:
            links = self._links()
            if child[links.unevaluated[place]] is False and not links.contained:
                loose.append((links.seen_by, 1 << place))
        for seen_by, failing in loose:
            if failing >> place & 1:
                verdict = _and(verdict, self._sees(rule, seen_by, verdicts, closed))
        return verdict

    def _sees(self, rule: Rule, seen_by: int, verdicts: list[Verdict], closed: bool) -> Verdict:
        """Whether a rule, or one that holds and that it is made of, has looked at a child."""
        place = self.layout.place
        if seen_by >> place[rule] & 1:
            return True

        def both(inner: Rule) -> Verdict:
            holding = verdicts[place[inner]]
            if holding is False:
                return False
            looks_at_rest = (
                inner.unevaluated_properties if self.layout.is_object else inner.unevaluated_items
            ) is not None
            return _and(holding, True if looks_at_rest else self._sees(inner, seen_by, verdicts, closed))

        found: Verdict = False
        for inner in (*rule.all_of, *(option for options in rule.any_of for option in options), *(rule.one_of or ())):
            found = _or(found, both(inner))
        if rule.condition is not None:
            condition = verdicts[place[rule.condition]]
            found = _or(found, both(rule.condition))
            if rule.then is not None:
                found = _or(found, _and(condition, both(rule.then)))
            if rule.otherwise is not None:
                found = _or(found, _and(_not(condition), both(rule.otherwise)))
        for name, inner in rule.dependent_rules:
            if name in self.keys:
                found = _or(found, both(inner))
            elif not closed:
                found = _or(found, _and(None, both(inner)))
        return found
