"""Bodies without an engine: what is refused, by which name, and how fast."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from specdec.errors import InvalidRequest
from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Lark, Regex, StructuralTag
from specdec.request import Sampling, Speculative
from specdec.server.errors import MAX_MESSAGE, answer
from specdec.server.prepare import constraint, speculative
from specdec.server.schemas import IGNORED, UNSUPPORTED, Body, ChatBody, CompletionBody, parse

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}}
OLD_TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}


def chat(**fields: Any) -> ChatBody:
    return parse(json.dumps({"messages": MESSAGES} | fields).encode(), ChatBody)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{{{",
        b"[1]",
        b'"x"',
        b"null",
        b"{}x",
        b'{"messages": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"json_schema": {"maximum": -1e999}}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"n": 1, "n": 100}',
        b'{"json_schema": {"a": 1, "a": 2}}',
        b'{"messages": "\xff"}',
        b'{"messages": "\\ud800"}',
        '{"messages": []}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000,
    ],
)
def test_what_is_not_one_json_object_of_numbers_and_text_is_refused_at_once(raw: bytes) -> None:
    start = time.thread_time()  # its own: a busy machine may hold it up
    with pytest.raises(InvalidRequest) as refused:
        parse(raw, ChatBody)
    assert time.thread_time() - start < 0.5
    assert refused.value.code in ("invalid_json", "missing_required_parameter")
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": True}, "n"),
        ({"n": "3"}, "n"),
        ({"n": 1.5}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": 1.0}, "top_k"),
        ({"seed": "1"}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"speculative": "off"}, "speculative"),
        ({"speculative": 0}, "speculative"),
        ({"speculative": ["ngram"]}, "speculative"),
        ({"speculative": {"enabled": False}}, "speculative.enabled"),
        ({"speculative": {"method": 1}}, "speculative.method"),
        ({"speculative": {"method": ["ngram"]}}, "speculative.method"),
        ({"speculative": {"max_nodes": True}}, "speculative.max_nodes"),
        ({"speculative": {"max_nodes": "8"}}, "speculative.max_nodes"),
        ({"speculative": {"receipts": 1}}, "speculative.receipts"),
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"content": "text"}}, "prediction.type"),
        ({"prediction": {"type": "text", "content": "text"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": 1}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": ["text"]}}, "prediction.content.0"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content.0.type"),
        ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction.content.0.text"),
        ({"prediction": {"type": "content", "content": "x", "tokens": 1}}, "prediction.tokens"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop.1"),
        ({"stop_token_ids": ["abc"]}, "stop_token_ids.0"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(100_000)}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"chunk": 1}}, "stream_options.chunk"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "color": "red"}]}, "messages.0.color"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls"),
        ({"messages": [3] * 12_000}, "messages"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": "a b"}}},
         "response_format.json_schema.name"),
        ({"structured_outputs": {"yaml": "x"}}, "structured_outputs.yaml"),
        ({"cache_salt": "\0"}, "cache_salt"),
        ({"cache_salt": "x" * 10_000}, "cache_salt"),
        ({"user": "x" * 1_000_000}, "user"),
        ({"user": 1}, "user"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"frobnicate": 1}, "frobnicate"),
        ({f"key{number}": number for number in range(50_000)}, "key0"),
        ({"prompt": "x"}, "prompt"),
        ({"echo": True}, "echo"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.param == param
    told = answer(refused.value)
    assert told.status == 400
    assert told.error["param"] == param
    assert len(told.body) < 2 * MAX_MESSAGE


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_an_unsupported_field_is_refused_by_name_and_taken_where_it_asks_for_nothing(field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**{field: [{"something": 1}]})
    assert (refused.value.param, refused.value.code) == (field, "unsupported_parameter")
    for neutral in (None, *UNSUPPORTED[field]):
        chat(**{field: neutral})


@pytest.mark.parametrize(
    ("asked", "meant", "receipts"),
    [
        (None, True, False),
        (True, Speculative(), False),
        (False, Speculative(max_nodes=0), False),
        ({}, Speculative(), False),
        ({"method": "suffix,ngram", "max_nodes": 4}, Speculative("suffix,ngram", 4), False),
        ({"receipts": True}, Speculative(), True),
    ],
)
def test_speculative_is_short_or_long(asked: object, meant: bool | Speculative, receipts: bool) -> None:
    body = chat(speculative=asked)
    assert speculative(body) == meant
    assert body.receipts is receipts
    assert Sampling(speculative=speculative(body)).guesses == (Speculative() if meant is True else meant)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_a_prediction_is_text_or_parts_of_it(kind: type[Body]) -> None:
    for content in ("ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]):
        fields: dict[str, Any] = {"messages": MESSAGES} if kind is ChatBody else {"prompt": "x"}
        body = parse(json.dumps(fields | {"prediction": {"type": "content", "content": content}}).encode(), kind)
        assert body.prediction is not None
        assert body.prediction.text == "ab"


def test_every_field_is_known_or_refused_never_both() -> None:
    for kind in (ChatBody, CompletionBody):
        assert not kind.model_fields.keys() & UNSUPPORTED.keys()
        assert set(IGNORED) <= kind.model_fields.keys()
        assert set(IGNORED) <= Body.model_fields.keys()


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "f"}}]], ids=["empty", "one"])
def test_tools_are_refused_even_where_there_are_none(tools: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="tools: is not supported"):
        chat(tools=tools)


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 1}, {"best_of": 3}, {"n": 2, "best_of": 1}])
def test_completions_refuse_what_they_cannot_do(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(json.dumps({"prompt": "x"} | fields).encode(), CompletionBody)
    assert refused.value.code == "unsupported_parameter"


def test_a_client_may_send_back_an_assistant_message_as_it_came() -> None:
    message: dict[str, Any] = {
        "role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None,
    }  # fmt: skip
    assert chat(messages=[*MESSAGES, message]).messages[1].content == "yes"


@pytest.mark.parametrize(
    ("fields", "param", "spec"),
    [
        ({}, None, None),
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "response_format", JsonObject()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "response_format.json_schema.schema",
            JsonSchema(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", JsonSchema(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json", JsonSchema(SCHEMA)),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            "structured_outputs.json",
            JsonSchema(SCHEMA, "compact"),
        ),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", JsonObject()),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", Regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice", Choice(("a", "b"))),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar", Ebnf('root ::= "a"')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar", Lark('start: "a"')),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
            "structured_outputs.json",
            JsonSchema(SCHEMA, " ?"),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "property_order": "any"}},
            "structured_outputs.json",
            JsonSchema(SCHEMA, property_order="any"),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
            "structured_outputs.json",
            JsonSchema(SCHEMA),
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema", JsonSchema(SCHEMA)),
        ({"response_format": {"type": "structural_tag", **TAG}}, "response_format", StructuralTag(TAG)),
        ({"response_format": {"type": "structural_tag", **OLD_TAG}}, "response_format", StructuralTag(OLD_TAG)),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
            "structured_outputs.structural_tag",
            StructuralTag(TAG),
        ),
        (
            {"structured_outputs": {"structural_tag": OLD_TAG, "disable_any_whitespace": True}},
            "structured_outputs.structural_tag",
            StructuralTag(OLD_TAG, "compact"),
        ),
        ({"guided_json": SCHEMA}, "guided_json", JsonSchema(SCHEMA)),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " *"}, "guided_json", JsonSchema(SCHEMA, " *")),
        ({"guided_regex": "a+"}, "guided_regex", Regex("a+")),
        ({"guided_choice": ["a"]}, "guided_choice", Choice(("a",))),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", Ebnf('root ::= "a"')),
        ({"regex": "a+"}, "regex", Regex("a+")),
        ({"ebnf": 'root ::= "a"'}, "ebnf", Ebnf('root ::= "a"')),
        ({"grammar": 'root ::= "a"'}, "grammar", Ebnf('root ::= "a"')),
        ({"grammar": '%llguidance {}\nstart: "a"'}, "grammar", Lark('%llguidance {}\nstart: "a"')),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", JsonSchema(SCHEMA)),
    ],
)
def test_every_way_to_ask_for_a_constraint_means_one(fields: dict[str, Any], param: str | None, spec: object) -> None:
    found = constraint(chat(**fields))
    assert found == (None if param is None else (param, spec))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json_object": True, "property_order": "any"}}, "structured_outputs.property_order"),
        ({"structured_outputs": {"json": SCHEMA, "property_order": "mine"}}, "structured_outputs.property_order"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ", "disable_any_whitespace": True}},
         "structured_outputs.whitespace_pattern"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", "a"]}, "guided_choice"),
        ({"regex": "a" * 100_000}, "regex"),
        ({"ebnf": "(" * 60_000}, "ebnf"),
    ],
)  # fmt: skip
def test_two_constraints_or_a_wrong_one_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        constraint(chat(**fields))
    assert refused.value.param == param
