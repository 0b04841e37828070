"""What the compiler takes, what it refuses, and how fast it refuses what is too large."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.errors import ConfigError, InvalidRequest
from specdec.grammar import compile_process
from specdec.grammar.compile import Compiler
from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Lark, Regex, Spec, written_grammar
from specdec.mask import TokenMask
from specdec.tree import root
from tests.grammar.small_tokenizer import (
    END,
    END_IDS,
    SPECIAL_IDS,
    TOOL,
    VOCAB_SIZE,
    compiler,
    new_compiler,
    small_tokenizer,
)

NARROW = TOOL - 9


@pytest.mark.parametrize(
    ("spec", "param", "code", "words"),
    [
        (JsonSchema({"$ref": "https://example.org/s"}), "schema", "unsupported_schema", "example.org"),
        (JsonSchema({"type": "string", "pattern": "(?=a)b"}), "schema", "unsupported_schema", "look-around"),
        (JsonSchema({"type": "foo"}), "schema", "invalid_schema", "foo"),
        (JsonSchema({"properties": 3}), "schema", "invalid_schema", "/properties: 3 is not of type"),
        (JsonSchema({"$ref": "#/$defs/none"}), "schema", "invalid_schema", "none"),
        (JsonSchema({"enum": []}), "schema", "unsatisfiable", "no value"),
        (JsonSchema({"type": "integer", "minimum": 5, "maximum": 1}), "schema", "unsatisfiable", "no value"),
        (JsonSchema({"$ref": "#"}), "schema", "invalid_schema", "leads back"),
        (JsonSchema({"items": {"$ref": "#"}, "minItems": 1, "type": "array"}), "schema", "unsatisfiable", "no value"),
        (Regex("a("), "pattern", "invalid_regex", "unclosed group"),
        (Regex("(?=a)b"), "pattern", "invalid_regex", "look-around"),
        (Regex(r"(a)\1"), "pattern", "invalid_regex", "backreferences"),
        (Regex("a$b"), "pattern", "invalid_regex", "lookarounds"),
        (Regex(r"[^\s\S]"), "pattern", "unsatisfiable", "no text"),
        (Ebnf("root ::= x"), "text", "invalid_grammar", "not defined"),
        (Ebnf('root ::= "a" é'), "text", "invalid_grammar", "column 14: Unexpected character"),
        (Ebnf('root ::= "a'), "text", "invalid_grammar", "string literal"),
        (Ebnf('other ::= "a"'), "text", "invalid_grammar", "root"),
        (Ebnf("root ::= root"), "text", "unsatisfiable", "root"),
        (Lark("start: x"), "text", "invalid_grammar", "unknown name"),
        (Lark('a: "b"'), "text", "invalid_grammar", "start"),
        (Lark('start: "a'), "text", "invalid_grammar", "lexer error"),
        (Lark("start: /(?=a)b/"), "text", "invalid_grammar", "regex"),
        (Lark("start: <|nowhere|>"), "text", "invalid_grammar", "special token"),
        (Lark('start: %json {"not": {}}'), "text", "invalid_grammar", "not"),
        (Lark("start: start"), "text", "unsatisfiable", "no text"),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused_by_name(spec: Spec, param: str, code: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler().compile(spec)
    error = caught.value
    assert (error.param, error.code) == (param, code)
    assert words in error.message
    assert len(error.message) <= 300
    for noise in ("\n", ".cc:", "start:", "non-verbose", "Enable"):
        assert noise not in error.message
    with pytest.raises(InvalidRequest) as renamed:
        compiler().compile(spec, "response_format.json_schema.schema")
    assert renamed.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    "spec",
    [
        Regex(""),
        Regex("a|"),
        Choice(["x"]),
        Ebnf('root ::= "a" | ""'),
        Lark('start: "a" | "" // either'),
        Lark('%llguidance {}\nstart: %json {"type": "integer"}'),
        Lark("%import common.INT\nstart: INT"),
        Lark("start: /" + ":" * 2_000 + "/"),
        JsonObject(),
        JsonSchema("{}"),
        Regex("a|b"),
        JsonSchema({"type": "object", "minProperties": 1}),
        JsonSchema({"type": "object", "minProperties": 2, "required": ["a", "b"]}),
        JsonSchema({"type": "object", "properties": {f"p{i}": {} for i in range(1_900)}}),
    ],
    ids=str,
)
def test_what_can_be_written_compiles(spec: Spec) -> None:
    mask = TokenMask(1, VOCAB_SIZE)
    compiler().compile(spec).start().mask(root(0), 0, mask)
    assert allowed(mask).any()


def allowed(mask: TokenMask) -> NDArray[np.bool_]:
    """The first row, which must have words."""
    row = mask.allowed(0)
    assert row is not None
    return row


def test_what_is_no_spec_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="grammar: must be one of JsonSchema"):
        new_compiler().compile({"type": "object"})  # type: ignore[arg-type]


def test_a_language_that_needs_a_token_the_model_lacks_is_refused() -> None:
    """Only special tokens could write it, and those are not text."""
    letters = [t for t, text in ((i, small_tokenizer().decode([i])) for i in range(VOCAB_SIZE)) if "q" in text]
    with pytest.raises(InvalidRequest) as caught:
        Compiler(small_tokenizer().to_str(), VOCAB_SIZE, END_IDS, SPECIAL_IDS | frozenset(letters)).compile(Regex("q+"))
    assert caught.value.code == "unsatisfiable"


@pytest.mark.parametrize("ends", [(), (VOCAB_SIZE,), (1, -1)])
def test_end_tokens_must_exist(ends: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="end_ids"):
        Compiler(small_tokenizer().to_str(), VOCAB_SIZE, ends, SPECIAL_IDS)


def test_a_file_that_is_no_tokenizer_is_named() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        Compiler('{"model": 3}', VOCAB_SIZE, END_IDS, SPECIAL_IDS).compile(JsonObject())


@pytest.mark.parametrize(
    ("spec", "ends", "vocab_size"),
    [
        (Regex("(?s).{2}"), (40,), VOCAB_SIZE),
        (Regex("(?s).{2}"), (40, VOCAB_SIZE - 1), VOCAB_SIZE),
        (Regex("(?s).{2}"), (END, TOOL), VOCAB_SIZE),
        (Regex("(?s).{2}"), (40,), NARROW),
        (Ebnf("root ::= [^x] [^x]"), (40,), NARROW),
    ],
    ids=str,
)
def test_any_token_may_be_the_end_and_logits_may_be_of_any_width(
    spec: Spec, ends: tuple[int, ...], vocab_size: int
) -> None:
    """The end may be text or padding elsewhere; a tokenizer may hold added tokens that the model has no row for."""
    constraint = Compiler(small_tokenizer().to_str(), vocab_size, ends, SPECIAL_IDS).compile(spec).start()
    mask = TokenMask(1, vocab_size)
    constraint.mask(root(0), 0, mask)
    assert allowed(mask)[41]
    assert not any(allowed(mask)[end] for end in ends)
    assert not int(mask.stacked().view(np.uint32)[0, -1]) >> (vocab_size & 31 or 32)
    constraint.advance([41, 42])
    constraint.mask(root(0), 0, mask)
    assert tuple(np.flatnonzero(allowed(mask))) == ends


def test_one_end_token_must_be_the_tokenizers() -> None:
    with pytest.raises(ConfigError, match="none of the end tokens"):
        Compiler(small_tokenizer().to_str(), VOCAB_SIZE, (VOCAB_SIZE - 1,), SPECIAL_IDS).compile(JsonObject())


DEEP = 100_000


@pytest.mark.parametrize(
    "make",
    [
        lambda: JsonSchema('{"items":' * DEEP + "{}" + "}" * DEEP),
        lambda: JsonSchema("[" * DEEP),
        lambda: JsonSchema('{"items":' * 80 + "{}" + "}" * 80),
        lambda: JsonSchema('{"description":"' + "x" * 300_000 + '"}'),
        lambda: JsonSchema({"enum": list(range(200_000))}),
        lambda: JsonSchema({"properties": {f"p{i}": {} for i in range(2_100)}}),
        lambda: JsonSchema({"anyOf": [{"const": i} for i in range(2_100)]}),
        lambda: JsonSchema({"enum": [{"a": i} for i in range(2_100)]}),
        lambda: Regex("(" * 9_000),
        lambda: Choice([f"option {i}" for i in range(6_000)]),
        lambda: Choice(["x" * 65_000]),
        lambda: Ebnf("root ::= " + "(" * 60_000),
        lambda: Ebnf("root ::= " + "(" * 300 + '"a"' + ")" * 300),
        lambda: Ebnf("".join(f"r{i} ::= r{i + 1}\n" for i in range(2_000))),
        lambda: Ebnf('root ::= "' + "a" * 70_000 + '"'),
        lambda: Lark("start: " + "(" * 60_000),
        lambda: Lark("start: " + "[" * 300 + '"a"' + "]" * 300),
        lambda: Lark("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2_000))),
        lambda: Lark('start: "' + "a" * 70_000 + '"'),
    ],
)
def test_what_is_too_large_is_refused_at_once(make: object) -> None:
    assert callable(make)
    before = time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert time.process_time() - before < 0.5  # about 0.03 s; the bound leaves room for a busy machine
    assert caught.value.code == "too_large" or "options: must hold 1 to" in str(caught.value)


def test_a_schema_that_contains_itself_is_refused() -> None:
    cycle: dict[str, object] = {}
    cycle["items"] = cycle
    doubling: dict[str, object] = {}
    for _ in range(60):
        doubling = {"anyOf": [doubling, doubling]}
    schemas: list[dict[str, object]] = [cycle, doubling]
    for schema in schemas:
        with pytest.raises(InvalidRequest) as caught:
            JsonSchema(schema)
        assert caught.value.code == "too_large"


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: JsonSchema("{"), "schema"),
        (lambda: JsonSchema("3"), "schema"),
        (lambda: JsonSchema("null"), "schema"),
        (lambda: JsonSchema({}, formats="some"), "formats"),  # type: ignore[arg-type]
        (lambda: JsonSchema('{"minimum": 1e999}'), "schema"),
        (lambda: JsonSchema('{"minimum": ' + "9" * 5000 + "}"), "schema"),
        (lambda: JsonSchema('{"const": "\\ud800"}'), "schema"),
        (lambda: JsonSchema({"const": object()}), "schema"),
        (lambda: JsonSchema({1: 2}), "schema"),  # type: ignore[dict-item]
        (lambda: JsonSchema({"x-guidance": {"lenient": True}, "not": {}}), "schema"),
        (lambda: JsonSchema({}, whitespace="some"), "whitespace"),
        (lambda: JsonSchema({}, whitespace=r"\s*"), "whitespace"),
        (lambda: JsonSchema({}, whitespace="[^a]"), "whitespace"),
        (lambda: JsonSchema({}, whitespace=" (,)?"), "whitespace"),
        (lambda: JsonSchema({}, whitespace="( "), "whitespace"),
        (lambda: JsonSchema({}, whitespace=""), "whitespace"),
        (lambda: JsonSchema({}, whitespace=" " * 300), "whitespace"),
        (lambda: JsonObject(whitespace=3), "whitespace"),  # type: ignore[arg-type]
        (lambda: Lark('start: %json {"x-guidance": {"lenient": true}}'), "text"),
        (lambda: Lark(3), "text"),  # type: ignore[arg-type]
        (lambda: Regex(3), "pattern"),  # type: ignore[arg-type]
        (lambda: Regex("\ud800"), "pattern"),
        (lambda: Choice([]), "options"),
        (lambda: Choice("abc"), "options"),
        (lambda: Choice(["a", "a"]), "options"),
        (lambda: Choice([""]), "options"),
        (lambda: Choice([3]), "options"),  # type: ignore[list-item]
        (lambda: Ebnf(b"root"), "text"),  # type: ignore[arg-type]
    ],
)
def test_a_spec_names_the_field_that_is_wrong(make: object, param: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('root ::= "a"', Ebnf),
        ('# a comment\n\n  root::="a"', Ebnf),
        ('start: "a"', Lark),
        ('%llguidance {}\nstart: "::="', Lark),
        ('// root ::= "a"\nstart: "a"', Lark),
        ("", Lark),
    ],
)
def test_a_grammar_says_its_notation_by_its_rules(text: str, kind: type) -> None:
    assert written_grammar(text) == kind(text)


def test_specs_with_equal_content_are_equal_and_keep_the_order_of_keys() -> None:
    schema: dict[str, object] = {"properties": {"zebra": {}, "apple": {}, "mango": {}}}
    assert JsonSchema(schema) == JsonSchema(json.dumps(schema, indent=2))
    assert hash(JsonSchema(schema)) == hash(JsonSchema(json.dumps(schema)))
    assert list(json.loads(JsonSchema(schema).text)["properties"]) == ["zebra", "apple", "mango"]
    assert Choice(["a", "b"]) == Choice(("a", "b"))
    assert JsonSchema(schema) != JsonSchema(schema, whitespace="compact")


def test_grammars_are_cached_by_content_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.grammar.compile.MAX_CACHED_BYTES", 4_000_000)  # nineteen small ones
    fresh = new_compiler()
    first = fresh.compile(Regex("first"))
    assert fresh.compile(Regex("first")) is first
    for index in range(10):
        fresh.compile(Regex(f"number {index}"))
    assert fresh.compile(Regex("first")) is first
    for index in range(20):
        fresh.compile(Regex(f"again {index}"))
    assert fresh.compile(Regex("first")) is not first
    fresh.compile(Choice([f"option {index}" for index in range(1_000)]))
    assert fresh.compile(Regex("first")) is not fresh.compile(Regex("again 19"))
    assert fresh._cached_bytes <= 4_000_000


def test_threads_may_compile_and_start_together() -> None:
    fresh = new_compiler()
    specs: list[Spec] = [JsonObject(), Regex("[a-z]+"), Choice(["x", "y"]), JsonSchema({"type": "array"})]
    rows: dict[tuple[int, int], bytes] = {}
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for turn in range(20):
                number = (thread + turn) % len(specs)
                constraint = fresh.compile(specs[number]).start()
                mask = TokenMask(1, VOCAB_SIZE)
                constraint.mask(root(0), 0, mask)
                rows[thread, number] = mask.stacked().tobytes()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for number in range(len(specs)):
        assert len({row for (_, which), row in rows.items() if which == number}) == 1


def test_xgrammar_is_imported_only_when_ebnf_is_compiled() -> None:
    program = """
