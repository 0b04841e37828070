"""Numbers as JSON spells them, as regular expressions: bounds are exact decimals, of any size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

# Zero has no exponent: whatever it were, the number would stay what it is.
ANY_NUMBER = r"/-?(0(\.0+)?|(0\.0*[1-9][0-9]*|[1-9][0-9]*(\.[0-9]+)?)([eE][+-]?[0-9]{1,2})?)/"
ANY_INTEGER = r"/-?(0|[1-9][0-9]*)/"
PLAIN_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?/"
# Up to 15 digits, decimals and the doubles they are read as keep their order: beyond a bound on paper is beyond it for
# every reader.
SHORT_LENGTH = 16
SHORT_NUMBER = rf"/-?([0-9]+|[0-9.]{{1,{SHORT_LENGTH}}})/"
MAX_DIGITS = 400
# Of what multiples a grammar is written: without its factors of ten, and behind the point.
MAX_DIVISOR, MAX_PLACES = 10_000, 12
MULTIPLE_LENGTH = 24  # characters without the sign, of a multiple that is checked while it is written


def at_least(bound: Decimal, exclusive: bool, integral: bool) -> str:
    """The spellings, without exponents, of numbers from `bound` on (above it where that is exclusive)."""
    if integral:
        return _union(_above(_next_integer(bound, exclusive), False, True), _negated(bound, exclusive, True))
    return _union(_above(bound, exclusive, False), _negated(bound, exclusive, False))


def at_most(bound: Decimal, exclusive: bool, integral: bool) -> str:
    """The spellings, without exponents, of numbers up to `bound` (below it where that is exclusive)."""
    mirrored = at_least(-bound, exclusive, integral)
    return mirrored.replace("/-(", "/@(").replace("/(", "/-(").replace("/@(", "/(")


def equal(value: Decimal) -> str:
    """The spellings of one number, without exponents."""
    whole, fraction = _digits(value)
    sign = "-?" if value == 0 else "-" if value < 0 else ""
    zeros = r"(\.0+)?" if not fraction else rf"\.{fraction}0*"
    return f"/{sign}{whole}{zeros}/"


def spelling(value: Decimal) -> str:
    """The one canonical spelling of a number, without an exponent."""
    whole, fraction = _digits(value)
    return ("-" if value < 0 else "") + whole + ("." + fraction if fraction else "")


def fits(value: Decimal) -> bool:
    """Whether a number can be written out in at most 400 digits on either side."""
    return value.is_finite() and (value == 0 or -MAX_DIGITS < value.adjusted() < MAX_DIGITS)


def common_decimal(first: Decimal, second: Decimal) -> Decimal:
    """`common_multiple` of decimals, exact within the precision of the context."""
    common = common_multiple(Fraction(first), Fraction(second))
    return Decimal(common.numerator) / Decimal(common.denominator)


def is_small_divisor(divisor: Decimal) -> bool:
    """Whether a grammar of its multiples can be built: the automaton has a state for each remainder, and takes seconds
    from 100,000 on."""
    shortest = divisor.normalize()
    places = -int(shortest.as_tuple().exponent)
    return divisor < 1 << 31 and places <= MAX_PLACES and shortest.scaleb(places) <= MAX_DIVISOR


@dataclass(frozen=True, slots=True)
class Span:
    """Multiples of `step` from `least` to `most`, None where there is no bound on that side."""

    step: Fraction
    least: Fraction | None = None
    most: Fraction | None = None

    def beginning(self, text: str) -> Iterator[Fraction]:
        """Those whose spelling begins with `text`, a sign and a digit at least: without an exponent, of at most
        `MULTIPLE_LENGTH` characters beside the sign, or `SHORT_LENGTH` as in `SHORT_NUMBER`. In order from each number
        of digits on."""
        digits = text.lstrip("-")
        is_short = self.step.denominator > 1 and (self.least is not None or self.most is not None)
        left = MULTIPLE_LENGTH - len(digits)
        left_behind = (SHORT_LENGTH if is_short else MULTIPLE_LENGTH) - len(digits)  # of what has a point
        whole, point, fraction = digits.partition(".")
        first, size = Fraction(int(whole + fraction), 10 ** len(fraction)), Fraction(1, 10 ** len(fraction))
        is_whole = self.step.denominator == 1
        least, most = self.least, self.most
        if text.startswith("-"):
            least, most = None if most is None else -most, None if least is None else -least
        # With more digits before a point, if it does not begin with a zero, and behind one.
        for more in range((0 if point or not int(whole) else left) + 1):
            places = max(0, len(fraction) + left_behind if point else left_behind - more - 1)
            step = self.step if is_whole else common_multiple(self.step, Fraction(1, 10**places))
            start, end = first * 10**more, (first + size) * 10**more
            start = start if least is None else max(start, least)
            value = math.ceil(start / step) * step
            while value < end and (most is None or value <= most):
                yield -value if text.startswith("-") else value
                value += step


def common_multiple(first: Fraction, second: Fraction) -> Fraction:
    """The least number above zero that both divide."""
    return Fraction(
        math.lcm(first.numerator * second.denominator, second.numerator * first.denominator),
        first.denominator * second.denominator,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Divisor:
    """What numbers are multiples of: a fraction in lowest terms."""

    numerator: int
    denominator: int

    @classmethod
    def of(cls, value: Decimal) -> Divisor:
        """The divisor of this value."""
        return cls(*value.as_integer_ratio())

    def divides(self, value: Decimal) -> bool:
        """Whether a number is a multiple."""
        numerator, denominator = value.as_integer_ratio()
        return numerator * self.denominator % (denominator * self.numerator) == 0


class Beginning:
    """How a number begins, written without an exponent and with at most `MULTIPLE_LENGTH` characters beside its sign,
    and what it may become a multiple of. Of a longer one, and of one with an exponent, nothing is said: of all."""

    __slots__ = ("_behind", "_digits", "_known", "_left", "_shorter", "text")

    def __init__(self, text: str, shorter: Beginning | None = None) -> None:
        """`shorter` is how `text` begins itself, where that is known: one digit more leaves no more than there was."""
        self.text = text
        characters = text.lstrip("-")
        whole, point, fraction = characters.partition(".")
        is_followed = whole != "" and "e" not in characters.lower()
        self._left = MULTIPLE_LENGTH - len(characters) if is_followed else -1
        self._digits = int(whole + fraction) if is_followed else 0
        self._behind = len(fraction) if point else None
        self._shorter = shorter
        self._known: dict[Divisor, bool] = {}

    def may_become_multiple(self, divisor: Divisor) -> bool:
        """Whether it may become a multiple."""
        if divisor not in self._known:
            possible = self._shorter is None or self._shorter.may_become_multiple(divisor)
            self._known[divisor] = possible and self._may_become_multiple(divisor)
        return self._known[divisor]

    def _may_become_multiple(self, divisor: Divisor) -> bool:
        left = self._left
        if left < 0:
            return True
        if self._behind is not None:
            return _has_multiple(self._digits, self._behind, 0, self._behind + left, divisor)
        # With more digits before a point, if it does not begin with a zero, and behind one. The more, the likelier.
        for more in range(left if self._digits else 0, -1, -1):
            if _has_multiple(self._digits, 0, more, max(0, left - more - 1), divisor):
                return True
        return False


def sure_length(divisors: Iterable[Divisor]) -> int:
    """Up to how many digits a whole number other than 0 may surely become a multiple of each: with those that are
    left, all numbers from one multiple to the next can be written."""
    spans = (math.lcm(divisor.numerator, divisor.denominator) // divisor.denominator for divisor in divisors)
    return MULTIPLE_LENGTH - len(str(max(spans, default=1)))


def _has_multiple(digits: int, behind: int, more: int, places: int, divisor: Divisor) -> bool:
    """Whether there is a multiple of at most `places` decimal places that begins with `digits`, of which so many are
    `behind` the point, and `more` to come before it."""
    # In units of which both a last place and the divisor are a multiple.
    size: int = 10 ** (more + places - behind) * divisor.denominator
    apart = math.lcm(divisor.numerator * 10**places, divisor.denominator)
    return -digits * size % apart < size


def integers_between(least: Decimal, above: bool, most: Decimal, below: bool) -> tuple[Decimal, Decimal]:
    """The first and the last integer between two bounds, each of them exclusive or not."""
    return _next_integer(least, above), -_next_integer(-most, below)


def _next_integer(bound: Decimal, exclusive: bool) -> Decimal:
    whole = bound.to_integral_value(rounding="ROUND_CEILING")
    return whole + 1 if exclusive and whole == bound else whole


def _negated(bound: Decimal, exclusive: bool, integral: bool) -> str:
    """Negative spellings `-y` with y up to `-bound`."""
    if integral:
        bound, exclusive = _next_integer(bound, exclusive), False
    if bound > 0 or (bound == 0 and exclusive):
        return ""
    return "-" + _below(-bound, exclusive, integral)


def _union(*bodies: str) -> str:
    """Signless and negative bodies as one terminal expression, each marked so that a sign can be swapped."""
    parts = [f"/-({body[1:]})/" if body.startswith("-") else f"/({body})/" for body in bodies if body]
    return "(" + " | ".join(parts) + ")"


def _digits(value: Decimal) -> tuple[str, str]:
    whole, _, fraction = f"{abs(value):f}".partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _above(bound: Decimal, exclusive: bool, integral: bool) -> str:
    """Spellings without a sign of numbers from `bound` on."""
    tail = "" if integral else r"(\.[0-9]+)?"
    if bound < 0:
        return rf"(0|[1-9][0-9]*){tail}"
    whole, fraction = _digits(bound)
    options = [rf"[1-9][0-9]{{{len(whole)},}}{tail}"]
    for place, digit in enumerate(whole):
        if digit != "9":
            options.append(f"{whole[:place]}[{int(digit) + 1}-9][0-9]{{{len(whole) - place - 1}}}{tail}")
    if integral:
        assert not fraction and not exclusive
        options.append(whole)
    elif not fraction:
        options.append(rf"{whole}\.[0-9]*[1-9][0-9]*" if exclusive else whole + tail)
    else:
        for place, digit in enumerate(fraction):
            if digit != "9":
                options.append(rf"{whole}\.{fraction[:place]}[{int(digit) + 1}-9][0-9]*")
        options.append(rf"{whole}\.{fraction}" + ("[0-9]*[1-9][0-9]*" if exclusive else "[0-9]*"))
    return "|".join(options)


def _below(bound: Decimal, exclusive: bool, integral: bool) -> str:
    """Spellings without a sign of numbers from 0 to `bound`, which is not negative."""
    tail = "" if integral else r"(\.[0-9]+)?"
    whole, fraction = _digits(bound)
    options = []
    if len(whole) > 1:
        options.append(rf"(0|[1-9][0-9]{{0,{len(whole) - 2}}}){tail}")
    for place, digit in enumerate(whole):
        low = 1 if place == 0 and len(whole) > 1 else 0
        if int(digit) > low:
            options.append(f"{whole[:place]}[{low}-{int(digit) - 1}][0-9]{{{len(whole) - place - 1}}}{tail}")
    if integral:
        assert not fraction and not exclusive
        options.append(whole)
    elif not fraction:
        if not exclusive:
            options.append(rf"{whole}(\.0+)?")
    else:
        options.append(whole)
        for place, digit in enumerate(fraction):
            if digit != "0":
                options.append(rf"{whole}\.{fraction[:place]}[0-{int(digit) - 1}][0-9]*")
            if place:
                options.append(rf"{whole}\.{fraction[:place]}")
        if not exclusive:
            options.append(rf"{whole}\.{fraction}0*")
    return "|".join(options)
