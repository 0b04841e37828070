"""The process that tries specs out, and what needs none: the same verdicts, whatever way a spec goes."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specdec
from specdec.errors import InvalidRequest
from specdec.grammar import trial
from specdec.grammar.building import on_stack
from specdec.grammar.compile import Compiler
from specdec.grammar.llguidance import compile_llguidance
from specdec.grammar.reading import packed, read, unpacked
from specdec.grammar.small import is_plain, is_small
from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Lark, Regex, Spec, StructuralTag
from specdec.grammar.trial import TooCostly, try_out
from tests.grammar.small_tokenizer import VOCAB_SIZE, compiler, llguidance_tokens, new_compiler, small_tokenizer
from tests.grammar.test_constraints import ENDLESS, SCHEMAS, row_of
from tests.server.hard_constraints import wide

TAG = StructuralTag({"structures": [{"begin": "<f>", "schema": SCHEMAS[0], "end": "</f>"}], "triggers": ["<f"]})


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        ("[ab]{3}( \\w+){1,4}", True),
        ("(a|b)*a(a|b){20}", True),
        ("(a+)+b", True),
        ("[a{9999}]{2}\\{9999}", True),
        ("x" * 257, False),
        (".{0,10000}", False),
        ("a{2001,}", False),
        ("((a{1,300}){1,300}){1,300}", False),
        ("(a{50}b){50}", False),
    ],
)
def test_a_pattern_is_plain_if_it_is_short_with_its_counts_written_out(pattern: str, plain: bool) -> None:
    assert is_plain(pattern) is plain


@pytest.mark.parametrize(
    ("spec", "small"),
    [
        (JsonObject(), True),
        *((JsonSchema(schema), True) for schema in SCHEMAS[:4]),
        (TAG, True),
        (JsonSchema(wide(200)), True),
        (JsonSchema(wide(201)), False),
        (JsonSchema({"patternProperties": {"^a": {}}}), False),
        (JsonSchema({"enum": list(range(501))}), False),
        (JsonSchema({"items": {"pattern": "a{3000}"}}), False),
        (JsonSchema({"description": "x" * 16_000}), False),
        (JsonSchema({"allOf": [{"not": {"const": number}} for number in range(4)]}), False),
        (Regex("[ab]+"), True),
        (Choice(["a", "b"]), True),
        (Choice(["a" * 16_001]), False),
        (Lark('start: "a" /[bc]{3}/'), True),
        (Lark('start: %json {"type": "object"}'), False),
        (Lark("start: T\nT: /a*/ & ~/aaa/"), False),
        (Ebnf('root ::= "a"'), False),
    ],
    ids=lambda value: str(value)[:50],
)
def test_small_specs_need_no_process(spec: Spec, small: bool) -> None:
    assert is_small(spec) is small
    if small:
        fresh = new_compiler()
        fresh.compile(spec).start()
        assert fresh._trials is None


@pytest.mark.parametrize(
    "spec",
    [*map(JsonSchema, SCHEMAS), JsonSchema({"items": {"type": "integer"}, "uniqueItems": True}), TAG, JsonObject()],
    ids=lambda value: str(value)[:50],
)
def test_a_reading_comes_back_from_json_as_it_was(spec: Spec) -> None:
    tokens = llguidance_tokens()
    reading = read(
        spec, "x", lambda regex, name: compile_llguidance(regex, tokens, name), remotes={}, spelling=tokens.spelling
    )
    again = unpacked(json.loads(json.dumps(packed(reading))), spec, {})
    assert packed(again) == packed(reading)
    for one, other in zip(reading.schemas, again.schemas, strict=True):
        assert one.prepared.draft == other.prepared.draft
        assert (one.prepared.residue is None) == (other.prepared.residue is None)


@pytest.mark.parametrize(
    "spec",
    [
        JsonSchema(SCHEMAS[10]),
        JsonSchema({"type": "array", "uniqueItems": True}),
        JsonSchema({"type": "string", "format": "regex", "pattern": "(?=a)"}),
        JsonSchema({"enum": []}),
        JsonSchema({"$ref": "#"}),
        Regex("[ab]{3}"),
        Regex("(?=a)b"),
        Lark('start: "a" start | "b"'),
        Lark("start: start"),
        TAG,
        StructuralTag({"format": {"type": "nothing"}}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_process_gives_the_same_grammar_or_refusal(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = shared()
    outcomes: list[object] = []
    for make in (compiler().compile, tried(fresh, monkeypatch)):
        try:
            outcomes.append(row_of(make(spec, "here").start()).tobytes())
        except InvalidRequest as error:
            outcomes.append((error.param, error.message, error.code))
    assert fresh._trials is not None
    assert outcomes[0] == outcomes[1]


@functools.cache
def shared() -> Compiler:
    """A compiler whose process does several of these tests."""
    return new_compiler()


def tried(fresh: Compiler, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`fresh.compile` for a compiler to which no spec is small."""
    monkeypatch.setattr("specdec.grammar.compile.is_small", lambda spec: False)
    return fresh.compile


