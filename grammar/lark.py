"""From shapes to a grammar in llguidance's Lark notation: objects, arrays, and one terminal for all the scalars of a
place. What a shape's tests ask for is written exactly or refused, with the keyword's pointer. Knows no schema.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specdec.grammar import numbers, patterns
from specdec.grammar.lowering import Lowering, bounds, is_plain
from specdec.grammar.shapes import (
    ANY,
    FULL,
    NONE,
    Among,
    Array,
    Boolean,
    Child,
    Count,
    Either,
    Everything,
    Fits,
    Integral,
    Length,
    MultipleOf,
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
    is_full,
    passes,
)
from specdec.grammar.spelling import Spelling

MAX_CHILDREN = 3_000
MAX_COUNTED = 2_000  # rules of one object or array whose keys or items are counted
MAX_ATOMS = 6  # tests that tell the keys of one object apart
MAX_PERMUTED = 6
MAX_DEPTH_COUNTED = 4  # of values inside others whose number is counted
EXPLORE_FUEL = 4_000_000  # about 0.2 s of CPU; twice what a step of a text has, as NUL is looked for too
MAX_SOME = 4  # rules of which each must be used by some key of one object


class Refused(Exception):
    """What cannot be written, all of it, where some of it is final."""

    def __init__(self, refusals: Iterable[Refusal]) -> None:
        self.refusals = sorted(set(refusals), key=lambda refusal: refusal.pointer)
        super().__init__("; ".join(f"{r.pointer}: {r.reason}" for r in self.refusals))


class Unsatisfiable(Exception):
    """No value is allowed."""


class TooLarge(Exception):
    """The grammar would be larger than its budget."""


def structure(whitespace: str | None) -> str:
    """The terminals between the values of a grammar that `write` made. `whitespace` is a regular expression for what
    may stand on either side of them, once; None for nothing."""
    blank = f"({whitespace})?" if whitespace else ""
    sides = {"COMMA": (",", blank, blank), "COLON": (":", blank, blank)}
    sides |= {"OBRACE": ("{", "", blank), "CBRACE": ("}", blank, "")}
    sides |= {"OBRACKET": ("[", "", blank), "CBRACKET": ("]", blank, "")}
    sides |= {"NOBRACE": ("}", "", ""), "NOBRACKET": ("]", "", "")}  # with nothing between: one blank is enough
    return "".join(
        f"{name}: /{before}{patterns.literal(sign)}{after}/\n" for name, (sign, before, after) in sides.items()
    )


@dataclass(frozen=True, slots=True)
class Freedom:
    """What texts choose that a grammar does not name: keys that may repeat where there are `open_keys`. Objects may run
    out of them where there are `tight_keys`, and arrays of items that are new where there are `tight_items`. Some value
    may be spelled in only a few ways where there are `tight_values`. Keys that are named come in `any_order`, or in
    one."""

    open_keys: bool = False
    tight_keys: bool = False
    tight_items: bool = False
    tight_values: bool = False
    any_order: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """A grammar without the terminals of `structure`. It allows all that it should, and more where it leaves something
    out: the keywords of `unsaid`, and that no key comes twice where there are open keys."""

    text: str
    unsaid: Residue
    freedom: Freedom


def write(lowering: Lowering, root: Child, *, any_order: bool = False) -> Written:
    """The grammar of what `root` allows. With keys in any order, all of an object may come and may be missing, and come
    again. Raises `Refused`, `Unsatisfiable`, `TooLarge`."""
    writer = _Writer(lowering, any_order)
    writer.reach(root)
    return writer.written(root)


class _Writer:
    def __init__(self, lowering: Lowering, any_order: bool) -> None:
        self._lowering = lowering
        self._any_order = any_order
        self._spelling = lowering.spelling
        self._any_string = f"/\\x{{22}}({lowering.spelling.anything})\\x{{22}}/"
        self._unions: dict[Child, Union] = {}
        self._productive: set[Child] = set()
        self._plans: dict[Object, _Keys] = {}
        self._lines: list[str] = []
        self._symbols: dict[Child, str] = {}
        self._terminals: dict[str, str] = {}
        self._refusals: set[Refusal] = set()
        self._any_used = False
        self._names = itertools.count()
        self._has_open_keys = False
        self._has_tight_keys = False
        self._has_tight_items = False

    # What can be written at all

    def reach(self, root: Child) -> None:
        """Look at every child that a value may hold, and find those that some finite value satisfies."""
        pending = [root]
        while pending:
            child = pending.pop()
            if child in self._unions:
                continue
            if len(self._unions) >= MAX_CHILDREN:
                raise TooLarge(f"has more than {MAX_CHILDREN} different parts")
            self._unions[child] = self._lowering.node(child)
            for shape in self._unions[child]:
                pending.extend(self._children(shape))
        changed = True
        while changed:
            changed = False
            for child, union in self._unions.items():
                if child not in self._productive and any(map(self._can_be, union)):
                    self._productive.add(child)
                    changed = True

    def _children(self, shape: Shape) -> list[Child]:
        match shape:
            case Array():
                found = [*shape.prefix, shape.items]
                counts = _ordered(shape.counts)
                if counts and self._num_states(shape, counts) <= MAX_COUNTED:
                    for place in range(_last_place(shape, counts) + 1):
                        found.extend(child for child, _ in _choices(shape, counts, place))
                return found
            case Object():
                keys = self._keys(shape)
                found = [child for _, child in keys.named]
                found += [child for _, child in keys.cells]
                if shape.some and len(shape.some) <= MAX_SOME:
                    found += self._children_of_some(shape)
                return found
        return []

    def _children_of_some(self, shape: Object) -> list[Child]:
        """What a key may hold that meets rules of `some`, whichever of them."""
        keys, found = self._keys(shape), list[Child]()
        for chosen in _subsets(range(len(shape.some))):
            rules = [_ordered_rules(shape)[at] for at in chosen]
            among = frozenset[tuple[Any, bool]]().union(*(tests for tests, _, _ in rules))
            both = frozenset[tuple[Any, bool]]().union(*(child for _, child, _ in rules))
            found += [value | both for name, value in keys.named if passes(among, name, self._lowering.holds)]
            found += [value | both for _, value in self._cells(shape, keys, among)]
        return found

    def _can_be(self, shape: Shape) -> bool:
        """Whether a finite value has the shape, by what is known so far."""
        match shape:
            case String():
                return derives(self._string(shape))
            case Number():
                return _has_multiple(shape) if _divisors(shape) else derives(self._number(shape))
            case Array():
                length = self._longest(shape)
                if length is not None and length < shape.least:
                    return False
                counts = _ordered(shape.counts)
                if not counts or self._num_states(shape, counts) > MAX_COUNTED:
                    return True
                return any(_is_end(state, shape, counts) for state in self._counting(shape, counts))
            case Object():
                return self._can_be_object(shape)
            case _:
                return True

    def _can_be_object(self, shape: Object) -> bool:
        keys = self._keys(shape)
        named = {name for name, child in keys.named if child in self._productive}
        if not all(name in named for name in shape.required):
            return False
        is_open = any(child in self._productive for _, child in keys.cells)
        if not is_open and len(named) < shape.least:
            return False
        if shape.most is not None and shape.most < max(shape.least, len(shape.required)):
            return False
        if not shape.some or self._num_key_states(shape) > MAX_COUNTED:
            return True
        *_, last = self._key_layers(shape)
        return any(self._can_end(shape, state) for state in last)

    def _num_states(self, shape: Array, counts: Sequence[Count]) -> int:
        """A bound on what `_counting` takes."""
        longest = self._longest(shape)
        length = _last_place(shape, counts) if longest is None else longest
        return (length + 1) * _product(2 * (_cap(count) + 1) for count in counts)

    def _counting(self, shape: Array, counts: Sequence[Count]) -> dict[_State, list[tuple[_State, Child]]]:
        """The states of an array being written, each with those before it and the item between: how many items there
        are (up to where it makes no difference), and how many of them count."""
        longest, last = self._longest(shape), _last_place(shape, counts)
        start: _State = (0, (0,) * len(counts))
        found: dict[_State, list[tuple[_State, Child]]] = {start: []}
        pending = [start]
        while pending:
            state = pending.pop()
            length, hits = state
            if longest is not None and length >= longest:
                continue
            for child, counted in _choices(shape, counts, min(length, last)):
                if child not in self._productive:
                    continue
                totals = tuple(hit + more for hit, more in zip(hits, counted, strict=True))
                if any(c.most is not None and total > c.most for c, total in zip(counts, totals, strict=True)):
                    continue
                size = length + 1 if longest is not None else min(length + 1, last)
                after = (size, tuple(min(total, _cap(c)) for c, total in zip(counts, totals, strict=True)))
                if after not in found:
                    found[after] = []
                    pending.append(after)
                found[after].append((state, child))
        return found

    def _longest(self, shape: Array) -> int | None:
        """How many items there may be; None for no bound."""
        longest = shape.most
        for index, child in enumerate((*shape.prefix, shape.items)):
            if child not in self._productive:
                longest = index if longest is None else min(index, longest)
                break
        if shape.unique:
            count = self._count(shape.items, MAX_DEPTH_COUNTED)
            if count is not None:  # those of the prefix may be others
                most = len(shape.prefix) + count
                longest = most if longest is None else min(most, longest)
        return longest

    def _count(self, child: Child, depth: int) -> int | None:
        """How many values a child allows, or more than that; None where they are not known to be finite."""
        total = 0
        for shape in self._unions.get(child, FULL) if depth else FULL:
            count = self._count_of(shape, depth)
            if count is None:
                return None
            total += count
        return total

    def _count_of(self, shape: Shape, depth: int) -> int | None:
        match shape:
            case Null():
                return 1
            case Boolean():
                return len(shape.values)
            case Number() | String():
                lists = [len(test.values) for test, expected in shape.tests if expected and isinstance(test, Among)]
                if lists or isinstance(shape, String):
                    return min(lists, default=None)
                low, high = bounds(shape.tests)
                if low is None or high is None or (Integral(), True) not in shape.tests:
                    return None
                first, last = numbers.integers_between(*low, *high)
                return max(0, int(last - first) + 1)
            case Object():
                keys = self._keys(shape)
                if any(child in self._productive for _, child in keys.cells):
                    return None
                counts = [
                    (self._count(child, depth - 1), name in shape.required)
                    for name, child in keys.named
                    if child in self._productive
                ]
                if any(count is None for count, _ in counts):
                    return None
                return _product((count or 0) + (not needed) for count, needed in counts)
        return 1 if shape.most == 0 else None

    # The text

    def written(self, root: Child) -> Written:
        if root not in self._productive:
            raise Unsatisfiable
        start = self._symbol(root)
        if any(refusal.final for refusal in self._refusals):
            raise Refused(self._refusals)
        lines = [f"start: {start}", *self._lines, *(f"{name}: {body}" for body, name in self._terminals.items())]
        if self._any_used:
            self._has_open_keys = True
            scalar = " | ".join(("/null|true|false/", numbers.ANY_NUMBER, "STRING"))
            lines += [f"STRING: {self._any_string}", f"SCALAR: {scalar}"]
            array = self._enclosed("[", ["any (COMMA any)*"], True)
            object_ = self._enclosed("{", ["pair (COMMA pair)*"], True)
            lines += [f"any: SCALAR | {array} | {object_}"]
            lines += ["pair: STRING COLON any"]
        text = "\n".join(lines) + "\n"
        freedom = Freedom(
            open_keys=self._has_open_keys,
            tight_keys=self._has_tight_keys,
            tight_items=self._has_tight_items,
            tight_values=any(map(_has_few_scalars, self._unions.values())),
            any_order=self._any_order,
        )
        return Written(text, frozenset(self._refusals), freedom)

    def _symbol(self, child: Child) -> str:
        """The rule or terminal of a child."""
        if child not in self._symbols:
            union = self._unions[child]
            if is_full(union):
                self._any_used = True
                self._symbols[child] = "any"
                return "any"
            for shape in union:
                if self._can_be(shape):
                    self._refusals.update(shape.residue)
            scalars = [self._scalar(shape) for shape in union if not _is_rule(shape)]
            bodies = [body for body in scalars if body is not None]
            containers = [shape for shape in union if _is_rule(shape) and self._can_be(shape)]
            if not containers and bodies:
                self._symbols[child] = self._terminal(" | ".join(bodies))
                return self._symbols[child]
            name = self._symbols[child] = self._name("v")
            options = [self._terminal(" | ".join(bodies))] if bodies else []
            options += [self._container(shape) for shape in containers]
            if all(option is None for option in options):
                raise Unsatisfiable
            self._rule(name, options)
        return self._symbols[child]

    def _container(self, shape: Shape) -> str:
        match shape:
            case Array():
                return self._array(shape)
            case Object():
                return self._object(shape)
            case Number():
                return self._multiples(shape)
        raise AssertionError(shape)

    def _enclosed(self, bracket: str, bodies: Sequence[str], may_be_empty: bool) -> str:
        """The alternatives of an object or array, by what may stand between its brackets."""
        name = "BRACE" if bracket == "{" else "BRACKET"
        options = [f"O{name} ({' | '.join(bodies)}) C{name}"] if bodies else []
        options += [f"O{name} NO{name}"] if may_be_empty else []
        return " | ".join(options) if options else f"O{name} {self._terminal(patterns.NOTHING)}"

    def _name(self, letter: str) -> str:
        return f"{letter}{next(self._names)}"

    def _rule(self, name: str, options: Sequence[str]) -> str:
        self._lines.append(f"{name}: " + " | ".join(dict.fromkeys(options)))
        return name

    def _terminal(self, body: str) -> str:
        if body not in self._terminals:
            self._terminals[body] = self._name("T")
        return self._terminals[body]

    # Scalars

    def _scalar(self, shape: Shape) -> str | None:
        """The terminal expression of a scalar shape; None where it is empty."""
        match shape:
            case Null():
                return "/null/"
            case Boolean():
                return "/" + "|".join(sorted(str(value).lower() for value in shape.values)) + "/"
            case Number():
                body = self._number(shape)
            case String():
                body = self._string(shape)
            case _:
                raise AssertionError(shape)
        return body if derives(body) else None

    def _string(self, shape: String) -> str:
        if not shape.tests:
            return self._any_string
        return f"/\\x{{22}}/ {self._contents(shape.tests)} /\\x{{22}}/"

    def _contents(self, tests: Tests) -> str:
        """The terminal expression of the string contents that pass all tests."""
        parts: list[str] = []
        least, most = 0, None
        negative: list[str] = []
        for test, expected in sorted(tests, key=repr):
            match test:
                case Length():
                    if expected:
                        least = max(least, test.least)
                    else:
                        most = test.least - 1 if most is None else min(most, test.least - 1)
                case Everything():
                    if not expected:
                        parts.append(patterns.NOTHING)
                case Among():
                    values = "|".join(patterns.literal(self._spelling.escaped(value)) for value in sorted(test.values))
                    (parts if expected else negative).append(f"/({values})/" if test.values else patterns.NOTHING)
                case Pattern():
                    (parts if expected else negative).append(patterns.content_expression(test.pattern, self._spelling))
                case Fits():
                    (parts if expected else negative).append(self._fitting(test.child))
        if least or most is not None:
            parts.insert(0, patterns.length_expression(least, most, self._spelling))
        if not parts:
            parts.append(f"/{self._spelling.anything}/")
        body = "(" + " & ".join([*parts, *(f"~({body})" for body in negative)]) + ")"
        if "~" in body and not can_be_explored(body):
            bound = max(least, 0 if most is None else most + 1)
            pointer = self._lowering.lengths.get(bound, "a pattern")
            raise TooLarge(f"{pointer}: with what the string must not match, it takes too many states")
        return body

    def _fitting(self, child: Child) -> str:
        """The contents of the strings that a child allows."""
        shapes = [shape for shape in self._lowering.node(child) if isinstance(shape, String)]
        for shape in shapes:
            self._refusals.update(shape.residue)
        return "(" + " | ".join(self._contents(shape.tests) for shape in shapes) + ")" if shapes else patterns.NOTHING

    def _number(self, shape: Number) -> str:
        """Numbers without exponents, unless nothing is asked of them."""
        if not shape.tests:
            return numbers.ANY_NUMBER
        integral = (Integral(), True) in shape.tests
        parts = [numbers.ANY_INTEGER if integral else numbers.PLAIN_NUMBER]
        low, high = bounds(shape.tests)
        if low is not None:
            parts.append(numbers.at_least(*low, integral))
        if high is not None:
            parts.append(numbers.at_most(*high, integral))
        if (low or high) and not integral:
            parts.append(numbers.SHORT_NUMBER)
        for test, expected in sorted(shape.tests, key=repr):
            match test:
                case Among() if expected:
                    return (
                        "/("
                        + "|".join(patterns.literal(numbers.spelling(value)) for value in sorted(test.values))
                        + ")/"
                    )
                case Among():
                    parts += [f"~{numbers.equal(value)}" for value in sorted(test.values)]
                case Integral() if not expected:
                    parts.append(r"~/-?[0-9]+(\.0+)?/")
                case MultipleOf():
                    self._refusals.update(shape.doubts)
        return "(" + " & ".join(parts) + ")"

    def _multiples(self, shape: Number) -> str:
        """Multiples of a number: the one thing that terminals cannot say and the backend's own schemas can."""
        divisor = functools.reduce(numbers.common_decimal, _divisors(shape))
        integral = (Integral(), True) in shape.tests
        if integral:
            divisor = numbers.common_decimal(divisor, Decimal(1))
        schema: dict[str, Any] = {"type": "integer" if integral else "number", "multipleOf": float(divisor)}
        if divisor == divisor.to_integral_value():
            schema |= {"type": "integer", "multipleOf": int(divisor)}
        low, high = bounds(shape.tests)
        exact = numbers.is_small_divisor(divisor)
        for bound, name in ((low, "inimum"), (high, "aximum")):
            if bound is None:
                continue
            value, exclusive = bound
            number = int(value) if value == value.to_integral_value() else float(value)
            exact = exact and abs(value) < 1 << 53 and Decimal(str(number)) == value
            schema[f"exclusiveM{name}" if exclusive else f"m{name}"] = number
        for test, expected in shape.tests:
            exact = exact and is_plain(test, expected)
        body = f"%json {json.dumps(schema)}"
        if not exact or not is_taken(body):  # as doubles, some divisors have more digits than the backend takes
            self._refusals.update(shape.doubts)
            return self._terminal(self._checked_multiple(shape, divisor))
        return self._rule(self._name("m"), [body])

    def _checked_multiple(self, shape: Number, divisor: Decimal) -> str:
        """What a check makes multiples of: short, so that it is made to end in time."""
        tests = frozenset((test, expected) for test, expected in shape.tests if not isinstance(test, MultipleOf))
        if divisor == divisor.to_integral_value():
            tests |= {(Integral(), True)}
        body = numbers.PLAIN_NUMBER if not tests else self._number(replace(shape, tests=tests))
        limits = [abs(bound[0]) for bound in bounds(tests) if bound is not None]
        if all(limit < 10 ** (numbers.MULTIPLE_LENGTH - 4) for limit in limits):
            body = f"({body} & /-?[0-9.]{{1,{numbers.MULTIPLE_LENGTH}}}/)"
        return body

    # Arrays

    def _array(self, shape: Array) -> str:
        counts = _ordered(shape.counts)
        longest = self._longest(shape)
        if shape.unique and (longest is None or longest > 1):
            permuted = self._permuted(shape, longest)
            if permuted is not None and not counts:
                return permuted
            self._refusals.update(shape.unique)
            items = (*shape.prefix, shape.items)
            self._has_tight_items = self._has_tight_items or any(_is_tight(self._unions.get(c, FULL)) for c in items)
        if counts and self._num_states(shape, counts) <= MAX_COUNTED:
            return self._counted_array(shape, counts)
        if counts:
            self._refusals.update(shape.doubts)
        return self._plain_array(shape, longest)

    def _plain_array(self, shape: Array, longest: int | None) -> str:
        size = len(shape.prefix) if longest is None else min(len(shape.prefix), longest)
        least, most = shape.least, longest
        if most == 0:
            return self._enclosed("[", [], True)
        if size == 0:
            item = self._symbol(shape.items)
            rest = _repeat(f"COMMA {item}", max(0, least - 1), None if most is None else most - 1)
            return self._enclosed("[", [f"{item} {rest}"], not least)
        tail = ""
        if most is None or most > size:
            item = self._symbol(shape.items)
            tail = _repeat(f"COMMA {item}", max(0, least - size), None if most is None else most - size)
        for index in range(size - 1, 0, -1):
            tail = self._rule(self._name("r"), [f"COMMA {self._symbol(shape.prefix[index])} {tail}"])
            if index >= least:
                tail += "?"
        return self._enclosed("[", [f"{self._symbol(shape.prefix[0])} {tail}"], not least)

    def _counted_array(self, shape: Array, counts: Sequence[Count]) -> str:
        """A left-linear grammar over how many items there are and how many of them count."""
        states = self._counting(shape, counts)
        names = {state: self._name("q") for state in states}
        for (length, hits), before in states.items():
            options = [] if length or any(hits) else [""]
            for state, child in before:
                options.append(f"{names[state]} {'COMMA ' if state[0] else ''}{self._symbol(child)}")
            self._rule(names[length, hits], options)
        ends = [state for state in names if _is_end(state, shape, counts)]
        return self._enclosed("[", [names[state] for state in ends if state[0]], any(not state[0] for state in ends))

    def _permuted(self, shape: Array, longest: int | None) -> str | None:
        """Different items out of a few scalars, by which of them have been used; None where there are too many."""
        values = self._permutable(shape)
        if values is None:
            return None
        longest = len(values) if longest is None else min(longest, len(values))
        names = {frozenset[int](): self._name("u")}
        self._rule(names[frozenset()], [""])
        everything: list[tuple[frozenset[int], str]] = [(frozenset(), names[frozenset()])]
        for size in range(1, longest + 1):
            for used in map(frozenset, itertools.combinations(range(len(values)), size)):
                comma = "COMMA " if size > 1 else ""
                names[used] = self._rule(
                    self._name("u"),
                    [f"{names[used - {i}]} {comma}{self._terminal(f'/{values[i]}/')}" for i in sorted(used)],
                )
                everything.append((used, names[used]))
        ends = [name for used, name in everything if len(used) >= max(1, shape.least)]
        return self._enclosed("[", ends, not shape.least)

    def _permutable(self, shape: Array) -> list[str] | None:
        """The few scalars that an array's items are out of, as regular expressions; None where they are not few."""
        if shape.prefix or shape.items not in self._unions:
            return None
        values = _few_scalars(self._unions[shape.items], self._spelling)
        return None if values is None or len(values) > MAX_PERMUTED else values

    # Objects

    def _keys(self, shape: Object) -> _Keys:
        if shape not in self._plans:
            self._plans[shape] = self._plan(shape)
        return self._plans[shape]

    def _plan(self, shape: Object) -> _Keys:
        """The keys that are named, in order, and the cells that all others fall into."""
        names = dict.fromkeys(name for name, _ in shape.named)
        names.update(dict.fromkeys(shape.required))
        rules = [(tests, child) for tests, child in shape.rules if child != ANY]
        conditions = [tests for tests, _ in rules] + [tests for tests, _, _ in shape.some]
        # Conditions stand in no order, and what is written must not depend on how sets are.
        listed = {name for tests in conditions for test, _ in tests for name in self._listed(test) or ()}
        names.update(dict.fromkeys(sorted(listed, key=self._mention)))
        named = [(name, child_of(shape, name, self._lowering.holds)) for name in names]
        return _Keys(tuple(named), tuple(self._cells(shape, _Keys(tuple(named), ()), frozenset())))

    def _mention(self, name: str) -> tuple[int, str]:
        """Where a name comes among others: in the order of the schema's enums."""
        return self._lowering.mentioned.get(name, len(self._lowering.mentioned)), name

    def _listed(self, test: Any) -> frozenset[str] | None:
        """The strings that pass a test, where they are listed."""
        if isinstance(test, Among):
            return test.values
        if isinstance(test, Fits):
            values: frozenset[str] = frozenset()
            for shape in self._lowering.node(test.child):
                if isinstance(shape, String):
                    lists = [t.values for t, expected in shape.tests if expected and isinstance(t, Among)]
                    if len(lists) != 1 or len(shape.tests) != 1:
                        return None
                    values |= lists[0]
            return values
        return None

    def _cells(self, shape: Object, keys: _Keys, among: Tests) -> list[tuple[str, Child]]:
        """The keys that are not named and pass the tests `among`, by what their values must be."""
        rules = [(self._open(tests), child) for tests, child in shape.rules if child != ANY]
        wanted = self._open(among)
        if wanted is None:
            return []
        live = [(tests, child) for tests, child in rules if tests is not None]
        atoms = sorted({test for tests, _ in live for test, _ in tests} | {test for test, _ in wanted}, key=repr)
        if len(atoms) > MAX_ATOMS:
            self._refusals.update(shape.doubts - self._counts(shape))
            return [(f"/\\x{{22}}/ {self._contents(_none_of(keys))} /\\x{{22}}/", ANY)]
        groups: dict[Child, list[tuple[bool, ...]]] = {}
        for truth in itertools.product((True, False), repeat=len(atoms)):
            facts = dict(zip(atoms, truth, strict=True))
            if any(facts[test] is not expected for test, expected in wanted):
                continue
            child: Child = ANY
            for tests, value in live:
                if all(facts[test] is expected for test, expected in tests):
                    child |= value
            if child & NONE:
                continue
            groups.setdefault(child, []).append(truth)
        taken = _none_of(keys)
        cells = []
        for child, truths in groups.items():
            places = _relevant(truths, len(atoms))
            bodies = {
                self._contents(frozenset((atoms[place], truth[place]) for place in places) | taken): None
                for truth in truths
            }
            body = f"/\\x{{22}}/ ({' | '.join(bodies)}) /\\x{{22}}/"
            if derives(body):
                self._has_tight_keys = self._has_tight_keys or any(
                    self._may_bound(atoms[place], truth[place]) for truth in truths for place in places
                )
                cells.append((body, child))
        return cells

    def _may_bound(self, test: Any, expected: bool) -> bool:
        """Whether there may be a beginning of a key that few strings which pass a test go on with. Not certain: what is
        missed costs no more than a text that runs out of keys."""
        match test:
            case Length():
                return not expected
            case Pattern():
                return expected and "$" in test.pattern
            case Fits():
                shapes = [shape for shape in self._lowering.node(test.child) if isinstance(shape, String)]
                return any(
                    self._may_bound(inner, holds is expected) for shape in shapes for inner, holds in shape.tests
                )
        return False

    def _open(self, tests: Tests) -> Tests | None:
        """Tests on a key that is not named: lists are settled. None where no such key passes."""
        found = set()
        for test, expected in tests:
            listed = self._listed(test)
            if listed is not None or isinstance(test, Everything):
                if isinstance(test, Everything) is not expected:
                    return None
            else:
                found.add((test, expected))
        return frozenset(found)

    def _counts(self, shape: Object) -> Residue:
        """The doubts about how many keys there are."""
        return frozenset(doubt for doubt in shape.doubts if doubt.keyword in ("minProperties", "maxProperties"))

    def _object(self, shape: Object) -> str:
        keys = self._keys(shape)
        named = [(name, child, name in shape.required) for name, child in keys.named if child in self._productive]
        cells = [(body, child) for body, child in keys.cells if child in self._productive]
        fewest = len(shape.required)
        if self._any_order and named:
            return self._unordered(named, cells, shape)
        least, most = self._key_bounds(shape)
        if shape.some or most is not None or least > 1 or (least and fewest):
            if self._num_key_states(shape) <= MAX_COUNTED:
                return self._counted_object(shape, cells, least, most)
            self._refusals.update((*self._counts(shape), *(refusal for _, _, refusal in shape.some)))
            least = min(least, 1)
        extra = self._extra(cells)
        more = f"(COMMA {extra})*" if extra else ""
        pairs = [(self._pair(name, child), needed) for name, child, needed in named]
        options = [f"{self._sequence(pairs)} {more}"] if pairs else []
        if extra and not fewest:
            options.append(f"{extra} {more}")
        return self._enclosed("{", options, not fewest and not least)

    def _unordered(self, named: list[tuple[str, Child, bool]], cells: list[tuple[str, Child]], shape: Object) -> str:
        """All pairs that there may be, again and again: which there must be, and that each comes once, is checked."""
        if shape.some:
            self._refusals.update((*self._counts(shape), *(refusal for _, _, refusal in shape.some)))
        self._has_open_keys = self._has_tight_keys = True
        others = [f"{self._terminal(body)} COLON {self._symbol(child)}" for body, child in cells]
        pair = self._rule(self._name("x"), [*(self._pair(name, child) for name, child, _ in named), *others])
        return self._enclosed("{", [f"{pair} (COMMA {pair})*"], not shape.required and not shape.least)

    def _pair(self, name: str, child: Child) -> str:
        key = self._terminal(f"/\\x{{22}}{patterns.literal(self._spelling.escaped(name))}\\x{{22}}/")
        return f"{key} COLON {self._symbol(child)}"

    def _extra(self, cells: list[tuple[str, Child]]) -> str | None:
        """A rule for a pair whose key is not named."""
        if not cells:
            return None
        self._has_open_keys = True
        name = self._name("x")
        return self._rule(name, [f"{self._terminal(body)} COLON {self._symbol(child)}" for body, child in cells])

    def _sequence(self, pairs: list[tuple[str, bool]]) -> str:
        """At least one of the pairs, in order, the needed ones all. Halved again and again, to keep rules shallow."""

        def first(low: int, high: int) -> str:
            if high - low == 1:
                return pairs[low][0]
            middle = (low + high) // 2
            options = [f"{first(low, middle)} {rest(middle, high)}"]
            if not any(needed for _, needed in pairs[low:middle]):
                options.append(first(middle, high))
            return self._rule(self._name("o"), options)

        @functools.cache
        def rest(low: int, high: int) -> str:
            if high - low == 1:
                pair, needed = pairs[low]
                return f"(COMMA {pair})" + ("" if needed else "?")
            middle = (low + high) // 2
            return self._rule(self._name("o"), [f"{rest(low, middle)} {rest(middle, high)}"])

        return first(0, len(pairs))

    def _counted_object(self, shape: Object, cells: list[tuple[str, Child]], least: int, most: int | None) -> str:
        """A left-linear grammar over the keys in order, how many there are, and which rules of `some` are met."""
        rules: dict[_KeyState, str] = {}
        for layer in self._key_layers(shape):
            before, rules = rules, {}
            for state, ways in layer.items():
                options = [
                    before[last] + ("" if pair is None else f" {'COMMA ' if last[0] else ''}{self._pair(*pair)}")
                    for last, pair in ways
                ]
                rules[state] = self._rule(self._name("k"), options or [""])
        extra, may_be_empty = self._extra(cells), False
        ends = []
        for state, rule in rules.items():
            comma = "COMMA " if state[0] else ""
            missing, room = max(0, least - state[0]), None if most is None else most - state[0]
            left = self._left(shape, state)
            if not left and not missing:
                if state[0]:
                    ends.append(rule)
                may_be_empty = may_be_empty or not state[0]
            if len(left) > 1:  # by one key or several: the check sees
                self._refusals.update(refusal for _, _, refusal in left)
            witness = self._extra(self._witnesses(shape, left[0])) if len(left) == 1 else None
            if extra and (len(left) != 1 or witness):
                ends += (f"{rule} {comma}{tail}" for tail in _tails(max(1, missing), room, extra, witness))
        return self._enclosed("{", ends, may_be_empty)

    def _key_bounds(self, shape: Object) -> tuple[int, int | None]:
        """How many keys there must be and may be, where that is not plain from the named ones."""
        keys = self._keys(shape)
        is_open = any(child in self._productive for _, child in keys.cells)
        possible = sum(child in self._productive for _, child in keys.named)
        most = shape.most if shape.most is not None and (is_open or shape.most < possible) else None
        return (shape.least if shape.least > len(shape.required) else 0), most

    def _num_key_states(self, shape: Object) -> int:
        """A bound on what `_key_layers` takes."""
        num_named = len(self._keys(shape).named)
        states = (num_named + 1) * (self._key_cap(shape) + 1) * 2 ** len(shape.some)
        return states if len(shape.some) <= MAX_SOME else MAX_COUNTED + 1

    def _key_cap(self, shape: Object) -> int:
        """How many keys are told apart: beyond, more make no difference."""
        least, most = self._key_bounds(shape)
        if most is None:
            return max(least, 1)
        is_open = any(child in self._productive for _, child in self._keys(shape).cells)
        return most if is_open else min(most, len(self._keys(shape).named) + 1)

    def _key_layers(self, shape: Object) -> Iterator[dict[_KeyState, list[tuple[_KeyState, tuple[str, Child] | None]]]]:
        """The states of an object being written after none and each of its named keys, each with those before it, and
        the key and its value between, if it is there."""
        _, most = self._key_bounds(shape)
        cap, some = self._key_cap(shape), _ordered_rules(shape)
        layer: dict[_KeyState, list[tuple[_KeyState, tuple[str, Child] | None]]] = {(0, frozenset()): []}
        yield layer
        for name, child in self._keys(shape).named:
            if child not in self._productive:
                continue
            passed = [at for at, (tests, _, _) in enumerate(some) if passes(tests, name, self._lowering.holds)]
            before, layer = layer, {}
            for state in before:
                count, met = state
                if name not in shape.required:
                    layer.setdefault(state, []).append((state, None))
                if most is not None and count >= most:
                    continue
                for new in _subsets([at for at in passed if at not in met]):
                    value = child.union(*(some[at][1] for at in new))
                    if value in self._productive:
                        after = (min(count + 1, cap), met | new)
                        layer.setdefault(after, []).append((state, (name, value)))
            yield layer

    def _left(self, shape: Object, state: _KeyState) -> list[tuple[Tests, Child, Refusal]]:
        """The rules of `some` that no named key has met."""
        return [rule for at, rule in enumerate(_ordered_rules(shape)) if at not in state[1]]

    def _can_end(self, shape: Object, state: _KeyState) -> bool:
        """Whether an object may end behind its named keys, or go on with others."""
        count = state[0]
        least, most = self._key_bounds(shape)
        left = self._left(shape, state)
        if not left and count >= least:
            return True
        is_open = any(child in self._productive for _, child in self._keys(shape).cells)
        if not is_open or (most is not None and max(count + 1, least) > most):
            return False
        return len(left) != 1 or bool(self._witnesses(shape, left[0]))

    def _witnesses(self, shape: Object, some: tuple[Tests, Child, Refusal]) -> list[tuple[str, Child]]:
        """Keys that are not named, with values, that meet a rule of `some`."""
        tests, asked, _ = some
        found = [(body, child | asked) for body, child in self._cells(shape, self._keys(shape), tests)]
        return [(body, child) for body, child in found if child in self._productive]


