"""The evaluation of grammars: what it reads, what it counts, and that a wrong grammar cannot pass it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ConfigError, ModelError
from specdec.evals.cases import Case, Instance, Number, parse, read_cases, read_remotes, write
from specdec.evals.orders import Orders, ranks
from specdec.evals.rivals import rival_compiler
from specdec.evals.second_opinion import SecondOpinion
from specdec.evals.structured import Settings, Times, Walker, measure, replay_text, schema_compiler
from specdec.evals.vocabulary import EvalVocabulary, byte_vocabulary, open_vocabulary
from specdec.grammar.spec import JsonSchema
from specdec.protocols import Grammar
from specdec.tokenizer import Tokenizer
from tests.grammar.small_tokenizer import END_IDS, VOCAB_SIZE, small_tokenizer

DATA = Path(os.environ.get("SPECDEC_SHARED", Path(__file__).parents[3] / "shared" / "data"))
SUITE = DATA / "JSON-Schema-Test-Suite"


def data(path: Path) -> Path:
    """A file or folder of the evaluation data; skips the test where it is not there."""
    if not path.exists():
        pytest.skip(f"{path} is not there; SPECDEC_SHARED names the folder with the evaluation data")
    return path


def small_vocabulary() -> EvalVocabulary:
    return EvalVocabulary("small", Tokenizer(small_tokenizer().to_str()), VOCAB_SIZE, END_IDS)


VOCABULARIES: list[Callable[[], EvalVocabulary]] = [byte_vocabulary, small_vocabulary]


def case(schema: object, valid: list[Any], invalid: list[Any], name: str = "case") -> Case:
    tests = [Instance(f"valid {i}", True, value) for i, value in enumerate(valid)]
    tests += [Instance(f"invalid {i}", False, value) for i, value in enumerate(invalid)]
    return Case(name, json.dumps(schema), tuple(tests))


def evaluate(cases: list[Case], settings: Settings, vocabulary: EvalVocabulary | None = None) -> dict[str, Any]:
    vocabulary = vocabulary or byte_vocabulary()
    return measure(cases, vocabulary, schema_compiler(vocabulary, settings, {}), settings)


# Reading


@pytest.mark.parametrize(
    "text",
    ["1.0", "1e5", "1E-3", "-0", "12345678901234567890.50", '{"b":1.50,"a":[true,null]}', '"\x7f\\ud800é\\n"'],
)
def test_a_value_is_written_as_it_was_read(text: str) -> None:
    assert write(parse(text)) == text


def test_a_line_of_a_file_may_hold_any_character_and_numbers_keep_their_spelling(tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    lines = [
        '{"id": "a", "schema": {"const": "x\u2028y\u0085"}, "tests": [{"valid": true, "data": [1.0, {"z": 1e5}]}]}',
        '{"id": "b", "schema": {"minimum": 1.0}, "valid": ["1E0"], "invalid": ["01"]}',
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    first, second = read_cases([file])
    assert json.loads(first.schema) == {"const": "x\u2028y\u0085"}
    assert first.tests == (Instance("0", True, [Number("1.0"), {"z": Number("1e5")}]),)
    assert second.schema == '{"minimum":1.0}'
    assert second.tests == (Instance("1E0", True, text="1E0"), Instance("01", False, text="01"))
    (with_dialect, _) = read_cases([file], "7")
    assert json.loads(with_dialect.schema)["$schema"] == "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[", "jsonl:1: is not JSON"),
        ('{"id": "a", "schema": {}}', "jsonl:1: must hold id, schema, and tests or valid and invalid"),
        ('{"id": "a", "schema": {}, "tests": [{}]}', "jsonl:1: must hold"),
        ('{"id": "a", "schema": {}, "valid": [NaN], "invalid": []}', "NaN is not JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_cases([file])


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    for reading in (
        lambda: read_cases([tmp_path / "none.jsonl"]),
        lambda: read_cases([tmp_path]),
        lambda: read_cases([], "5"),
        lambda: read_remotes(tmp_path / "none"),
    ):
        with pytest.raises(ConfigError, match=r"none|holds no|draft must be one of"):
            reading()
    with pytest.raises(ModelError, match="none"):
        open_vocabulary(str(tmp_path / "none.json"))


def test_a_folder_of_the_suite_says_its_draft(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "draft7"
    (folder / "optional").mkdir(parents=True)
    group = {
        "description": "d",
        "schema": {"type": "null"},
        "tests": [{"description": "t", "valid": True, "data": None}],
    }
    for file in (folder / "type.json", folder / "optional" / "other.json"):
        file.write_text(json.dumps([group, {**group, "schema": True}]))
    first, second = read_cases([folder])
    assert json.loads(first.schema) == {"$schema": "http://json-schema.org/draft-07/schema#", "type": "null"}
    assert (first.id, second.schema) == ("type/d", "true")


# Orders


def test_every_order_of_the_keys_comes_once_and_ranked_keys_first() -> None:
    orders = Orders({"a": Number("1"), "b": [{"c": None, "d": True}]}, {"b": 0, "a": 1})
    texts = list(iter(orders.next, None))
    assert texts[0] == '{"b":[{"c":null,"d":true}],"a":1}'
    assert len(set(texts)) == len(texts) == 4


def test_orders_that_begin_as_a_refused_text_are_passed_over() -> None:
    keys = "abcdef"
    orders = Orders(dict.fromkeys(keys), {})
    wanted = '{"f":null,"e":null,"d":null,"c":null,"b":null,"a":null}'
    text, tries = orders.next(), 1
    while text is not None and text != wanted:
        text = orders.next(next(i for i, (one, other) in enumerate(zip(text, wanted, strict=True)) if one != other))
        tries += 1
    assert text == wanted
    assert tries <= 6 * 5 / 2 + 1 < len(list(permutations(keys)))


def test_keys_are_ranked_as_the_schema_names_them() -> None:
    schema = {"allOf": [{"properties": {"z": {"properties": {"y": {}}}, "a": {}}}], "required": ["m", "z"]}
    assert list(ranks(schema)) == ["m", "z", "a", "y"]
    assert list(ranks({"not": {"enum": [1, {"q": {"r": [{"s": 0}]}}]}, "required": ["t"]})) == ["t", "q", "r", "s"]
    assert list(ranks({"dependencies": {"u": ["v", "w"], "x": {"properties": {"y": {}}}}})) == ["u", "x", "v", "w", "y"]


# Counting


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_each_instance_is_counted_once(vocabulary: Callable[[], EvalVocabulary]) -> None:
    cases = [
        case({"type": "object", "properties": {"a": {}, "b": {}}}, [{"a": 1, "b": "Zürich"}], [3, "a"], "right"),
        case({"properties": {"a": {}, "b": {}}, "type": "object"}, [{"b": 1, "a": 2}], [], "reordered"),
        case({"enum": []}, [], [1, 2], "nothing satisfies it"),
        case({"type": "integer", "minimum": 5, "maximum": 1}, [7], [8], "wrongly called unsatisfiable"),
        case({"not": {"const": 3, "x": [{"type": "foo"}]}, "type": "foo"}, [1], [], "refused"),
    ]
    found = evaluate(cases, Settings(walks=3, seed=7), vocabulary())
    assert found["tests"] == 9
    assert found["tests"] == found["right"] + found["accepted_invalid"] + found["rejected_valid"] + found["refused"]
    assert (found["right"], found["rejected_valid"], found["refused"]) == (5, 1, 3)
    assert (found["schemas"], found["compiled"], found["unsatisfiable"]) == (5, 2, 2)
    assert found["walks"] == 6
    ends = ("walks_valid", "walks_dead_end", "walks_unfinished", "walks_invalid")
    assert found["walks"] == sum(found[end] for end in ends)
    assert {entry["id"] for entry in found["failing"] if not entry["outcome"].startswith("walk")} == {
        "reordered/valid 0",
        "wrongly called unsatisfiable",
        "refused",
    }
    json.dumps(found, allow_nan=False)
    any_order = evaluate(cases, Settings(walks=0, any_order=True), vocabulary())
    assert (any_order["right"], any_order["rejected_valid"]) == (6, 0)


def test_a_grammar_of_any_json_is_found_out_by_both_replays_and_walks() -> None:
    vocabulary, settings = byte_vocabulary(), Settings(walks=20, seed=1)
    compiler = vocabulary.compiler({})

    def lying(schema: str) -> Grammar:
        return compiler.compile(JsonSchema({}))

    found = measure([case({"type": "integer"}, [3], ["a", 1.5])], vocabulary, lying, settings)
    assert found["accepted_invalid"] == 2
    assert found["walks_invalid"] > 0
    reasons = [entry["reason"] for entry in found["failing"] if entry["outcome"] == "walk_invalid"]
    assert any("is not valid" in reason for reason in reasons)


def test_what_the_second_judge_reads_otherwise_is_listed_once_a_schema() -> None:
    found = evaluate([case({"type": "string", "pattern": r"^\p{L}$"}, ["é"], [])], Settings(walks=5))
    (excused,) = found["second_opinion"]["excused"]
    assert (excused["id"], excused["walks"]) == ("case", found["walks_valid"])
    assert "cannot judge" in excused["reason"]


def test_other_orders_do_not_let_an_invalid_instance_through_unseen() -> None:
    """A grammar that accepts an instance in another order accepts it."""
    vocabulary, settings = byte_vocabulary(), Settings(walks=0, any_order=True)
    compiler = vocabulary.compiler({})
    grammar = compiler.compile(JsonSchema({"type": "object", "properties": {"a": {}, "b": {}}}))
    schema = {"type": "object", "properties": {"a": {}, "b": False}}
    found = measure([case(schema, [], [{"b": 1, "a": 2}])], vocabulary, lambda _: grammar, settings)
    assert found["accepted_invalid"] == 1


def test_a_text_that_is_not_compact_is_replayed_as_it_is() -> None:
    schema = '{"type":"object","additionalProperties":{"type":"integer"}}'
    texts = ['{"a":' + " " * 99 + "1}", '{"a": 1}', '{"a":01}']
    found = evaluate(
        [
            Case(
                "spelling",
                schema,
                tuple(Instance(text, " 1" in text[:7] and len(text) < 9, text=text) for text in texts),
            )
        ],
        Settings(walks=0, any_order=True),
    )
    assert found["right"] == 3, found["failing"]


def test_documents_that_are_missing_are_counted_apart() -> None:
    cases = [case({"$ref": "http://localhost:1234/none.json"}, [1], [2])]
    found = evaluate(cases, Settings())
    assert (found["tests"], found["schemas"]) == (0, 0)
    assert found["missing_remotes"] == {"tests": 2, "ids": ["case"]}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_replay_does_not_depend_on_how_the_tokenizer_would_cut_the_text(
    vocabulary: Callable[[], EvalVocabulary],
) -> None:
    made = vocabulary()
    schema = {"type": "object", "properties": {"city": {"enum": ["Zürich", "name"]}}, "required": ["city"]}
    grammar = made.compiler({}).compile(JsonSchema(schema))
    for text in ('{"city":"Zürich"}', '{"city": "name"}', '{\n  "city": "name"\n}'):
        assert replay_text(grammar, text, made, Times()).place is None
    refused = replay_text(grammar, '{"city":"x"}', made, Times())
    assert refused.place in (8, 9)
    cut = replay_text(grammar, '{"city":"name"', made, Times())
    assert cut.place == 14
    assert "cannot end" in cut.reason


def test_walks_are_drawn_from_their_seed_alone() -> None:
    vocabulary = byte_vocabulary()
    grammar = vocabulary.compiler({}).compile(JsonSchema({"type": "array"}))
    walker = Walker(vocabulary)
    walks = [walker.walk(grammar, random.Random(seed), 50, Times()) for seed in (1, 1, 2)]
    assert walks[0] == walks[1] != walks[2]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(
    "schema",
    [{"type": "string"}, {"type": "array"}, {"type": "object", "required": ["a", "b"]}, {"type": "integer"}, True],
    ids=str,
)
def test_a_text_that_is_to_end_does_so_as_soon_as_brackets_and_quotes_allow(
    schema: Any, vocabulary: Callable[[], EvalVocabulary]
) -> None:
    made = vocabulary()
    grammar, walker = made.compiler({}).compile(JsonSchema(schema)), Walker(made)
    for seed in range(20):
        start, outcome, _ = walker.walk(grammar, random.Random(seed), 30, Times())
        if outcome == "unfinished":
            more, outcome, _ = walker.close(grammar, random.Random(seed), 60, Times(), start, [])
            text = b"".join(map(made.tokenizer.token_bytes, [*start, *more]))
            assert (outcome, len(more) < 50) == ("finished", True), text
            json.loads(text)


def test_a_text_that_is_to_end_goes_on_as_valid_ones_do_where_it_cannot_close() -> None:
    needle = case({"type": "string", "pattern": "abcdef"}, ["abcdef", "xabcdefy"], [""], "needle")
    found = evaluate([needle], Settings(walks=20))
    assert found["walks_long"] == 20
    assert found["long"] == [{"id": "needle", "walks": 20}]
    assert found["walks_unfinished"] <= 4


def test_a_text_that_may_not_end_is_unfinished_however_it_is_drawn() -> None:
    vocabulary, settings = byte_vocabulary(), Settings(walks=4)
    endless = vocabulary.compiler({}).compile(JsonSchema({"type": "string", "minLength": 1_000}))
    found = measure([case({"type": "string"}, ["a"], [])], vocabulary, lambda _: endless, settings)
    assert (found["walks_unfinished"], found["walks_valid"]) == (4, 0), found
    assert found["walks_long"] == 4


def test_a_vocabulary_spells_what_its_tokenizer_cannot() -> None:
    vocabulary = byte_vocabulary()
    for text in ("", '{"a":"Zürich \U0001f600"}', "\x00\x7f"):
        tokens = vocabulary.encode(text)
        assert b"".join(map(vocabulary.tokenizer.token_bytes, tokens)) == text.encode()
    assert (vocabulary.size, vocabulary.end_ids) == (257, (256,))


# The official suite and schemas of the field


@pytest.mark.parametrize(
    ("draft", "made", "least"), [("draft2020-12", byte_vocabulary, 0.93), ("draft7", small_vocabulary, 0.91)]
)
def test_nothing_invalid_of_the_official_suite_is_accepted(
    draft: str, made: Callable[[], EvalVocabulary], least: float
) -> None:
    cases = read_cases([data(SUITE / "tests" / draft)])
    settings, remotes = Settings(formats="annotate", walks=0), read_remotes(data(SUITE / "remotes"))
    vocabulary = made()
    found = measure(cases, vocabulary, schema_compiler(vocabulary, settings, remotes), settings, remotes)
    assert found["right"] >= least * found["tests"]
    assert [entry for entry in found["failing"] if entry["outcome"] == "accepted_invalid"] == []
    assert found["missing_remotes"]["tests"] == (10 if draft == "draft7" else 0)


@pytest.mark.parametrize("backend", ["xgrammar", "outlines"])
def test_what_other_libraries_make_of_a_schema_is_measured_by_the_same_rules(backend: str) -> None:
    items = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}
    cases = [case(items, [[], [True], [True, False]], [[True, True], 3], "items"), case({"type": "x"}, [], [1], "type")]
    found = measure(cases, byte_vocabulary(), rival_compiler(byte_vocabulary(), backend), Settings(walks=4))
    assert (found["accepted_invalid"], found["rejected_valid"], found["refused"]) == (1, 0, 1)
    [repeats] = [entry for entry in found["failing"] if entry["outcome"] == "accepted_invalid"]
    assert repeats["id"] == "items/invalid 0"
    [refused] = [entry for entry in found["failing"] if entry["outcome"] == "refused"]
    assert refused["reason"]


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specdec", "eval", "structured", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])


def test_the_command_prints_and_writes_the_report_of_what_was_asked(tmp_path: Path) -> None:
    file, report, remotes = tmp_path / "cases.jsonl", tmp_path / "report.json", tmp_path / "remotes"
    remotes.mkdir()
    (remotes / "whole.json").write_text('{"type": "integer"}')
    lines = [
        {"id": "draft", "schema": {"maximum": 3, "exclusiveMaximum": True}, "valid": ["2"], "invalid": ["3"]},
        {"id": "remotes", "schema": {"$ref": "http://localhost:1234/whole.json"}, "valid": ["1"], "invalid": ["null"]},
        {"id": "formats", "schema": {"type": "string", "format": "date"}, "valid": ['"x"'], "invalid": ["1"]},
        {"id": "order", "schema": {"properties": {"a": {}, "b": {}}}, "valid": ['{"b":1,"a":2}'], "invalid": []},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--tokenizer", "byte", "--draft", "4", "--remotes", remotes, "--formats", "annotate"]
    flags += ["--property-order", "any", "--walks", "3", "--seed", "5", "--whitespace", "compact", "--json", report]
    done = run_command(file, *flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert [entry for entry in found["failing"] if not entry["outcome"].startswith("walk_unfinished")] == []
    assert (found["tests"], found["right"], found["compiled"], found["walks"], found["seed"]) == (7, 7, 4, 12, 5)
    assert found["backend"] == "llguidance"
    assert "seed 5" in done.stdout
    assert found.keys() >= {
        *("tests", "right", "accepted_invalid", "rejected_valid", "refused", "unsatisfiable", "schemas", "compiled"),
        *("walks", "walks_valid", "walks_dead_end", "walks_unfinished", "walks_invalid", "walks_long", "long"),
        *("compile_ms", "mask_us", "failing"),
    }
    wrong = run_command(tmp_path / "none.jsonl")
    assert wrong.returncode == 2
    assert "none.jsonl: cannot be read" in wrong.stderr


def test_the_second_judge_excuses_only_what_it_reads_otherwise() -> None:
    judge = SecondOpinion.find({}, assert_formats=True)
    assert judge is not None
    assert judge.problem('{"type":"integer"}', "3") == (None, None)
    problem, excuse = judge.problem('{"type":"integer"}', '"a"')
    assert problem is not None
    assert excuse is None
    for schema, text in (
        ('{"pattern":"^\\\\p{L}$"}', '"é"'),
        ('{"not":{"type":"integer"}}', "-1835013105483979.91"),
        ('{"type":"integer"}', "2e871"),
        ('{"anyOf":[{"format":"ipv4"},{"type":"null"}]}', '"x"'),
        ('{"multipleOf":0.01}', "4.47"),
    ):
        problem, excuse = judge.problem(schema, text)
        assert problem is None
        assert excuse is not None