import sys
from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Regex
from tests.grammar.small_tokenizer import new_compiler
compiler = new_compiler()
for spec in (JsonObject(), JsonSchema({"type": "array"}), Regex("a+"), Choice(["x"])):
    compiler.compile(spec).start()
assert not {"xgrammar", "transformers", "torch"} & set(sys.modules), "loaded too early"
compiler.compile(Ebnf('root ::= "a"'))
assert "xgrammar" in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 30 nullable rules take xgrammar longer than a second; a thousand, for ever."""
    monkeypatch.setattr(compile_process, "COMPILE_SECONDS", 1.0)
    rules = "".join(f"r{i} ::= r{i + 1} r{i + 1} | [a-z] r{i + 1}\n" for i in range(300))
    fresh = new_compiler()
    with pytest.raises(InvalidRequest) as caught:
        fresh.compile(Ebnf(f'root ::= r0\n{rules}r300 ::= "a" | ""\n'))
    assert (caught.value.param, caught.value.code) == ("text", "too_large")
    assert "within 1 seconds" in caught.value.message
    fresh.compile(Ebnf('root ::= "a"')).start()


def test_the_process_ends_with_its_compiler() -> None:
    process = compile_process.CompileProcess("outlines_worker.py")
    child = process._process
    del process
    gc.collect()
    assert child.poll() is not None
