"""Which backend compiles a regular expression changes nothing of what it means: they allow the same texts and the same
tokens, or refuse."""

from __future__ import annotations

import functools
import importlib.util
import random
from collections.abc import Sequence as Seq

import numpy as np
import outlines_core
import pytest

from specdec.errors import ConfigError, InvalidRequest
from specdec.evals.structured import Times, replay_text
from specdec.evals.vocabulary import EvalVocabulary, byte_vocabulary
from specdec.grammar import compile_process, outlines_worker
from specdec.grammar.compile import Compiler
from specdec.grammar.outlines import Automaton
from specdec.grammar.patterns import EMPTY, Class, PatternRefused, Repeat, Sequence
from specdec.grammar.rust_patterns import NOTHING, class_ranges, reduced, without
from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Lark, Regex, Spec
from specdec.mask import TokenMask
from specdec.protocols import Constraint, Grammar
from specdec.tokenizer import Tokenizer
from specdec.tree import root
from tests.grammar.small_tokenizer import END_IDS, SPECIAL_IDS, VOCAB_SIZE, encode, small_tokenizer

BACKENDS = ("llguidance", "xgrammar", "outlines")


@functools.cache
def vocabulary(name: str) -> EvalVocabulary:
    if name == "byte":
        return byte_vocabulary()
    return EvalVocabulary("small", Tokenizer(small_tokenizer().to_str()), VOCAB_SIZE, END_IDS)


def compiler(backend: str, name: str = "small") -> Compiler:
    return compiler_of(backend, name)


@functools.cache
def compiler_of(backend: str, name: str) -> Compiler:
    chosen = vocabulary(name)
    specials = SPECIAL_IDS if name == "small" else chosen.tokenizer.special_ids
    return Compiler(chosen.tokenizer.json, chosen.size, chosen.end_ids, specials, backend=backend)