@dataclass(frozen=True, slots=True)
class _Keys:
    """The named keys in order with what they hold, and terminals for all others."""

    named: tuple[tuple[str, Child], ...]
    cells: tuple[tuple[str, Child], ...]


def _tails(least: int, most: int | None, extra: str, witness: str | None) -> Iterator[str]:
    """From `least` to `most` pairs whose keys are not named, and of which a witness is one where there is one."""
    if witness is None:
        if most is None or least <= most:
            yield f"{extra} " + _repeat(f"COMMA {extra}", least - 1, None if most is None else most - 1)
    elif most is None:
        for before in range(least - 1):
            yield _repeat(f"{extra} COMMA", before, before) + f" {witness} (COMMA {extra}){{{least - 1 - before},}}"
        yield _repeat(f"{extra} COMMA", least - 1, None) + f" {witness} (COMMA {extra})*"
    elif least <= most:
        for before in range(most):
            after = _repeat(f"COMMA {extra}", max(0, least - 1 - before), most - 1 - before)
            yield _repeat(f"{extra} COMMA", before, before) + f" {witness} {after}"


def _none_of(keys: _Keys) -> Tests:
    """A key that is not named."""
    return frozenset({(Among(frozenset(name for name, _ in keys.named)), False)}) if keys.named else frozenset()


