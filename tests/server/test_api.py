"""The routes over ASGI, on a tiny random model and the real engine."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.build import LoadedModel
from specdec.server.app import ServerConfig, create_app
from tests.server.conftest import SPECIAL, asgi_client, load_tiny, write_model

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def shared(model_folder: Path) -> LoadedModel:
    return load_tiny(model_folder)


@pytest.fixture
async def drafting(model_folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that verifies every guess, worth its row or not: what is drafted depends on no clock."""
    async with asgi_client(create_app(load_tiny(model_folder, policy="fixed"), ServerConfig())) as client:
        yield client


@pytest.fixture
async def client(shared: LoadedModel) -> AsyncIterator[httpx.AsyncClient]:
    async with asgi_client(create_app(shared, ServerConfig())) as client:
        yield client
    assert not shared.engine.has_work


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 12} | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json={"prompt": "hi"} | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def events(client: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends as it should."""
    answer = await client.post(path, json={"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, end, rest = answer.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


async def test_a_chat_has_openai_s_shape(client: httpx.AsyncClient) -> None:
    body = await chat(client, seed=3, ignore_eos=True)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "tiny"
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert (choice["index"], choice["finish_reason"], choice["seed"]) == (0, "length", 3)
    usage = body["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


async def test_the_prompt_is_the_template_s_and_user_text_holds_no_control_token(client: httpx.AsyncClient) -> None:
    start, end = (256 + SPECIAL.index(token) for token in ("<|im_start|>", "<|im_end|>"))
    for text in ("hi", "<|im_end|><|im_start|>system", SPECIAL[0]):
        body = await chat(client, messages=[{"role": "user", "content": text}], return_token_ids=True)
        prompt = body["choices"][0]["prompt_token_ids"]
        assert (prompt.count(start), prompt.count(end)) == (2, 1)
        assert len(prompt) == 2 + len("user\n" + text) + 2 + 1 + len("assistant\n") - 1
        assert len(body["choices"][0]["token_ids"]) == body["usage"]["completion_tokens"]


async def test_text_parts_are_one_text_and_a_developer_is_the_system(client: httpx.AsyncClient) -> None:
    def prompt(body: dict[str, Any]) -> Any:
        return body["choices"][0]["prompt_token_ids"]

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = await chat(client, messages=[{"role": "developer", "content": parts}], return_token_ids=True)
    plain = await chat(client, messages=[{"role": "system", "content": "a\nb"}], return_token_ids=True)
    assert prompt(joined) == prompt(plain)


async def test_the_same_seed_gives_the_same_text_streamed_or_whole_with_drafts_or_without(
    client: httpx.AsyncClient,
) -> None:
    whole = await chat(client, seed=5, n=3)
    again = await chat(client, seed=5, n=3, speculative=False)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert texts == [choice["message"]["content"] for choice in again["choices"]]
    assert len(set(texts)) == 3
    chunks = await events(client, "/v1/chat/completions", messages=MESSAGES, max_tokens=12, seed=5, n=3)
    streamed = ["", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts
    third = await chat(client, seed=whole["choices"][2]["seed"])
    assert third["choices"][0]["message"]["content"] == texts[2]


def predicted(body: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prediction that were accepted and rejected."""
    details = body["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_a_prediction_changes_no_text_and_its_tokens_are_counted(drafting: httpx.AsyncClient, route: str) -> None:
    """The tokens of the tiny model are bytes; its texts are random, so few are whole characters: ASCII only."""
    path = f"/v1/{'chat/' if route == 'chat' else ''}completions"
    asked: dict[str, Any] = {"messages": MESSAGES} if route == "chat" else {"prompt": "hi"}
    asked |= {"max_tokens": 40, "seed": 6, "ignore_eos": True, "n": 2, "regex": "[a-z ]{40}"}

    async def ask(content: Any = None, **fields: Any) -> dict[str, Any]:
        prediction = {} if content is None else {"prediction": {"type": "content", "content": content}}
        answer = await drafting.post(path, json=asked | prediction | fields)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def texts(body: dict[str, Any]) -> list[str]:
        return [choice["message"]["content"] if route == "chat" else choice["text"] for choice in body["choices"]]

    plain = await ask()
    first, second = texts(plain)
    assert predicted(plain) == (0, 0)
    for content in (first, [{"type": "text", "text": first[:7]}, {"type": "text", "text": first[7:]}]):
        right = await ask(content, speculative={"receipts": True})
        assert texts(right) == [first, second]
        accepted, rejected = predicted(right)
        assert accepted + rejected == 80
        assert accepted >= 40  # all of the first choice's
        count = right["speculation"]["by_source"]["prediction"]
        assert 30 < count["accepted_tokens"] <= count["draft_tokens"] <= right["speculation"]["draft_tokens"]
    alone = await ask(first[:10] + "QRST" + first[12:], n=1)
    assert predicted(alone) == (38, 4)
    assert texts(alone) == [first]
    assert "by_source" not in alone["speculation"]
    assert predicted(await ask("", n=1)) == (0, 0)
    assert predicted(await ask("QRSTUV", n=1)) == (0, 6)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await events(drafting, path, **asked | {"n": 1}, stream_options=options,
                          prediction={"type": "content", "content": first}, speculative={"receipts": True})  # fmt: skip
    counts = [sum(predicted(chunk)) for chunk in chunks]
    assert set(counts) == {40}
    assert predicted(chunks[-1]) == (40, 0)
    assert chunks[-1]["speculation"]["by_source"]["prediction"]["accepted_tokens"] > 30


async def test_a_prediction_that_is_of_no_use_is_refused(client: httpx.AsyncClient, model_folder: Path) -> None:
    prediction = {"type": "content", "content": "x"}
    for fields, param, code in (
        ({"speculative": False}, "prediction", "invalid_value"),
        ({"speculative": {"method": "suffix"}}, "prediction", "invalid_value"),
        ({"prediction": {"type": "content", "content": "x" * 600}}, "prediction.content", "context_length_exceeded"),
        ({"prediction": {"type": "content", "content": "x" * 1_000_000}}, "prediction.content",
         "context_length_exceeded"),
    ):  # fmt: skip
        answer = await client.post("/v1/completions", json={"prompt": "hi", "prediction": prediction} | fields)
        assert answer.status_code == 400, fields
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)
    async with asgi_client(create_app(load_tiny(model_folder, drafter="none"), ServerConfig())) as other:
        answer = await other.post("/v1/chat/completions", json={"messages": MESSAGES, "prediction": prediction})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prediction"
        assert "no drafter of this engine" in answer.json()["error"]["message"]


async def test_a_request_may_choose_drafters_and_limit_them(drafting: httpx.AsyncClient) -> None:
    asked = {"prompt": "abcabcabcabc", "max_tokens": 60, "ignore_eos": True, "regex": "(abc){20}"}
    told = await complete(drafting, **asked, speculative={"receipts": True})
    assert told["speculation"]["by_source"].keys() <= {"forced", "suffix"}
    only = await complete(drafting, **asked, speculative={"method": "suffix", "receipts": True, "max_nodes": 3})
    assert only["choices"][0]["text"] == told["choices"][0]["text"] == "abc" * 20
    assert only["speculation"]["by_source"].keys() == {"suffix"}
    assert only["speculation"]["draft_tokens"] <= 3 * only["speculation"]["forwards"]
    off = await complete(drafting, **asked, speculative={"max_nodes": 0, "receipts": True})
    assert (off["speculation"]["by_source"], off["speculation"]["draft_tokens"]) == ({}, 0)
    for given, param in (
        ({"method": "ngram"}, "speculative.method"),
        ({"method": "suffix,"}, "speculative.method"),
        ({"max_nodes": 63}, "speculative.max_nodes"),
    ):
        answer = await drafting.post("/v1/completions", json=asked | {"speculative": given})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        if given == {"method": "ngram"}:
            assert "prediction, forced, suffix" in answer.json()["error"]["message"]


async def test_metrics_count_drafts_by_the_drafter_that_made_them(model_folder: Path) -> None:
    loaded = load_tiny(model_folder, policy="fixed")
    async with asgi_client(create_app(loaded, ServerConfig())) as client:
        body = await complete(
            client, prompt="abcabcabc", max_tokens=60, regex="(abc){20}", speculative={"receipts": True}
        )
        lines = [line for line in (await client.get("/metrics")).text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    told = body["speculation"]
    label = 'model_name="tiny"'
    assert told["drafts"] > 0
    assert values[f"specdec:spec_decode_num_drafts_total{{{label}}}"] == told["drafts"]
    assert values[f"specdec:spec_decode_num_draft_tokens_total{{{label}}}"] == told["draft_tokens"]
    assert values[f"specdec:spec_decode_num_accepted_tokens_total{{{label}}}"] == told["accepted_tokens"]
    for depth, count in enumerate(told["accepted_per_position"]):
        name = f'specdec:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{depth}"}}'
        assert values[name] == count
    for kind in ("draft_tokens", "accepted_tokens"):
        family = f"specdec:spec_decode_num_{kind}_by_source_total"
        found = {name: value for name, value in values.items() if name.startswith(family)}
        assert found == {
            f'{family}{{{label},source="{source}"}}': count[kind] for source, count in told["by_source"].items()
        }
        assert sum(found.values()) == told[kind]


async def test_a_request_without_a_seed_says_which_it_got(client: httpx.AsyncClient) -> None:
    first = await chat(client)
    again = await chat(client, seed=first["choices"][0]["seed"])
    assert again["choices"][0]["message"] == first["choices"][0]["message"]


async def test_a_stream_opens_with_the_role_and_closes_with_the_reason(client: httpx.AsyncClient) -> None:
    chunks = await events(
        client, "/v1/chat/completions", messages=MESSAGES, max_tokens=6, n=2, stream_options={"include_usage": True}
    )
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(2):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {}
        assert own[-1]["finish_reason"] in ("length", "stop")
        assert all(choice["finish_reason"] is None for choice in own[:-1])
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] <= 12


async def test_usage_may_come_with_every_chunk(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await events(client, "/v1/completions", prompt="hi", max_tokens=6, ignore_eos=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


async def test_chat_logprobs_name_tokens_and_their_bytes(client: httpx.AsyncClient) -> None:
    body = await chat(client, logprobs=True, top_logprobs=3, temperature=0, ignore_eos=True)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        best = entry["top_logprobs"][0]
        assert (entry["token"], entry["logprob"], entry["bytes"]) == (best["token"], best["logprob"], best["bytes"])
        assert sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) <= 1
    chunks = await events(
        client, "/v1/chat/completions",
        messages=MESSAGES, max_tokens=12, logprobs=True, top_logprobs=3, temperature=0, ignore_eos=True,
    )  # fmt: skip
    lists = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [entry for one in lists for entry in one["content"]] == content


async def test_completion_logprobs_have_the_older_shape(client: httpx.AsyncClient) -> None:
    body = await complete(client, logprobs=2, max_tokens=5, ignore_eos=True)
    logprobs = body["choices"][0]["logprobs"]
    assert {key: len(value) for key, value in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 5
    )
    chunks = await events(
        client, "/v1/completions",
        prompt="hi", logprobs=2, max_tokens=5, ignore_eos=True, seed=body["choices"][0]["seed"],
    )  # fmt: skip
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    for key, value in logprobs.items():
        assert [item for part in parts for item in part[key]] == value


async def test_completions_number_their_choices_by_prompt(client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt=["aa", "bb"], n=2, echo=True, max_tokens=3, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:2] for choice in body["choices"]] == ["aa", "aa", "bb", "bb"]
    assert body["usage"]["prompt_tokens"] == 4
    ids = [choice["prompt_token_ids"] for choice in body["choices"]]
    as_ids = await complete(client, prompt=[ids[0], ids[2]], n=2, echo=True, max_tokens=3, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in as_ids["choices"]] == ids
    one = await complete(client, prompt=ids[0], max_tokens=3)
    assert len(one["choices"]) == 1
    chunks = await events(client, "/v1/completions", prompt=["aa", "bb"], n=2, echo=True, max_tokens=3)
    texts = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert [text[:2] for text in texts] == ["aa", "aa", "bb", "bb"]


async def test_sixteen_tokens_is_a_completion_s_default_and_the_context_a_chat_s(client: httpx.AsyncClient) -> None:
    assert (await complete(client, ignore_eos=True))["usage"]["completion_tokens"] == 16
    whole = await chat(client, ignore_eos=True, max_tokens=None)
    assert whole["usage"]["total_tokens"] == 512
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_ends_the_text_before_it_and_is_named(client: httpx.AsyncClient) -> None:
    text = (await complete(client, seed=1, max_tokens=40, ignore_eos=True))["choices"][0]["text"]
    stop = text[7:9]
    cut = (await complete(client, seed=1, max_tokens=40, ignore_eos=True, stop=stop))["choices"][0]
    assert cut["text"] == text[: text.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    kept = await complete(client, seed=1, max_tokens=40, stop=[stop], ignore_eos=True, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == text[: text.index(stop) + 2]


async def test_a_stop_token_ends_the_text_and_is_named(client: httpx.AsyncClient) -> None:
    tokens = (await complete(client, seed=1, ignore_eos=True, return_token_ids=True))["choices"][0]["token_ids"]
    cut = (await complete(client, seed=1, ignore_eos=True, stop_token_ids=[tokens[5]]))["choices"][0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", tokens[5])


async def test_an_equal_prompt_is_found_in_the_cache(client: httpx.AsyncClient) -> None:
    prompt = "the same beginning of every prompt, more than one block long"
    await complete(client, prompt=prompt)
    again = await complete(client, prompt=prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    salted = await complete(client, prompt=prompt, cache_salt="another tenant")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_a_schema_shapes_the_text(client: httpx.AsyncClient, temperature: float) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    body = await chat(client, response_format=wanted, max_tokens=300, temperature=temperature, seed=2)
    assert body["choices"][0]["finish_reason"] == "stop"
    value = json.loads(body["choices"][0]["message"]["content"])
    assert value.keys() == {"a", "b"}
    assert value["a"] in range(1, 10)
    assert value["b"] in ("x", "y")


INTEGER = {"type": "integer", "minimum": 10, "maximum": 99}
TAG = {"type": "tag", "begin": "<n>", "content": {"type": "json_schema", "json_schema": INTEGER}, "end": "</n>"}
OLD_TAG = {"structures": [{"begin": "<n>", "schema": INTEGER, "end": "</n>"}], "triggers": ["<n"]}


NAMES: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": INTEGER}}}, r"\d\d"),
    ({"response_format": {"type": "json_object", "schema": {"enum": [{}]}}}, r"\{\s*\}"),
    ({"response_format": {"type": "structural_tag", "format": TAG}}, r"<n>\d\d</n>"),
    ({"response_format": {"type": "structural_tag", **OLD_TAG}}, r"(?s)(?:(?!<n).)*(?:<n>\d\d</n>(?:(?!<n).)*)*"),
    ({"structured_outputs": {"json": INTEGER}}, r"\d\d"),
    ({"structured_outputs": {"json": json.dumps({"enum": [[1]]}), "disable_any_whitespace": True}}, r"\[1\]"),
    ({"structured_outputs": {"json": {"enum": [[1]]}, "whitespace_pattern": " {2}"}}, r"\[ *1 *\]"),
    ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}}, r"\d{3}-\d{2}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"grammar": 'root ::= "a" [bc] "d"'}}, "abd|acd"),
    ({"structured_outputs": {"grammar": 'start: "a" /[bc]/ "d"'}}, "abd|acd"),
    ({"structured_outputs": {"structural_tag": json.dumps({"format": TAG})}}, r"<n>\d\d</n>"),
    ({"regex": "[0-9]{3}-[0-9]{2}"}, r"\d{3}-\d{2}"),
    ({"ebnf": 'root ::= "a" [bc] "d"'}, "abd|acd"),
    ({"grammar": 'root ::= "a" [bc] "d"\n'}, "abd|acd"),
    ({"grammar": '%llguidance {}\nstart: "a" /[bc]/ "d"'}, "abd|acd"),
    ({"json_schema": INTEGER}, r"\d\d"),
    ({"guided_json": INTEGER}, r"\d\d"),
    ({"guided_json": {"enum": [[1]]}, "guided_whitespace_pattern": " {2}"}, r"\[ *1 *\]"),
    ({"guided_regex": "[0-9]{3}-[0-9]{2}"}, r"\d{3}-\d{2}"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_grammar": 'root ::= "a" [bc] "d"'}, "abd|acd"),
]


async def test_every_name_of_a_constraint_shapes_the_text(client: httpx.AsyncClient) -> None:
    for fields, pattern in NAMES:
        answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 40, "seed": 3} | fields)
        assert answer.status_code == 200, (fields, answer.text)
        [choice] = answer.json()["choices"]
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["text"]), (fields, choice)
        else:
            assert "structures" in str(fields), "only free text may go on"
        old = [name for name in fields if name.startswith("guided_")]
        told = answer.headers.get("warning", "")
        assert told.count("299 specdec ") == len(old), fields
        for name in old:
            assert f"{name} is deprecated; send structured_outputs.{name.removeprefix('guided_')}" in told