def row_of(constraint: Constraint, size: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    mask = TokenMask(1, size)
    constraint.mask(root(0), 0, mask)
    words_W = mask.words(0)
    assert words_W is not None
    return words_W


def outcome(backend: str, name: str, pattern: str) -> Grammar | tuple[str, str]:
    """The grammar of a pattern, or how it is refused."""
    try:
        return compiler(backend, name).compile(Regex(pattern))
    except InvalidRequest as error:
        return error.code, error.message


TEXTS = {
    r"[0-9]+(\.[0-9]+)?": (["1", "15", "1.5", "100.25"], ["", ".", "1.", ".5", "1.5.5", "a"]),
    r"(?:ab)+": (["ab", "abab", "ababab"], ["", "a", "aba", "b"]),
    r"a|": (["a", ""], ["aa"]),
    r".": (["a", "é", "日", "😀", "\t", "\r", "\u2028"], ["", "\n", "ab"]),
    r"(?s).": (["\n", "a"], [""]),
    r"\d+": (["7", "٣", "१२"], ["a", "½", "²"]),
    r"\w+": (["aZ_9", "é", "日本", "ß\u0301"], ["-", " ", "😀"]),
    r"\s": ([" ", "\t", "\n", "\r", "\x0b", "\xa0", "\u2028", "\u3000"], ["a", "\u200b", "\ufeff"]),
    r"\S\D\W": (["a-.", "é😀!"], ["a1.", " a.", "aaa"]),
    r"[^a-z]": (["A", "é", "\n", "-"], ["a", "m", ""]),
    r"[]a]+[^]a]": (["]b", "a]\n"], ["b", "]]"]),
    r"[-a]+": (["-a-"], ["b"]),
    r"[a\]\\-]+": (["\\]a-"], ["b", "["]),
    r"[\\]": (["\\"], ["]", "\\]"]),
    r"[a-z&&[^aeiou]]+": (["xyz"], ["a", "xa", "&"]),
    r"[a-c--b]": (["a", "c"], ["b", "-"]),
    r"[[:alpha:]/]+": (["a/B"], ["é", ":", "1"]),
    r"\p{Greek}\pL": (["αb", "ωω"], ["aα", "α1"]),
    r"\P{L}": (["1", "-"], ["a", "é"]),
    r"(?i)k(?-i)k(?i:s|x)": (["Kks", "\u212akS", "kk\u017f"], ["kKs", "kk\u212a"]),
    r"a(?i)b|c": (["aB", "C"], ["AB", ""]),
    r"(?i:[a-c]\x{44}é)": (["Bdé", "cDÉ"], ["dde"]),
    r"\x41\x{1F600}\u0042\U00000043\n\t\.\/": (["A😀BC\n\t./"], ["A😀BC\n\tx/"]),
    r"^a$": (["a"], ["", "^a$"]),
    r"^a$|b": (["a", "b"], ["ab"]),
    r"\A(?:^a|b)(?:c|d$)\z": (["ac", "ad", "bc"], ["acd"]),
    r"^$": ([""], ["a", "$"]),
    r"a\$b": (["a$b"], ["ab"]),
    r"a+?b*?c??": (["abbc", "a"], ["bc"]),
    r"(?U)a+b": (["aab"], ["b"]),
    r"a{2}b{1,}c{0,2}d{1,3}": (["aabd", "aabbbccddd"], ["abd", "aabcccd"]),
    r"(?P<year>\d{4})-(?<month>\d\d)": (["2026-11"], ["2026-1"]),
    r"(a|b)*a(a|b){3}": (["abbb", "aaaaaa"], ["bbbb", "a"]),
    r"[^\s\S]|x": (["x"], ["", "a"]),
    r"x[^\s\S]?y": (["xy"], ["x y"]),
    r"Z[üu]rich(?: (?:8[0-9]{3}))?": (["Zürich", "Zurich 8001"], ["Zrich", "Zürich 8"]),
    r"a{0}": ([""], ["a"]),
}


@pytest.mark.parametrize(
    ("backend", "name"),  # xgrammar takes seconds to start for a vocabulary; the small one has all bytes too
    [*((backend, "small") for backend in BACKENDS), ("llguidance", "byte"), ("outlines", "byte")],
)
@pytest.mark.parametrize("pattern", TEXTS)
def test_every_backend_allows_the_same_texts(pattern: str, backend: str, name: str) -> None:
    grammar = compiler(backend, name).compile(Regex(pattern))
    matching, others = TEXTS[pattern]
    for text in [*matching, *others]:
        stopped = replay_text(grammar, text, vocabulary(name), Times()).place
        assert (stopped is None) == (text in matching), text


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        ("a$b", "invalid_regex"),
        ("a^", "invalid_regex"),
        ("(?:^a)+", "invalid_regex"),
        ("(?=a)b", "invalid_regex"),
        ("(?<!a)b", "invalid_regex"),
        (r"(a)\1", "invalid_regex"),
        (r"\bx", "invalid_regex"),
        ("a(", "invalid_regex"),
        ("a)", "invalid_regex"),
        ("*a", "invalid_regex"),
        ("[z-a]", "invalid_regex"),
        ("a{3,1}", "invalid_regex"),
        ("a{,3}", "invalid_regex"),
        (r"\q", "invalid_regex"),
        (r"\p{Klingon}", "invalid_regex"),
        (r"[^\s\S]", "unsatisfiable"),
        (r"a[^\s\S]+b", "unsatisfiable"),
        ("[a&&b]{2}", "unsatisfiable"),
    ],
)
def test_every_backend_refuses_the_same_patterns(pattern: str, code: str) -> None:
    found = [outcome(backend, "small", pattern) for backend in BACKENDS]
    assert [item[0] for item in found if isinstance(item, tuple)] == [code] * 3
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("backend", ["xgrammar", "outlines"])
@pytest.mark.parametrize(
    ("pattern", "words"),
    [("(?m)a", "flag m"), ("(?x) a b", "flag x"), ("(?-u)a", "flag u"), ("(?R)a", "flag R"), ("a{20000}", "10000")],
)
def test_what_cannot_be_reduced_is_refused_by_name(pattern: str, words: str, backend: str) -> None:
    refused = outcome(backend, "small", pattern)
    assert isinstance(refused, tuple)
    assert refused[0] == "invalid_regex"
    assert words in refused[1]
    assert backend in refused[1]


def random_pattern(rng: random.Random, depth: int = 3) -> str:
    if depth == 0:
        escapes = [r"\d", r"\w", r"\s", r"\S", r"[^\w]", r"\.", r"\u00e9"]
        return str(rng.choice([*"abé1-.", "[a-c1]", "[^ab]", "[]x]", "(?i)k", *escapes]))
    inner = [random_pattern(rng, rng.randrange(depth)) for _ in range(rng.randrange(1, 4))]
    match rng.randrange(4):
        case 0:
            return "".join(inner)
        case 1:
            return f"(?:{'|'.join(inner)})"
        case 2:
            return f"(?:{inner[0]})" + rng.choice(["*", "+", "?", "{2}", "{1,3}", "{2,}", "+?"])
        case _:
            return f"({'|'.join(inner)})" + rng.choice(["", "?", "*"])


