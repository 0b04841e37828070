"""The formats of JSON Schema as regular expressions (ECMA-262), calendar rules included. A format that no regular
expression describes is not here. Each is a subset of what its RFC allows; a superset says what is surely not of it.
"""

from __future__ import annotations

_YEAR_ENDS_LEAP = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_YEAR_ENDS_LEAP}|([02468][048]|[13579][26])00)"
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_OFFSET = "([01][0-9]|2[0-3]):[0-5][0-9]"
# Leap seconds are written for UTC only: then they are the last of the day, whatever the date.
_TIME = (
    rf"(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([zZ]|[+\-]{_OFFSET})"
    r"|23:59:60(\.[0-9]+)?([zZ]|[+\-]00:00))"
)
_DURATION_TIME = "(T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S))"
_DURATION_DATE = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_DURATION = f"P({_DURATION_DATE}{_DURATION_TIME}?|{_DURATION_TIME}|[0-9]+W)"

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"({_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE})"
_H16 = "[0-9a-fA-F]{1,4}"
_LS32 = f"({_H16}:{_H16}|{_IPV4})"
# RFC 3986, section 3.2.2.
_IPV6 = (
    "("
    + "|".join(
        [
            f"({_H16}:){{6}}{_LS32}",
            f"::({_H16}:){{5}}{_LS32}",
            f"({_H16})?::({_H16}:){{4}}{_LS32}",
            f"(({_H16}:){{0,1}}{_H16})?::({_H16}:){{3}}{_LS32}",
            f"(({_H16}:){{0,2}}{_H16})?::({_H16}:){{2}}{_LS32}",
            f"(({_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}",
            f"(({_H16}:){{0,4}}{_H16})?::{_LS32}",
            f"(({_H16}:){{0,5}}{_H16})?::{_H16}",
            f"(({_H16}:){{0,6}}{_H16})?::",
        ]
    )
    + ")"
)

# Hyphens as both the third and the fourth character announce punycode, whose rules are no regular language: no such
# label. That a name has at most 253 characters is kept as a length beside the pattern.
_LABEL = "N(N?|HN|H{2}N|H(NH|-N)H{0,58}N)".replace("N", "[a-zA-Z0-9]").replace("H", "[a-zA-Z0-9\\-]")
_HOSTNAME = rf"{_LABEL}(\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_EMAIL = rf"{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL})*"

_PCT = "%[0-9A-Fa-f]{2}"
_SUB_DELIMS = r"!$&'()*+,;="
# RFC 3987, section 2.2: what an IRI may hold beyond a URI, and in its query only.
_UCS = r"\u{a0}-\u{d7ff}\u{f900}-\u{fdcf}\u{fdf0}-\u{ffef}" + "".join(
    rf"\u{{{plane:x}0000}}-\u{{{plane:x}fffd}}" for plane in range(1, 14)
)
_PRIVATE = r"\u{e000}-\u{f8ff}\u{f0000}-\u{ffffd}\u{100000}-\u{10fffd}"


def _resource(more: str = "", more_in_query: str = "") -> tuple[str, str]:
    """URI and relative reference of RFC 3986, appendix A, with `more` unreserved characters."""
    unreserved = rf"a-zA-Z0-9\-._~{more}"
    pchar = rf"([{unreserved}{_SUB_DELIMS}:@]|{_PCT})"
    literal = rf"\[({_IPV6}|[vV][0-9a-fA-F]+\.[a-zA-Z0-9\-._~{_SUB_DELIMS}:]+)\]"
    user = rf"(([{unreserved}{_SUB_DELIMS}:]|{_PCT})*@)?"
    authority = rf"{user}({literal}|([{unreserved}{_SUB_DELIMS}]|{_PCT})*)(:[0-9]*)?"
    after = rf"(\?({pchar}|[/?{more_in_query}])*)?(#({pchar}|[/?])*)?"
    segments = f"(/{pchar}*)*"
    rooted = f"//{authority}{segments}|/({pchar}+{segments})?"
    uri = rf"[a-zA-Z][a-zA-Z0-9+.\-]*:({rooted}|{pchar}+{segments}|){after}"
    relative = rf"({rooted}|([{unreserved}{_SUB_DELIMS}@]|{_PCT})+{segments}|){after}"
    return uri, relative


_URI, _RELATIVE = _resource()
_IRI, _IRI_RELATIVE = _resource(_UCS, _PRIVATE)

_VARCHAR = f"([A-Za-z0-9_]|{_PCT})"
_VARNAME = rf"{_VARCHAR}(\.?{_VARCHAR})*"
_VARSPEC = rf"{_VARNAME}(:[1-9][0-9]{{0,3}}|\*)?"
_TEMPLATE = rf"([{_UCS}!#$&'()*+,\-./0-9:;=?@A-Z\[\]_a-z~]|{_PCT}|\{{[+#./;?&]?{_VARSPEC}(,{_VARSPEC})*\}})*"