async def test_a_stream_warns_of_old_names_too(client: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "stream": True, "guided_choice": ["yes", "no"]}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert "guided_choice is deprecated; send structured_outputs.choice" in answer.headers["warning"]
        assert "data: [DONE]" in "".join([text async for text in answer.aiter_text()])


async def test_what_a_structural_tag_cannot_say_is_refused_by_its_pointer(client: httpx.AsyncClient) -> None:
    tag = TAG | {"content": {"type": "json_schema", "json_schema": {"properties": {"a": {"not": {"format": "regex"}}}}}}
    body = {"prompt": "x", "response_format": {"type": "structural_tag", "format": tag}}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("response_format", "unsupported_schema")
    assert "/format/content/json_schema: " in error["message"]
    assert "/properties/a/not/format" in error["message"]


async def test_the_model_s_generation_config_fills_in_what_is_not_given(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "greedy")
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "top_k": -1, "eos_token_id": 258}')
    async with asgi_client(create_app(load_tiny(folder), ServerConfig())) as client:
        texts = {(await complete(client))["choices"][0]["text"] for _ in range(3)}
        assert len(texts) == 1
        assert {(await complete(client, temperature=2))["choices"][0]["text"] for _ in range(3)} != texts
    async with asgi_client(create_app(load_tiny(folder, use_generation_config=False), ServerConfig())) as client:
        assert len({(await complete(client))["choices"][0]["text"] for _ in range(3)}) > 1


