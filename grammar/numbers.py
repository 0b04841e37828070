"""Numbers as JSON spells them, as regular expressions: bounds are exact decimals, of any size."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

ANY_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?/"
ANY_INTEGER = r"/-?(0|[1-9][0-9]*)/"
PLAIN_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?/"
# Up to 15 digits, decimals and the doubles they are read as keep their order: beyond a bound on paper is beyond it for
# every reader.
SHORT_NUMBER = r"/-?([0-9]+|[0-9.]{1,16})/"
MAX_DIGITS = 400
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


def may_become_multiple(beginning: str, divisor: Fraction) -> bool:
    """Whether a spelling without an exponent that begins so, of at most `MULTIPLE_LENGTH` characters beside its sign,
    may be a multiple. True for what is longer or has an exponent: of that nothing is said."""
    digits = beginning.lstrip("-")
    left = MULTIPLE_LENGTH - len(digits)
    if not digits or left < 0 or "e" in digits.lower():
        return True
    whole, point, fraction = digits.partition(".")
    first = Fraction(int(whole + fraction), 10 ** len(fraction))
    step = Fraction(1, 10 ** len(fraction))
    if point:
        return _has_multiple(first, step, divisor, len(fraction) + left)
    # With more digits before a point, if it does not begin with a zero, and behind one.
    most = left if int(whole) else 0
    return any(_has_multiple(first * 10**n, Fraction(10**n), divisor, max(0, left - n - 1)) for n in range(most + 1))


def _has_multiple(first: Fraction, size: Fraction, divisor: Fraction, places: int) -> bool:
    """Whether a multiple with so many decimal places lies within `size` from `first` on."""
    unit = Fraction(1, 10**places)
    common = Fraction(
        math.lcm(divisor.numerator * unit.denominator, unit.numerator * divisor.denominator),
        divisor.denominator * unit.denominator,
    )
    return math.ceil(first / common) * common < first + size


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