def _regex(depth: int) -> str:
    """Regular expressions of ECMA-262 whose groups nest at most `depth` deep, one deep inside look-around: brackets and
    classes that close, and counts behind something that can be counted. What only a reader of the whole could tell is
    left out: back-references, counts and ranges that may be out of order."""
    letter = r"[^\\\^$.*+?()\[\]{}|]"
    properties = r"[pP]\{[A-Za-z_]+(=[A-Za-z_]+)?\}"
    code_point = r"u([0-9a-fA-F]{4}|\{(10[0-9a-fA-F]{4}|[0-9a-fA-F]{1,5})\})"
    other = r"[^a-zA-Z0-9_\u{80}-\u{10ffff}]"
    escape = rf"\\([dDwWsStnvfr0]|c[A-Za-z]|x[0-9a-fA-F]{{2}}|{code_point}|{properties}|{other})"
    ranges = "0-[0-9]|[0-9]-9|a-[a-z]|[a-z]-z|A-[A-Z]|[A-Z]-Z"
    of_letters = rf"\[\^?-?([^\\\]\^\-]|{ranges}|{escape}|\\b)*-?\]"
    counts = "|".join(rf"{n},([{n}-9]|[1-9][0-9]{{1,3}})" for n in range(10))
    more_counts = "|".join(rf"{n}[0-9],([{n + 1}-9][0-9]|[1-9][0-9]{{2,3}})" for n in range(1, 9))
    counted = rf"([*+?]|\{{([0-9]{{1,4}},?|{counts}|{more_counts})\}})\??"
    single = f"({letter}|\\.|{escape}|{of_letters})"
    inside = looking = rf"({single}({counted})?|\\[bB]|[\^$|])*"
    for level in range(depth):
        group = rf"\((\?:|\?<[A-Za-z]\w*>)?{inside}\)"
        around = rf"\(\?<?[=!]{looking}\)"
        inside = rf"(({single}|{group})({counted})?|{around}|\\[bB]|[\^$|])*"
        looking = inside if level == 0 else looking
    return inside


_UUID = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_POINTER = "(/([^/~]|~[01])*)*"

EXPRESSIONS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOSTNAME,
    "idn-hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "iri": _IRI,
    "uri-reference": f"({_URI}|{_RELATIVE})",
    "iri-reference": f"({_IRI}|{_IRI_RELATIVE})",
    "uri-template": _TEMPLATE,
    "uuid": _UUID,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
}
PATTERNS: dict[str, str] = {name: f"^({expression})$" for name, expression in EXPRESSIONS.items()}
for _name in ("email", "idn-email"):  # RFC 5321, section 4.5.3.1
    PATTERNS[_name] = f"^(?=[^@]{{1,64}}@[^@]{{1,253}}$)({EXPRESSIONS[_name]})$"
# The length that goes with a pattern, where the format has one.
MAX_LENGTHS: dict[str, int] = {"hostname": 253, "idn-hostname": 253}
# What everything of a format matches: a string that does not is not of the format.
_ANY_TIME = rf"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+\-]{_OFFSET})"
_NO_URI = r' "<>\\^`{|}'
SUPERSETS: dict[str, str] = {
    **PATTERNS,
    "time": f"^{_ANY_TIME}$",
    "date-time": f"^{_DATE}[tT]{_ANY_TIME}$",
    **dict.fromkeys(("email", "idn-email"), "@"),
    "hostname": r"^[a-zA-Z0-9.\-]*$",
    "idn-hostname": r"^[^ /@]*$",
    **dict.fromkeys(("uri", "iri"), r"^[a-zA-Z][a-zA-Z0-9+.\-]*:"),
    **dict.fromkeys(("uri-reference", "iri-reference"), f"^[^{_NO_URI}]*$"),
    "uri-template": r'^[^ "<>\\^`|]*$',
}
# Formats that no regular expression describes: one that what is written matches, being checked besides, and the reason.
CHECKED: dict[str, tuple[str, str]] = {
    "regex": (f"^({_regex(3)})$", "a regular expression cannot say what a regular expression is")
}

# The first draft in which a format is checked.
FIRST_DRAFTS: dict[str, int] = {
    **dict.fromkeys(("date", "time", "date-time", "email", "idn-email", "hostname", "ipv4", "ipv6", "uri", "regex"), 4),
    **dict.fromkeys(("uri-reference", "uri-template", "json-pointer"), 6),
    **dict.fromkeys(("idn-hostname", "iri", "iri-reference", "relative-json-pointer"), 7),
    **dict.fromkeys(("duration", "uuid"), 2019),
}