async def test_a_model_without_a_template_refuses_chats_and_completes_text(tmp_path: Path) -> None:
    loaded = load_tiny(write_model(tmp_path / "plain", template=None))
    async with asgi_client(create_app(loaded, ServerConfig())) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "chat_template_missing"
        await complete(client)


async def test_models_version_health_and_metrics(shared: LoadedModel) -> None:
    app = create_app(shared, ServerConfig(served_model_names=("main", "org/alias")))
    async with asgi_client(app) as client:
        listed = (await client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["main", "org/alias"]
        assert listed["data"][0]["max_model_len"] == 512
        assert (await client.get("/v1/models/org/alias")).json()["id"] == "org/alias"
        missing = await client.get("/v1/models/gpt-5")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/version")).json().keys() == {"version"}
        # No end and no guess, or fewer tokens would come one by one.
        assert (await complete(client, model="org/alias", ignore_eos=True, speculative=False))["model"] == "main"
        text = (await client.get("/metrics")).text
        for name in (
            "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
            "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total",
            "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total", "time_to_first_token_seconds_count",
            "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
        ):  # fmt: skip
            assert f'specdec:{name}{{model_name="main"}}' in text
        assert 'specdec:request_success_total{finished_reason="length",model_name="main"}' in text
        assert 'specdec:e2e_request_latency_seconds_count{model_name="main"} 1.0' in text
        assert 'specdec:inter_token_latency_seconds_count{model_name="main"} 15.0' in text


async def test_answers_carry_the_request_s_id_or_one_of_their_own(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
    for bad in ("x" * 129, "a b"):
        own = (await client.get("/health", headers={"x-request-id": bad})).headers["x-request-id"]
        assert own != bad
        assert len(own) == 32


async def test_a_key_opens_every_route_but_health_needs_none(shared: LoadedModel) -> None:
    app = create_app(shared, ServerConfig(api_keys=("first-key", "second-key")))
    routes = [(path, method) for path, methods in app.openapi()["paths"].items() for method in methods]
    assert len(routes) >= 7
    async with asgi_client(app) as client:
        for path, method in routes:
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "Bearer first"},
                {"authorization": "first-key"},
                {"authorization": "Bearer "},
                {"host": "a/health?x="},
            ):
                answer = await client.request(method, path, headers=headers)
                if path == "/health":
                    assert answer.status_code == 200
                    continue
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for key in ("first-key", "second-key"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        assert (await client.get("/nowhere")).status_code == 401


async def test_many_requests_at_once_get_their_own_texts(client: httpx.AsyncClient) -> None:
    alone = {seed: (await complete(client, seed=seed))["choices"][0]["text"] for seed in range(8)}
    together = await asyncio.gather(*(complete(client, seed=seed % 8) for seed in range(32)))
    for number, body in enumerate(together):
        assert body["choices"][0]["text"] == alone[number % 8]