def test_a_grammar_under_which_no_text_can_be_written_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"too complex: token \d+ of a text under it cannot be written") as caught:
        new_compiler().compile(Regex(ENDLESS))
    assert caught.value.code == "too_large"


def test_a_slow_row_is_too_costly_if_it_is_slow_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = llguidance_tokens()
    grammar = compile_llguidance(Regex("[ab]+"), tokens, "pattern")
    try_out(grammar, tokens.vocabulary, tokens.token_bytes())
    monkeypatch.setattr(trial, "MAX_TOKEN_SECONDS", 1e-9)
    with pytest.raises(TooCostly, match="processor time"):
        try_out(grammar, tokens.vocabulary, tokens.token_bytes())


def children(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children")
    if not listed.exists():
        pytest.skip("needs the list of children in /proc")
    return [int(text) for text in listed.read_text().split()]


def test_what_takes_too_much_cpu_is_ended_and_the_process_goes_on() -> None:
    fresh = new_compiler()
    fresh.compile(Regex("a{3000}"))
    assert fresh._trials is not None
    process = fresh._trials._process
    rules = "".join(f'r{i}: r{i + 1} r{i + 1} | "a" r{i + 1}\n' for i in range(300))
    began = time.process_time()
    with pytest.raises(InvalidRequest, match=r"2 seconds of processor time|too complex") as caught:
        fresh.compile(Lark(f'start: r0\n{rules}r300: "a" | ""\n'))
    assert (caught.value.code, time.process_time() - began < 1) == ("too_large", True)
    fresh.compile(Regex("a{3001}"))
    assert fresh._trials._process is process
    assert process.poll() is None
    assert children(process.pid) == []


def test_a_process_that_was_killed_starts_again_and_ends_with_its_compiler() -> None:
    fresh = new_compiler()
    fresh.compile(Regex("a{3000}"))
    assert fresh._trials is not None
    first = fresh._trials._process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    fresh.compile(Regex("a{3001}"))
    second = fresh._trials._process
    assert second is not first
    del fresh
    gc.collect()
    assert second.poll() is not None


def test_a_script_without_a_guard_can_compile_what_is_large(tmp_path: Path) -> None:
    """The process runs a program of its own, never the main module again."""
    script = tmp_path / "script.py"
    (tmp_path / "tokenizer.json").write_text(small_tokenizer().to_str())
    script.write_text(f"""
import pathlib, sys
print("main")
sys.path.insert(0, {str(Path(specdec.__file__).parents[1])!r})
from specdec.grammar.compile import Compiler
from specdec.grammar.spec import Regex
text = pathlib.Path({str(tmp_path)!r}, "tokenizer.json").read_text()
Compiler(text, {VOCAB_SIZE}, (1, 2), frozenset((0, 1, 2))).compile(Regex("a{{3000}}")).start()
""")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "main\n", "")


def test_work_runs_on_a_stack_as_large_as_it_says_and_raises_what_it_raises() -> None:
    assert on_stack(2**20, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        on_stack(2**20, lambda: 1 // 0)
