"""Structural tags: what they mean, what of them is refused, and that xgrammar, whose format it is, takes every text."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema_rs
import pytest
import xgrammar

from specdec.errors import ConstraintError, InvalidRequest
from specdec.evals.structured import Times, Walker, replay_text
from specdec.evals.vocabulary import EvalVocabulary, byte_vocabulary
from specdec.grammar.llguidance import TaggedGrammar
from specdec.grammar.spec import StructuralTag
from specdec.protocols import Grammar
from specdec.tokenizer import Tokenizer
from tests.grammar.small_tokenizer import END_IDS, VOCAB_SIZE, compiler, small_tokenizer
from tests.grammar.test_constraints import row_of, start

BYTES = byte_vocabulary()
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "minimum": 1, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NUMBER = {"type": "number"}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def schema(value: object, **more: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value, **more}


def tag(begin: str, content: Mapping[str, Any], end: object) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def triggered(triggers: list[str], tags: list[dict[str, Any]], **more: object) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **more}


ANY: dict[str, Any] = {"type": "any_text"}
CALLS = [tag("<f=add>", schema(PERSON), "</f>"), tag("<f=set>", schema(NUMBER), "</f>")]
THINK = sequence(tag("<think>", ANY, "</think>"), schema(PERSON))
ADA = '{"name":"Ada","age":36}'

FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": (text("a/b\n"), ["a/b\n"], ["", "a/b"]),
    "regex": (regex(r"^[0-9]+(?:/x)?$"), ["12", "1/x"], ["", "a", "1/"]),
    "any_text": (ANY, ["", "any\n text 日本"], []),
    "any_text without": ({"type": "any_text", "excludes": ["no", "]"]}, ["", "n o"], ["no", "a no b", "x]"]),
    "any_text of few characters": ({"type": "any_text", "max_chars": 3}, ["", "日本!"], ["four"]),
    "json_schema": (schema(PERSON), [ADA, '{\n  "name": "Alan", "age": 120\n}'], ["{}", '{"name":"Ada","age":0}', ""]),
    "json_schema with some whitespace": (
        schema(PERSON, max_whitespace_cnt=2),
        [ADA, '{\n "name":"Ada",  "age":\t36}'],
        ['{   "name":"Ada","age":36}'],
    ),
    "sequence": (sequence(text("x"), regex("[0-9]+"), text("-"), text("y"), ANY), ["x12-y", "x1-y?"], ["x-y", "12-y"]),
    "or": (
        either(text("yes"), tag("<a>", schema(NUMBER), "</a>"), text("no")),
        ["yes", "no", "<a>1.5</a>"],
        ["", "<a>"],
    ),
    "or of schemas": (either(schema({"const": 1}), schema(PERSON)), ["1", ADA], ["2", "{}"]),
    "or before a literal": (sequence(either(regex("[0-9]+")), text("!")), ["12!"], ["!", "12"]),
    "or with nothing": (sequence(either(text("a"), text("")), text("b")), ["ab", "b"], ["a", ""]),
    "or of equal beginnings": (
        either(tag("<a>", schema({"const": 1}), "</a>"), tag("<a>", schema({"const": "x"}), "</b>")),
        ["<a>1</a>", '<a>"x"</b>'],
        ["<a>1</b>", '<a>"x"</a>'],
    ),
    "tag": (tag("<a>", ANY, "</a>"), ["<a></a>", "<a>x<a></a>"], ["<a>", "<a>x</a>y", "x<a></a>"]),
    "tag with two ends": (tag("", ANY, ["</a>", "<end>"]), ["x</a>", "<end>"], ["x", "x</a>y"]),
    "tags in a tag": (
        tag("<t>", sequence(tag("<a>", regex("[a-z]*"), "</a>"), tag("<b>", schema(NUMBER), "</b>")), "</t>"),
        ["<t><a>x</a><b>-1e5</b></t>"],
        ["<t><a>X</a><b>1</b></t>", "<t><a></a></t>"],
    ),
    "thinking, then JSON": (THINK, [f"<think>a < b</think>{ADA}"], [ADA, "<think></think>", f"<think>{ADA}"]),
    "triggered": (
        triggered(["<f="], CALLS),
        ["", "talk <f", f"a<f=add>{ADA}</f>b<f=set>1.5</f>", f"<<f=add>{ADA}</f>"],
        ["<f=", "<f=no>", f"<f=add>{ADA}", f"<f=add>{ADA}</f><f=add></f>", "<f=set>x</f>", "<f=set></f>"],
    ),
    "triggered by two": (
        triggered(["<a", "[b"], [tag("<a>", regex("[0-9]*"), "</a>"), tag("[b", ANY, "]")]),
        ["x<a>1</a>[b]y", "[b<a>]", "<[", "a>"],
        ["<a>x</a>", "[b", "<a"],
    ),
    "triggered at least once": (
        triggered(["<f="], CALLS, at_least_one=True),
        ["<f=set>1</f>", "<f=set>1</f> and <f=set>2</f> more"],
        ["", "text", "text <f=set>1</f>"],
    ),
    "triggered at most once": (
        triggered(["<f="], CALLS, stop_after_first=True),
        ["", "text", "text <f=set>1</f>"],
        ["<f=set>1</f> more", "<f=set>1</f><f=set>1</f>"],
    ),
    "triggered once": (
        triggered(["<f="], CALLS, at_least_one=True, stop_after_first=True),
        ["<f=set>1</f>"],
        ["", "text", " <f=set>1</f>", "<f=set>1</f> "],
    ),
    "triggered without": (
        triggered(["<f="], CALLS, excludes=["<think>"]),
        ["<thin <f=set>1</f> k>"],
        ["<think>", "a <think> <f=set>1</f>"],
    ),
    "triggered in a tag": (
        tag("<all>", triggered(["<f="], CALLS), "</all>"),
        ["<all></all>", "<all>a<f=set>1</f>b</all>"],
        ["<all>", "<all></all>x", "<all><f=set>1</all>"],
    ),
    "triggered once in a tag": (
        tag("<all>", triggered(["<f="], CALLS, stop_after_first=True), "</all>"),
        ["<all></all>", "<all>a<f=set>1</f></all>"],
        ["<all><f=set>1</f>b</all>", "<all><f=set>1</f>"],
    ),
}
OLD = {
    "structures": [
        {"begin": "<f=add>", "schema": PERSON, "end": "</f>"},
        {"begin": "<f=set>", "schema": NUMBER, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_may_reach_across_the_borders_of_parts(name: str) -> None:
    value, good, bad = FORMATS[name]
    grammar = compiler().compile(StructuralTag({"format": value}))
    small = EvalVocabulary("small", Tokenizer(small_tokenizer().to_str()), VOCAB_SIZE, END_IDS)
    for given in (*good, *bad):
        assert (replay_text(grammar, given, small, Times()).place is None) == (given in good), given


@functools.cache
def compiled(tag_json: str) -> Grammar:
    return BYTES.compiler({}).compile(StructuralTag(tag_json))


def finishes(grammar: Grammar, given: str) -> bool:
    """Whether a text is allowed as a whole, and found valid at its end."""
    if replay_text(grammar, given, BYTES, Times()).place is not None:
        return False
    constraint = grammar.start()
    constraint.advance(BYTES.encode(given))
    constraint.finish()
    return True


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_allows_its_texts_and_no_others(name: str) -> None:
    value, good, bad = FORMATS[name]
    grammar = compiled(json.dumps({"type": "structural_tag", "format": value}))
    for given in (*good, *bad):
        assert finishes(grammar, given) == (given in good), given


def test_the_older_form_means_triggered_tags() -> None:
    _, good, bad = FORMATS["triggered"]
    grammar = compiled(json.dumps(OLD))
    for given in (*good, *bad):
        assert finishes(grammar, given) == (given in good), given


@functools.cache
def xgrammar_compiler() -> xgrammar.GrammarCompiler:
    table = BYTES.tokenizer.token_bytes_table()
    spelled = [table[token] if token not in BYTES.end_ids else b"" for token in range(BYTES.size)]
    info = xgrammar.TokenizerInfo(spelled, vocab_size=BYTES.size, stop_token_ids=list(BYTES.end_ids))
    return xgrammar.GrammarCompiler(info, max_threads=1)


def xgrammar_takes(value: Mapping[str, Any], given: str) -> bool:
    matcher = xgrammar.GrammarMatcher(
        xgrammar_compiler().compile_structural_tag(json.dumps({"type": "structural_tag", "format": value})),
        terminate_without_stop_token=True,
    )
    return (not given or matcher.accept_string(given)) and matcher.is_completed()


def changed(good: list[str], bad: list[str], rng: random.Random) -> str:
    """A text made of pieces of some that are allowed and some that are not."""
    made = rng.choice(good)
    for _ in range(rng.randrange(1, 4)):
        other = rng.choice([*good, *bad])
        first, last = sorted(rng.randrange(len(other) + 1) for _ in range(2))
        place, after = sorted(rng.randrange(len(made) + 1) for _ in range(2))
        made = made[:place] + other[first:last] + made[rng.choice([place, after]) :]
    return made


@pytest.mark.parametrize("name", FORMATS)
def test_what_we_allow_xgrammar_does_too(name: str) -> None:
    """Ours is a subset: where a part could end in two places, it ends at the first."""
    value, good, bad = FORMATS[name]
    grammar, taken = compiled(json.dumps({"type": "structural_tag", "format": value})), 0
    for given in good:
        assert xgrammar_takes(value, given), given
    for seed in range(200):
        given = changed(good, bad, random.Random(seed))
        if finishes(grammar, given):
            assert xgrammar_takes(value, given), f"seed {seed}: {given!r}"
            taken += 1
    assert taken


@pytest.mark.parametrize("name", FORMATS)
def test_no_walk_runs_into_a_dead_end_or_breaks_a_schema(name: str) -> None:
    value, good, _ = FORMATS[name]
    grammar, walker = compiled(json.dumps({"type": "structural_tag", "format": value})), Walker(BYTES)
    for seed in range(10):
        rng = random.Random(seed)
        known = BYTES.encode(rng.choice(good))
        known = known[: rng.randrange(len(known) + 1)]
        tokens, outcome, why = walker.walk(grammar, rng, 60, Times(), known)
        assert outcome != "dead_end", f"seed {seed}: {why}"
        if outcome == "finished":
            constraint = grammar.start()
            constraint.advance([*known, *tokens])
            constraint.finish()


@pytest.mark.parametrize(
    ("value", "pointer", "code"),
    [
        ({"format": {"type": "token", "token": 5}}, "/format: the type 'token'", "unsupported_structural_tag"),
        ({"format": {"type": "grammar", "grammar": "root ::= x"}}, "/format: the type", "unsupported_structural_tag"),
        ({"format": {"value": "x"}}, "/format: must be an object with a type", "invalid_structural_tag"),
        ({"format": {"type": "const_string"}}, "/format: const_string needs value", "invalid_structural_tag"),
        ({"format": {**ANY, "include": []}}, "/format/include: is not a field of any_text", "invalid_structural_tag"),
        ({"format": {**ANY, "max_tokens": 5}}, "/format/max_tokens: is not supported", "unsupported_structural_tag"),
        ({"format": {**ANY, "max_chars": -1}}, "/format/max_chars: ", "invalid_structural_tag"),
        ({"format": {**ANY, "excludes": [""]}}, "/format/excludes: ", "invalid_structural_tag"),
        ({"format": text(3)}, "/format/value: must be a string", "invalid_structural_tag"),  # type: ignore[arg-type]
        ({"format": regex("a(")}, "/format/pattern: unclosed group", "invalid_regex"),
        ({"format": regex("(?m)a")}, "/format/pattern: the flag m", "invalid_regex"),
        ({"format": regex(r"[^\s\S]")}, "/format/pattern: no text", "unsatisfiable"),
        ({"format": schema({"not": {"format": "regex"}})}, "/format/json_schema: ", "unsupported_schema"),
        ({"format": schema({"enum": []})}, "/format/json_schema: ", "unsatisfiable"),
        ({"format": schema([])}, "/format/json_schema: must be an object or a boolean", "invalid_structural_tag"),
        ({"format": schema({}, style="qwen_xml")}, "/format/style: ", "unsupported_structural_tag"),
        ({"format": schema({}, any_order=True)}, "/format/any_order: ", "unsupported_structural_tag"),
        ({"format": sequence(ANY, schema({}))}, "must be followed by a const_string", "unsupported_structural_tag"),
        (
            {"format": sequence(regex("a*"), either(text("a"), text("b")))},
            "must be followed",
            "unsupported_structural_tag",
        ),
        ({"format": sequence(schema(NUMBER), text("5"))}, "could go on with '5'", "unsupported_structural_tag"),
        ({"format": sequence(schema(NUMBER), ANY)}, "json_schema must be followed", "unsupported_structural_tag"),
        ({"format": either(text("ab"), text("a"))}, "/format: alternatives begin with", "unsupported_structural_tag"),
        (
            {"format": either(text("a"), text("a"))},
            "/format: two alternatives begin with",
            "unsupported_structural_tag",
        ),
        ({"format": either(ANY, text("a"))}, "/format: alternatives must begin", "unsupported_structural_tag"),
        ({"format": either(schema({}), text('{"'))}, "/format: JSON could begin as", "unsupported_structural_tag"),
        ({"format": sequence(either(text("a"), text("")), schema({}))}, "that is empty", "unsupported_structural_tag"),
        ({"format": tag("<a>", ANY, ["b", "bc"])}, "/format/end: 'bc' begins with 'b'", "unsupported_structural_tag"),
        ({"format": triggered(["<f="], [tag("<g>", ANY, "x")])}, "/format/tags/0/begin: ", "invalid_structural_tag"),
        ({"format": triggered(["<f=", "<g"], CALLS)}, "/format/triggers/1: no tag", "invalid_structural_tag"),
        ({"format": triggered(["<f="], [tag("<f=", ANY, "")])}, "/format: ", "unsupported_structural_tag"),
        ({"format": triggered(["<f"], CALLS, excludes=["<"])}, "'<' is a part of '<f'", "unsupported_structural_tag"),
        ({"format": triggered([""], CALLS)}, "/format/triggers: ", "invalid_structural_tag"),
        ({"format": triggered(["<f="], CALLS, at_least_one=1)}, "/format/at_least_one: ", "invalid_structural_tag"),
        ({"structures": [], "triggers": []}, "/structures: must be a list of 1", "invalid_structural_tag"),
        ({"structures": [{"begin": "<a"}], "triggers": ["<a"]}, "/structures/0: must hold", "invalid_structural_tag"),
        ({"triggers": []}, "must hold format, or structures and triggers", "invalid_structural_tag"),
        (
            {"format": functools.reduce(lambda inner, _: sequence(inner), range(20), text("a"))},
            "nests more than 16 formats",
            "too_large",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_wrong_or_unclear_is_refused_by_its_pointer(value: dict[str, Any], pointer: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BYTES.compiler({}).compile(StructuralTag(value), "response_format")
    assert (caught.value.param, caught.value.code) == ("response_format", code)
    assert pointer in caught.value.message


@pytest.mark.parametrize("value", ["{", "[]", True, 3])
def test_what_is_no_object_is_no_tag(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuralTag(value)
    assert (caught.value.param, caught.value.code) == ("tag", "invalid_structural_tag")


def test_tags_are_equal_by_content_and_keep_the_order_of_keys() -> None:
    assert StructuralTag(OLD) == StructuralTag(json.dumps(OLD, indent=1))
    assert StructuralTag(OLD) != StructuralTag(OLD, whitespace="compact")
    compact = BYTES.compiler({}).compile(StructuralTag({"format": schema(PERSON)}, whitespace="compact"))
    assert finishes(compact, ADA)
    assert not finishes(compact, '{ "name":"Ada","age":36}')
    assert not finishes(compact, '{"age":36,"name":"Ada"}')


def test_each_json_of_a_text_is_judged_by_its_own_schema_at_the_end() -> None:
    """Another validator stands for a grammar that is wrong."""
    grammar = compiled(json.dumps(OLD))
    assert isinstance(grammar, TaggedGrammar)
    stricter = jsonschema_rs.validator_for({"maximum": 5})
    wrong = TaggedGrammar(grammar.grammar, (grammar.validators[0], stricter))
    for given, valid in [(f"a<f=add>{ADA}</f><f=set>5</f> ", True), ("<f=set>1</f><f=set>7</f>", False), ("7", True)]:
        constraint = wrong.start()
        constraint.advance(BYTES.encode(given))
        if valid:
            constraint.finish()
            continue
        with pytest.raises(ConstraintError, match="passed the grammar but not its schema: at the root: 7 is greater"):
            constraint.finish()


def test_special_tokens_are_not_text_between_tags() -> None:
    row = row_of(start(StructuralTag(OLD)))
    assert not row[0] and row[1] and row[2]  # padding, and the two ends