def same_rows(grammars: Seq[Grammar], size: int, ends: tuple[int, ...], rng: random.Random) -> int:
    """Walk the grammars together under one random text: each row must be the same in all. How many rows there were."""
    constraints = [grammar.start() for grammar in grammars]
    for step in range(8):
        rows = [row_of(constraint, size) for constraint in constraints]
        for row in rows[1:]:
            np.testing.assert_array_equal(row, rows[0])
        bits = np.unpackbits(rows[0].view(np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits) if token not in ends]
        if not allowed:
            return step + 1
        token = rng.choice(allowed)
        for constraint in constraints:
            constraint.advance([token])
    return 8


@pytest.mark.parametrize("name", ["byte", "small"])
def test_random_patterns_have_the_same_rows_everywhere(name: str) -> None:
    """Not by outlines where a pattern holds U+10FFFF, the one character that it never writes."""
    backends = BACKENDS if name == "small" else ("llguidance", "outlines")
    compared = 0
    for seed in range(40):
        print("seed", seed)
        rng = random.Random(seed)
        pattern = random_pattern(rng)
        patterns = {backend: outcome(backend, name, pattern) for backend in backends}
        grammars = [grammar for grammar in patterns.values() if not isinstance(grammar, tuple)]
        if len(grammars) < len(backends):
            assert not grammars, patterns
            continue
        holds_it = without(reduced(pattern), 0x10FFFF) != reduced(pattern)
        grammars = grammars[:-1] if holds_it else grammars
        compared += same_rows(grammars, vocabulary(name).size, vocabulary(name).end_ids, rng)
    assert compared > 100


def test_outlines_never_writes_the_noncharacter_that_ends_its_patterns() -> None:
    grammar = compiler("outlines", "byte").compile(Regex("(?s)a.*"))
    assert replay_text(grammar, "a\U0010fffe\U000fffff\n", byte_vocabulary(), Times()).place is None
    replay = replay_text(grammar, "a\U0010ffff", byte_vocabulary(), Times())
    assert replay.place == 4  # its last byte cannot follow
    refused = outcome("outlines", "byte", r"\x{10ffff}+")
    assert isinstance(refused, tuple) and refused[0] == "unsatisfiable" and "U+10FFFF" in refused[1]


def test_no_token_leads_into_the_mark_at_the_end_of_an_outlines_pattern() -> None:
    """After a whole text only the end follows, though the mark begins with bytes that are tokens."""
    for pattern, text in [("a", "a"), ("é?", "é"), ("(?:ab){2}", "abab")]:
        constraint = compiler("outlines").compile(Regex(pattern)).start()
        constraint.advance(encode(text))
        allowed = np.flatnonzero(np.unpackbits(row_of(constraint, VOCAB_SIZE).view(np.uint8), bitorder="little"))
        assert tuple(allowed.tolist()) == END_IDS


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_choice_is_one_of_its_strings_by_any_backend(backend: str) -> None:
    options = ["the lazy dog", "the lazy fox", "the", 'say "no"\n', "Zürich\\", "a.b*[c]", "/x/", "$"]
    grammar = compiler(backend).compile(Choice(options))
    for text in [*options, "th", "the lazy", "aXb*[c]", "", "the the"]:
        assert (replay_text(grammar, text, vocabulary("small"), Times()).place is None) == (text in options), text