# How many items an array has so far, and how many of them count, for each count.
_State = tuple[int, tuple[int, ...]]


# How many keys an object has so far, and which rules of `some` they meet.
_KeyState = tuple[int, frozenset[int]]


def _ordered_rules(shape: Object) -> list[tuple[Tests, Child, Refusal]]:
    return sorted(shape.some, key=repr)


def _subsets(values: Sequence[int]) -> Iterator[frozenset[int]]:
    for size in range(len(values) + 1):
        yield from map(frozenset, itertools.combinations(values, size))


def _ordered(counts: Iterable[Count]) -> list[Count]:
    return sorted(counts, key=repr)


def _cap(count: Count) -> int:
    """How many items are told apart: beyond, more make no difference."""
    return count.least if count.most is None else max(count.least, count.most)


def _last_place(shape: Array, counts: Iterable[Count]) -> int:
    """The first place from which on all places are alike."""
    return max(1, len(shape.prefix), shape.least, *(count.offset for count in counts))


def _choices(shape: Array, counts: Sequence[Count], place: int) -> list[tuple[Child, tuple[int, ...]]]:
    """What may stand at a place, by which counts it adds to. What need not be told apart stands for both."""
    base = shape.prefix[place] if place < len(shape.prefix) else shape.items
    found = []
    for hits in itertools.product((1, 0), repeat=len(counts)):
        child = base
        for count, hit in zip(counts, hits, strict=True):
            if place < count.offset:
                if hit:
                    break
            elif hit:
                child |= count.child
            elif count.most is not None:
                child |= _complement(count.child)
        else:
            found.append((child, hits))
    return found


