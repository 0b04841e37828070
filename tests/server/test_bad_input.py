"""Bad input over ASGI: a clear answer that names the field, at once, and the next request works."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.build import LoadedModel
from specdec.server.app import ServerConfig, create_app
from tests.server.conftest import asgi_client, free_blocks, load_tiny

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def shared(model_folder: Path) -> LoadedModel:
    return load_tiny(model_folder)


@pytest.fixture(scope="module")
async def running(shared: LoadedModel) -> AsyncIterator[httpx.AsyncClient]:
    config = ServerConfig(max_body_bytes=2_000_000, body_timeout=0.3)
    async with asgi_client(create_app(shared, config)) as client:
        yield client


@pytest.fixture
async def client(running: httpx.AsyncClient, shared: LoadedModel) -> AsyncIterator[httpx.AsyncClient]:
    """Checks afterwards that the next request works, and that no block was lost."""
    free = free_blocks(shared)
    yield running
    works = await running.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
    assert works.status_code == 200, works.text
    while shared.engine.has_work:
        await asyncio.sleep(0.001)
    assert free_blocks(shared) == free


def check(answer: httpx.Response, status: int, param: str | None, code: str | None = None) -> None:
    """An error in OpenAI's shape, short, about `param`."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert code is None or error["code"] == code, error
    assert len(answer.content) < 8_000
    assert not any(leak in answer.text for leak in ("Traceback", "site-packages", ".py", " at 0x")), error


CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "z": 1}]}]}, "messages.0.content.0.z"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254"}}]}]},
        "messages.0.content.0.type",
    ),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"messages": MESSAGES * 600}, "messages"),
    ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"chat_template": "{{ 9**9 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
]  # fmt: skip

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 1e9}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": True}, "n"),
    ({"seed": 2**70}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 100_000}, "stop"),
    ({"stop": "x" * 1_000_000}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias.1"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"guided_regexp": "x"}, "guided_regexp"),
    ({"regex": "(?=a)b"}, "regex"),
    ({"regex": r"(a)\1"}, "regex"),
    ({"regex": "("}, "regex"),
    ({"regex": "(" * 8_000}, "regex"),
    ({"guided_regex": "["}, "guided_regex"),
    ({"json_schema": {"type": "strnig"}}, "json_schema"),
    ({"json_schema": {"enum": []}}, "json_schema"),
    ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "json_schema"),
    ({"json_schema": {"$ref": "#/$defs/nowhere"}}, "json_schema"),
    ({"json_schema": {"$ref": "https://example.com/schema.json"}}, "json_schema"),
    ({"json_schema": {"enum": list(range(100_000))}}, "json_schema"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
    ({"ebnf": "root ::= root"}, "ebnf"),
    ({"ebnf": "root ::= nowhere"}, "ebnf"),
    ({"ebnf": "root ::="}, "ebnf"),
    ({"structured_outputs": {"grammar": "(" * 60_000}}, "structured_outputs.grammar"),
    ({"regex": "a", "json_schema": {}}, "json_schema"),
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "structures": [], "triggers": []}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "token", "token": 1}}}, "response_format"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format.schema"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"grammar_lazy": True}, "grammar_lazy"),
    ({"grammar_triggers": [{"type": "word", "value": "x"}]}, "grammar_triggers"),
]

COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [[]]}, "prompt.0"),
    ({"prompt": ["x", 1]}, "prompt.1"),
    ({"prompt": ["x", ""]}, "prompt.1"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": [1, 10**9]}, "prompt.1"),
    ({"prompt": [1, True]}, "prompt.1"),
    ({"prompt": [1, "x"]}, "prompt.1"),
    ({"prompt": [[1], [10**9]]}, "prompt.1.0"),
    ({"prompt": ["x"] * 1000}, "prompt"),
    ({"prompt": [1] * 500_000}, "prompt"),
    ({"prompt": "x" * 512}, "prompt"),
    ({"prompt": "x" * 1_900_000}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"best_of": 10**6}, "best_of"),
    ({"messages": MESSAGES}, "messages"),
]