@pytest.mark.parametrize("backend", ["auto", "llguidance", "xgrammar", "outlines"])
@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (JsonSchema({"type": "integer", "multipleOf": 7}), "ValidatedGrammar"),
        (JsonObject(), "ValidatedGrammar"),
        (Lark('start: "a"'), "LlguidanceGrammar"),
    ],
    ids=str,
)
def test_a_choice_of_backend_never_reaches_what_only_one_enforces(spec: Spec, kind: str, backend: str) -> None:
    grammar = compiler(backend).compile(spec)
    assert type(grammar).__name__ == kind
    if kind == "ValidatedGrammar":
        assert type(grammar.grammar).__name__ == "LlguidanceGrammar"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("auto", "LlguidanceGrammar"),
        ("llguidance", "LlguidanceGrammar"),
        ("xgrammar", "XgrammarGrammar"),
        ("outlines", "Automaton"),
    ],
)
def test_the_backend_that_was_asked_for_compiles_regular_expressions_and_choices(backend: str, kind: str) -> None:
    for spec in (Regex("a+"), Choice(["a"])):
        assert type(compiler(backend).compile(spec)).__name__ == kind
    if backend == "xgrammar":
        assert type(compiler(backend).compile(Ebnf('root ::= "a"'))).__name__ == kind


def test_an_unknown_backend_and_one_that_is_not_installed_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(backend: str) -> Compiler:
        return Compiler(small_tokenizer().to_str(), VOCAB_SIZE, END_IDS, SPECIAL_IDS, backend=backend)

    with pytest.raises(ConfigError, match="must be one of auto, llguidance, xgrammar, outlines, got 'x'"):
        make("x")
    installed = importlib.util.find_spec
    absent = ("outlines_core", "xgrammar")
    monkeypatch.setattr("specdec.grammar.compile.find_spec", lambda name: None if name in absent else installed(name))
    with pytest.raises(ConfigError, match=r"outlines needs the package outlines-core.*specdec\[outlines\]"):
        make("outlines")
    with pytest.raises(InvalidRequest, match=r"text: is EBNF, which needs the package xgrammar") as caught:
        make("auto").compile(Ebnf('root ::= "a"'))
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){22}", "(?:[a-z]{1,1000}){1,1000}"])
def test_an_automaton_that_grows_too_large_is_refused_and_the_next_one_compiles(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_process, "COMPILE_SECONDS", 1.0)
    refused = outcome("outlines", "byte", pattern)
    assert isinstance(refused, tuple)
    assert refused[0] == "too_large"
    monkeypatch.undo()
    assert isinstance(outcome("outlines", "byte", "next one"), Automaton)


def test_a_table_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spelled = {bytes([byte]): [byte] for byte in range(256)} | {outlines_worker.SENTINEL: [256]}
    index = outlines_core.Index("(?:[a-c]{2})\\x{10FFFF}", outlines_core.Vocabulary(257, spelled))
    assert sorted(outlines_worker.automaton(index, 256)[1]["ends"]) == [False, False, True]
    for limit, value in (("MAX_STATES", 2), ("MAX_BYTES", 3 * 32 + 2 * 6 - 1)):
        monkeypatch.setattr(outlines_worker, limit, value)
        assert outlines_worker.automaton(index, 256) == [
            False,
            "has an automaton of 3 states and 6 tokens between them, which is too large",
        ]
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("pattern", "node"),
    [
        ("", EMPTY),
        ("^$", EMPTY),
        ("(?:a){0}", EMPTY),
        ("[^\\s\\S]*", EMPTY),
        ("[^\\s\\S]+", NOTHING),
        ("a", Class(((97, 97),))),
        ("(?:(a))", Class(((97, 97),))),
        ("a{2}", Repeat(Class(((97, 97),)), 2, 2)),
        ("^a.$", Sequence((Class(((97, 97),)), Class(((0, 9), (11, 0xD7FF), (0xE000, 0x10FFFF)))))),
    ],
)
def test_a_pattern_is_reduced_to_ranges_sequences_choices_and_repeats(pattern: str, node: object) -> None:
    assert reduced(pattern) == node


def test_a_class_is_read_as_llguidance_reads_it_whether_small_or_large() -> None:
    assert class_ranges("", "[a-cx/]") == ((47, 47), (97, 99), (120, 120))
    assert class_ranges("", "[^a-cx/]") == (
        *((0, 46), (48, 96), (100, 119), (121, 0xD7FF)),
        (0xE000, 0x10FFFF),
    )
    assert class_ranges("", r"[^\/]") == class_ranges("", "[^/]") == class_ranges("", r"[^\x2f]")
    digits, others = class_ranges("", r"\d"), class_ranges("", r"\D")
    assert sum(high - low + 1 for low, high in (*digits, *others)) == 0x110000 - 0x800
    assert class_ranges("i", "k") == ((75, 75), (107, 107), (0x212A, 0x212A))
    with pytest.raises(PatternRefused):
        class_ranges("", r"\b")
