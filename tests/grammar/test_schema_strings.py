"""Patterns and formats: ECMA-262 with the flag u, over what a JSON string holds once its escapes are read."""

from __future__ import annotations

import random

import jsonschema_rs
import pytest

from specdec.grammar import formats, numbers
from specdec.grammar.patterns import PatternRefused, content_expression
from tests.grammar.schema_texts import accepts, compact, compiled

PATTERNS = [
    "ab",
    "^ab$",
    "^a|b$",
    "(^a|b)c",
    "^$",
    "",
    "a$|^b",
    "(a$|b)",
    "^(a|b|)$",
    "^.$",
    r"^\s$",
    r"^\S+$",
    r"^\d\w$",
    r"^\W$",
    r"[^\d]",
    r"^[^\s\d]$",
    r"^[\w-]$",
    r"^[a-b-c]$",
    r"^[[a]]$",
    r"^\p{L}+$",
    r"^\P{L}+$",
    r"^[^\p{L}\n]$",
    r"^[\p{Lu}\p{Nd}_]+$",
    r"^\cA$",
    r"^\u00e9\x41$",
    r"^\u{1F600}$",
    r"a\-b",
    r'^["\\]+$',
    r"^(?!foo)[a-z]+$",
    r"^(?=.*[0-9])(?=.*[a-z]).{3,5}$",
    r"^[a-z]+(?<!x)$",
    r"^(?:ab){2,3}?c+?$",
    r"^(?<name>a)b*$",
    r"^[\s\S]{2}$",
    r"\$\{[^}]+\}",
]
ALPHABET = 'abcxfo059 AZ_-\n\t\r"\\\x01\x7fé\u00a0\u2028😀.$,#{}[]/'


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_searched_for_in_the_value_by_the_rules_of_ecma(pattern: str) -> None:
    grammar = compiled({"type": "string", "pattern": pattern})
    judge = jsonschema_rs.Draft202012Validator({"pattern": pattern})
    seed = 5
    print(f"seed {seed}")
    random_ = random.Random(seed)
    near = ["", "ab", "abc", "foo", "food", "bar", "12a", "x", "ababc", "é", "éA", "😀", "${a}", "\u0001"]
    for text in near + ["".join(random_.choices(ALPHABET, k=random_.choice([1, 1, 2, 3, 6]))) for _ in range(60)]:
        assert accepts(grammar, compact(text)) == judge.is_valid(text), text


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"\bword\b", "word boundary"),
        (r"^(a)\1$", "back-reference"),
        (r"^(?<n>a)\k<n>$", "back-reference"),
        ("a(?=b)c", "look-around"),
        ("(?:^a)*", "anchor"),
        ("a{2,1}", "out of order"),
        ("(", "unclosed group"),
        ("a)", "unmatched"),
        ("[b-a]", "out of order"),
        ("*a", "nothing to repeat"),
        (r"\p{Nonsense}", "property"),
        ("(?i)a", "unknown kind"),
        ("a{99999}", "repeats more"),
        ("(" * 100 + ")" * 100, "nests"),
        ("\\", "backslash"),
    ],
)
def test_a_pattern_that_is_not_regular_is_refused_by_name(pattern: str, words: str) -> None:
    with pytest.raises(PatternRefused, match=words):
        content_expression(pattern)


FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "2023-12-31", "0000-01-01"],
        ["2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "2023-1-1", "2023-00-10", "2023-01-00"],
    ),
    "time": (
        ["10:20:30Z", "23:59:60Z", "23:59:60+00:00", "00:00:00.125-08:30"],
        ["24:00:00Z", "10:60:00Z", "10:20:60Z", "10:20:30", "10:20Z", "22:59:60Z", "23:59:60+01:00", "10:20:30+24:00"],
    ),
    "date-time": (
        ["2024-02-29T10:20:30Z", "1998-12-31T23:59:60Z", "2020-01-01t00:00:00.1+01:00"],
        ["2023-02-29T10:20:30Z", "2024-01-01 10:20:30Z", "1998-12-31T23:58:60Z", "2024-01-01"],
    ),
    "duration": (["P1DT2H", "P4W", "PT1S", "P1Y2M3D"], ["P", "PT", "1D", "P1W2D", "P1YT", "P1H", "P1D2Y"]),
    "email": (["a.b@example.com", "a@b"], ["a@", "@b", "a..b@c", ".a@b", "a@-b", "a" * 65 + "@b"]),
    "hostname": (["ex-ample.com", "a--b.c", "a" * 63], ["-a", "a-", "a..b", "a" * 64, "ab--c", "", "a_b", "xn--a"]),
    "ipv4": (["0.0.0.0", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4"],
        ["1::2::3", "12345::", "1:2:3:4:5:6:7", "::1%e"],
    ),
    "uri": (
        ["https://a.b/c?d#e", "urn:x:y", "http://[::1]:8/"],
        ["a b", "/a", "http://a b", "http://[1::2::3]", "a:%zz"],
    ),
    "uri-reference": (["", "/a/b", "?q", "//h/p", "a:b"], ["\\a", "a b", "%"]),
    "iri": (["http://ƒøø.ßår/?q=é"], ["é", "http://a b"]),
    "uri-template": (["http://a/{b}", "{?x,y*}", "{a:3}"], ["{", "{b", "}", "{a:0}"]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08", "2eb8aa08-aa98-11ea-b4aa-73b441d1638g"]),
    "json-pointer": (["", "/a/b~0~1", "/"], ["a", "/~", "/~2"]),
    "relative-json-pointer": (["0", "1/a", "2#"], ["/a", "01", "-1"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_what_its_rfc_says(name: str) -> None:
    grammar = compiled({"type": "string", "format": name})
    judge = jsonschema_rs.Draft202012Validator({"format": name}, validate_formats=True)
    for text in FORMATS[name][0]:
        assert judge.is_valid(text), text
        assert accepts(grammar, compact(text)), text
    for text in FORMATS[name][1]:
        assert not judge.is_valid(text), text
        assert not accepts(grammar, compact(text)), text


def test_what_is_not_of_a_format_is_not_by_any_reading() -> None:
    """A string outside the superset of a format is refused by jsonschema-rs too: strings near those of all formats."""
    seed = 11
    print(f"seed {seed}")
    random_ = random.Random(seed)
    seeds = [text for good, bad in FORMATS.values() for text in (*good, *bad)]
    outside = 0
    for name, pattern in formats.SUPERSETS.items():
        draft = jsonschema_rs.Draft202012Validator({"format": name}, validate_formats=True)
        found = jsonschema_rs.Draft202012Validator({"pattern": pattern})
        for _ in range(1_500):
            text = random_.choice(seeds)
            for _ in range(random_.choice((0, 1, 1, 2))):
                where = random_.randint(0, len(text))
                piece = random_.choice((*'0a60:Z+-.@/ #%{}[]"\\é_T', "", "xn--", "@b", "::"))
                text = text[:where] + piece + text[where + random_.randint(0, 2) :]
            if not found.is_valid(text):
                outside += 1
                assert not draft.is_valid(text), (name, text)
    assert outside > 10_000
    for name in formats.SUPERSETS:
        assert accepts(compiled({"type": "string", "not": {"format": name}}), '" "')


def test_every_format_that_is_checked_has_a_pattern_or_a_reason() -> None:
    assert formats.SUPERSETS.keys() == formats.PATTERNS.keys()
    assert formats.FIRST_DRAFTS.keys() == formats.PATTERNS.keys() | formats.CHECKED.keys()
    for pattern in formats.PATTERNS.values():
        content_expression(pattern)


@pytest.mark.parametrize(
    ("schema", "formats_", "valid", "invalid"),
    [
        ({"format": "date", "maxLength": 3}, "annotate", "abc", "abcd"),
        ({"type": "string", "format": "shoe-size"}, "assert", "42", None),
        ({"type": "string", "format": "date", "pattern": "^2024"}, "assert", "2024-02-29", "2023-01-01"),
        ({"type": "string", "format": "uri", "maxLength": 12}, "assert", "http://a.b/c", "http://a.b/cd"),
        (
            {"type": "string", "format": "date", "enum": ["2023-02-29", "2024-02-29"]},
            "assert",
            "2024-02-29",
            "2023-02-29",
        ),
        ({"type": "string", "not": {"format": "ipv4"}}, "assert", "1.2.3", "1.2.3.4"),
        (
            {"type": "string", "format": "uuid", "$schema": "http://json-schema.org/draft-07/schema#"},
            "assert",
            "x",
            None,
        ),
    ],
    ids=str,
)
def test_formats_meet_other_keywords(schema: dict[str, object], formats_: str, valid: str, invalid: str | None) -> None:
    assert formats_ in ("assert", "annotate")
    grammar = compiled(schema, "assert" if formats_ == "assert" else "annotate")
    assert accepts(grammar, compact(valid))
    assert invalid is None or not accepts(grammar, compact(invalid))


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (r'"\n\t\b\f\r\"\\"', True),
        (r'"\u0001\u001f"', True),
        ('"\x7f\u0085é😀"', True),
        ('"\x01"', False),
        ('"\n"', False),
        (r'"\x41"', False),
        (r'"\ud800"', False),
        (r'"\/"', False),  # the one spelling of a character that needs no escape is the character
        (r'"\u00e9"', False),
        (r'"\u000a"', False),
    ],
)
def test_a_string_is_spelled_in_one_way(text: str, good: bool) -> None:
    for schema in ({"type": "string"}, {}, {"type": "string", "minLength": 1}, {"type": "string", "pattern": ""}):
        assert accepts(compiled(schema), text) == good


@pytest.mark.parametrize(
    ("schema", "text", "good"),
    [
        ({}, "1e5", True),
        ({}, "-0.0", True),
        ({}, "1e999", False),  # no reader knows such a number
        ({}, "01", False),
        ({}, ".5", False),
        ({"type": "integer"}, "1.0", False),  # the canonical spelling of a whole number has no fraction
        ({"minimum": 0}, "1e5", False),
        ({"exclusiveMaximum": 1}, "0.99999999999999999999", False),  # a reader of doubles takes it for 1
        ({"exclusiveMaximum": 1}, "0.99999999999999", True),
        ({"const": 0.1}, "0.1", True),
        ({"const": 1.0}, "1", True),
        ({"not": {"const": 5}, "type": "number"}, "5.00", False),
        ({"not": {"const": 0}, "type": "number"}, "-0.0", False),
    ],
    ids=str,
)
def test_numbers_are_spelled_canonically(schema: dict[str, object], text: str, good: bool) -> None:
    assert accepts(compiled(schema), text) == good


def test_bounds_compare_as_decimals() -> None:
    import re
    from decimal import Decimal

    seed = 3
    print(f"seed {seed}")
    random_ = random.Random(seed)

    def number() -> str:
        whole = random_.choice(["0", "1", "5", "9", "10", "99", "100", "101", "250", str(random_.randrange(3000))])
        fraction = "." + "".join(random_.choices("0159", k=random_.randint(1, 3))) if random_.random() < 0.5 else ""
        return random_.choice(["", "-"]) + whole + fraction

    def matches(expression: str, text: str) -> bool:
        return re.fullmatch(expression.replace(" | ", "|").replace("/", ""), text) is not None

    for _ in range(3_000):
        bound, text, exclusive, integral = Decimal(number()), number(), random_.random() < 0.5, random_.random() < 0.4
        if integral and "." in text:
            continue
        value = Decimal(text)
        inclusive = value == bound and not exclusive
        case = f"{bound} {text} {exclusive} {integral}"
        assert matches(numbers.at_least(bound, exclusive, integral), text) == (value > bound or inclusive), case
        assert matches(numbers.at_most(bound, exclusive, integral), text) == (value < bound or inclusive), case
        assert matches(numbers.equal(bound), text) == (value == bound), case