def shown(case: tuple[dict[str, Any], str]) -> str:
    return json.dumps(case[0])[:40]


@pytest.mark.parametrize("case", [*CHATS, *BOTH], ids=shown)
async def test_a_bad_chat_is_a_400_that_names_the_field(client: httpx.AsyncClient, case: tuple[Any, str]) -> None:
    fields, param = case
    start = time.perf_counter()
    check(await client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 8} | fields), 400, param)
    assert time.perf_counter() - start < 30  # the first grammar loads a library of its own


@pytest.mark.parametrize("case", [*COMPLETIONS, *BOTH], ids=shown)
async def test_a_bad_completion_is_a_400_that_names_the_field(client: httpx.AsyncClient, case: tuple[Any, str]) -> None:
    fields, param = case
    check(await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 8} | fields), 400, param)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_stream_has_its_status_too(client: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "x" * 512, "stream": stream}
    check(await client.post("/v1/completions", json=body), 400, "prompt", "context_length_exceeded")


async def test_an_unknown_model_is_a_404_that_lists_the_known(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"model": "gpt-5", "prompt": "x"})
    check(answer, 404, "model", "model_not_found")
    assert "tiny" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"null", "body"),
        (b'{"prompt": "\\ud800"}', "body"),
        (b'{"prompt": "\xff"}', "body"),
        (b'{"prompt": "x", "temperature": NaN}', "body"),
        (b'{"prompt": ' + b"[" * 100_000, "body"),
        (b'{"prompt": "x", "n": 1, "n": 2}', "n"),
    ],
)
async def test_a_body_that_is_not_json_is_a_400(client: httpx.AsyncClient, content: bytes, param: str) -> None:
    check(await client.post("/v1/completions", content=content, headers=JSON), 400, param, "invalid_json")


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_of_another_type_is_a_415(client: httpx.AsyncClient, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = await client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    check(answer, 415, None, "unsupported_media_type")


async def test_a_body_above_the_limit_is_a_413_unread(client: httpx.AsyncClient) -> None:
    read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(60):
            read += 1
            yield b"x" * 1_000_000

    check(await client.post("/v1/completions", content=chunks(), headers=JSON), 413, None, "body_too_large")
    announced = await client.post("/v1/completions", content=b"{}", headers=JSON | {"content-length": "60000000"})
    check(announced, 413, None, "body_too_large")


async def test_a_body_that_does_not_arrive_is_a_408(client: httpx.AsyncClient) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b'{"prompt"'
        await asyncio.sleep(60)

    check(await client.post("/v1/completions", content=slow(), headers=JSON), 408, None, "body_timeout")


async def test_too_many_headers_are_a_431(client: httpx.AsyncClient) -> None:
    headers = {f"x-header-{number}": "x" for number in range(500)}
    check(await client.get("/v1/models", headers=headers), 431, None)


async def test_two_lengths_of_one_body_are_a_400(client: httpx.AsyncClient) -> None:
    headers = JSON | {"content-length": "2", "transfer-encoding": "chunked"}
    check(await client.post("/v1/completions", content=b"{}", headers=headers), 400, None)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/completions/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("GET", "/v1/models/%0d%0aevil", 404),
    ],
)
async def test_unknown_routes_have_openai_s_shape(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    answer = await client.request(method, path, headers={"origin": "https://evil.example"})
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_unique_names_and_salts_leave_no_trace_in_metrics(client: httpx.AsyncClient) -> None:
    before = (await client.get("/metrics")).text.count("\n")
    for number in range(50):
        await client.post("/v1/completions", json={"prompt": "x", "model": f"model-{number}"})
        body = {"prompt": "x", "max_tokens": 1, "cache_salt": f"salt-{number}", "user": f"user-{number}"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert (await client.get("/metrics")).text.count("\n") == before