def _is_end(state: _State, shape: Array, counts: Sequence[Count]) -> bool:
    """Whether an array may end there."""
    length, hits = state
    return length >= shape.least and all(hit >= count.least for hit, count in zip(hits, counts, strict=True))


def _is_rule(shape: Shape) -> bool:
    """Whether a shape takes a rule, not only a terminal."""
    return isinstance(shape, Array | Object) or (isinstance(shape, Number) and bool(_divisors(shape)))


def _divisors(shape: Number) -> list[Decimal]:
    return [test.divisor for test, expected in shape.tests if expected and isinstance(test, MultipleOf)]


def _has_multiple(shape: Number) -> bool:
    """Whether there is a multiple between the bounds."""
    divisor = functools.reduce(numbers.common_decimal, _divisors(shape))
    if (Integral(), True) in shape.tests:
        divisor = numbers.common_decimal(divisor, Decimal(1))
    low, high = bounds(shape.tests)
    if low is None or high is None:
        return True
    first, last = numbers.integers_between(low[0] / divisor, low[1], high[0] / divisor, high[1])
    return first <= last


def _repeat(body: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    if most is None and least == 0:
        return f"({body})*"
    return f"({body}){{{least},{'' if most is None else most}}}"


def _complement(child: Child) -> Child:
    """What a child does not allow."""
    if len(child) == 1:
        ((atom, positive),) = child
        return frozenset({(atom, not positive)})
    return frozenset({(Either((child,)), False)})


def _is_tight(union: Union) -> bool:
    """Whether there may be few strings, or few numbers, that a union allows."""
    tests: dict[type, list[Tests]] = {String: [], Number: []}
    for shape in union:
        if isinstance(shape, String | Number):
            tests[type(shape)].append(shape.tests)
    return any(found and frozenset() not in found for found in tests.values())


def _has_few_scalars(union: Union) -> bool:
    """Whether a union allows few strings or few numbers, or none of both."""
    return _is_tight(union) or not any(isinstance(shape, String | Number) for shape in union)


def _product(values: Iterable[int]) -> int:
    result = 1
    for value in values:
        result *= value
    return result


def _relevant(truths: list[tuple[bool, ...]], size: int) -> list[int]:
    """The places that tell whether an assignment is among those given."""
    given = set(truths)
    return [
        place
        for place in range(size)
        if any((*truth[:place], not truth[place], *truth[place + 1 :]) not in given for truth in given)
    ]


def _few_scalars(union: Union, spelling: Spelling) -> list[str] | None:
    """All values of a union as regular expressions, where it is a short list of scalars without a refusal."""
    found: list[str] = []
    for shape in union:
        if shape.residue:
            return None
        match shape:
            case Null():
                found.append("null")
            case Boolean():
                found.extend(sorted(str(value).lower() for value in shape.values))
            case Number() | String():
                lists = [test.values for test, expected in shape.tests if expected and isinstance(test, Among)]
                if len(lists) != 1 or len(shape.tests) != 1:
                    return None
                for value in sorted(lists[0]):
                    text = numbers.spelling(value) if isinstance(value, Decimal) else f'"{spelling.escaped(value)}"'
                    found.append(patterns.literal(text))
            case _:
                return None
    return list(dict.fromkeys(found))


@functools.cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


@functools.lru_cache(maxsize=4096)
def derives(expression: str) -> bool:
    """Whether a terminal expression matches any text."""
    if "&" not in expression and "~" not in expression:
        return True
    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_lark(f"start: T\nT: {expression}\n"), log_level=0)
    if matcher.is_error():
        return "atisf" not in matcher.get_error()
    return any(matcher.compute_bitmask()[: 256 // 8])  # the bits after those of the bytes say that the text may end


@functools.lru_cache(maxsize=512)
def can_be_explored(expression: str) -> bool:
    """Whether all states of an expression for what stands in strings can be gone through within `EXPLORE_FUEL`. The
    backend does so for what holds a complement, state by state, and fails in the middle of a text otherwise."""
    # No content of a string holds NUL, so all states are tried in vain.
    source = LLMatcher.grammar_from_lark(f"start: T\nT: ({expression}) & /(?s:.*)\\x{{00}}(?s:.*)/\n")
    limits = LLParserLimits(initial_lexer_fuel=EXPLORE_FUEL, verbose_errors=False)
    matcher = LLMatcher(_bytes(), source, log_level=0, limits=limits)
    return not matcher.is_error() or "fuel" not in matcher.get_error()


@functools.lru_cache(maxsize=512)
def is_taken(expression: str) -> bool:
    """Whether the backend takes an expression as it stands."""
    return not LLMatcher(_bytes(), LLMatcher.grammar_from_lark(f"start: {expression}\n"), log_level=0).is_error()
