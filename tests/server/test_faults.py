"""What fails takes only itself along: faults, clients that leave, full queues, shutdown. Blocks always return."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, MutableMapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI

from specdec.batch import Batch
from specdec.build import LoadedModel
from specdec.errors import (
    ConfigError,
    ConstraintError,
    ContextTooLong,
    DeadEnd,
    InvalidRequest,
    NumericalError,
    QueueFull,
    SpecdecError,
)
from specdec.protocols import Forward, Runner
from specdec.server.app import ServerConfig, create_app
from specdec.server.bridge import MAX_FAILURES, Bridge
from specdec.server.errors import ClientGone, Draining, EngineDead, EngineFailed, HttpError, ModelNotFound, answer
from tests.server.conftest import asgi_client, free_blocks, load_tiny

pytestmark = pytest.mark.anyio
LONG: dict[str, Any] = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class Interrupted:
    """A runner in front of the real one; `fault` sees each batch and may raise, or change the logits."""

    def __init__(self, runner: Runner, fault: Callable[[Batch, Forward | None], Forward | None]) -> None:
        self.runner = runner
        self.vocab_size = runner.vocab_size
        self.fault = fault

    def forward(self, batch: Batch, taps: Seq[int] = ()) -> Forward:
        self.fault(batch, None)
        forward = self.runner.forward(batch)
        return self.fault(batch, forward) or forward

    def move(self, sources: Any, targets: Any) -> None:
        self.runner.move(sources, targets)


def bridge_of(app: FastAPI) -> Bridge:
    bridge: Bridge = app.state.service.bridge
    return bridge


async def settled(loaded: LoadedModel) -> None:
    """Wait until the engine has nothing left to do."""
    async with asyncio.timeout(10):
        while loaded.engine.has_work:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_step_fails_what_runs_and_nothing_after_it(loaded: LoadedModel, stream: bool) -> None:
    calls = 0

    def fault(_: Batch, forward: Forward | None) -> None:
        nonlocal calls
        calls += forward is None
        if calls == 20 and forward is None:
            raise RuntimeError("out of memory at 0x7f00, see /home/model")

    loaded.engine.runner = Interrupted(loaded.engine.runner, fault)
    free = free_blocks(loaded)
    async with asgi_client(create_app(loaded, ServerConfig())) as client:
        posts = [client.post("/v1/completions", json=LONG | {"seed": seed, "stream": stream}) for seed in range(3)]
        for failed in await asyncio.gather(*posts):
            if stream:
                *_, error, end, _ = failed.text.split("\n\n")
                assert (failed.status_code, end) == (200, "data: [DONE]")
                body = json.loads(error.removeprefix("data: "))
            else:
                assert failed.status_code == 500
                body = failed.json()
            assert body["error"]["code"] == "internal_error"
            assert "0x" not in failed.text and "home" not in failed.text
        await settled(loaded)
        assert free_blocks(loaded) == free
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/completions", json=LONG)).status_code == 200


async def test_a_panic_in_native_code_is_a_failing_step_like_any_other(loaded: LoadedModel) -> None:
    class Panic(BaseException):
        """As pyo3 raises them: not an Exception."""

    calls = 0

    def fault(_: Batch, forward: Forward | None) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise Panic("index out of bounds")

    loaded.engine.runner = Interrupted(loaded.engine.runner, fault)
    async with asgi_client(create_app(loaded, ServerConfig())) as client, asyncio.timeout(20):
        assert (await client.post("/v1/completions", json=LONG)).status_code == 500
        assert (await client.post("/v1/completions", json=LONG)).status_code == 200


async def test_an_engine_that_keeps_failing_is_dead_and_says_so(loaded: LoadedModel) -> None:
    def fault(_: Batch, forward: Forward | None) -> None:
        raise RuntimeError("broken for good")

    loaded.engine.runner = Interrupted(loaded.engine.runner, fault)
    async with asgi_client(create_app(loaded, ServerConfig())) as client:
        for _ in range(MAX_FAILURES):
            assert (await client.post("/v1/completions", json=LONG)).status_code == 500
        for _ in range(2):
            refused = await client.post("/v1/completions", json=LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
            assert int(refused.headers["retry-after"]) > 0
        health = await client.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
        assert (await client.get("/metrics")).status_code == 200


async def test_logits_that_are_not_numbers_end_their_own_request_only(loaded: LoadedModel) -> None:
    poisoned = 40  # tokens of its prompt

    def fault(batch: Batch, forward: Forward | None) -> Forward | None:
        if forward is None or int(batch.positions_R.max()) < poisoned:
            return None
        logits = forward.logits_LV.clone()
        long_rows = batch.positions_R[batch.logit_rows_L.long()] >= poisoned
        logits[long_rows] = torch.nan
        return Forward(logits, forward.taps)

    loaded.engine.runner = Interrupted(loaded.engine.runner, fault)
    free = free_blocks(loaded)
    async with asgi_client(create_app(loaded, ServerConfig())) as client:
        bad, good = await asyncio.gather(
            client.post("/v1/completions", json={"prompt": "x" * (poisoned + 1), "max_tokens": 4}),
            client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 20, "ignore_eos": True}),
        )
        assert (bad.status_code, bad.json()["error"]["code"]) == (500, "numerical_error")
        assert bad.headers["x-should-retry"] == "false"
        assert good.status_code == 200
        await settled(loaded)
        assert free_blocks(loaded) == free
        assert "specdec:corrupted_requests_total" in (await client.get("/metrics")).text


async def leave_after(app: FastAPI, body: dict[str, Any], seconds: float) -> list[MutableMapping[str, Any]]:
    """Post `body` and close the connection after a while: what the server sent by then."""
    sent: list[MutableMapping[str, Any]] = []
    raw = json.dumps(body).encode()
    incoming = [{"type": "http.request", "body": raw, "more_body": False}]
    left = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, left.set)

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": "", "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    async with asyncio.timeout(10):
        await app(scope, receive, send)
    return sent


async def test_blocks_return_when_clients_leave_at_any_moment(loaded: LoadedModel) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    moments = random.Random(seed)
    app = create_app(loaded, ServerConfig())
    free = free_blocks(loaded)
    async with asgi_client(app) as client:
        bodies = [LONG | {"stream": number % 2 == 0, "n": 1 + number % 3, "seed": number} for number in range(60)]
        await asyncio.gather(*(leave_after(app, body, moments.uniform(0, 0.3)) for body in bodies))
        await settled(loaded)
        assert bridge_of(app).num_requests == 0
        assert free_blocks(loaded) == free
        assert loaded.engine.metrics.finished["abort"] > 0
        assert (await client.post("/v1/completions", json=LONG)).status_code == 200


async def test_a_client_that_leaves_is_a_499(loaded: LoadedModel) -> None:
    app = create_app(loaded, ServerConfig())
    async with asgi_client(app):
        sent = await leave_after(app, LONG, 0.05)
        assert sent[0]["status"] == 499
        streamed = await leave_after(app, LONG | {"stream": True}, 0.05)
        assert streamed[0]["status"] == 200
        assert not any(b"[DONE]" in message.get("body", b"") for message in streamed)


async def test_a_full_queue_is_a_429_that_says_when_to_come_back(model_folder: Path) -> None:
    loaded = load_tiny(model_folder, max_num_seqs=1, max_waiting=2)
    free = free_blocks(loaded)
    async with asgi_client(create_app(loaded, ServerConfig())) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=LONG | {"max_tokens": 50}) for _ in range(20))
        )
        statuses = {answer.status_code for answer in answers}
        assert statuses == {200, 429}
        for refused in answers:
            if refused.status_code == 429:
                assert int(refused.headers["retry-after"]) > 0
                assert refused.json()["error"]["code"] == "queue_full"
        assert (await client.post("/v1/completions", json=LONG)).status_code == 200
        await settled(loaded)
        assert free_blocks(loaded) == free


async def test_prompts_of_one_body_are_admitted_all_or_not_at_all(model_folder: Path) -> None:
    loaded = load_tiny(model_folder, max_num_seqs=1, max_waiting=4)
    waiting = LONG | {"max_tokens": 150}
    app = create_app(loaded, ServerConfig())
    async with asgi_client(app) as client:
        before = [asyncio.create_task(client.post("/v1/completions", json=waiting)) for _ in range(3)]
        while bridge_of(app).num_requests < 3:
            await asyncio.sleep(0.001)
        body: dict[str, Any] = {"prompt": ["a", "b", "c", "d"], "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 429
        assert bridge_of(app).num_requests == 3
        assert {answer.status_code for answer in await asyncio.gather(*before)} == {200}
        await settled(loaded)
        assert loaded.engine.metrics.generation_tokens == 3 * 150
        assert len((await client.post("/v1/completions", json=body)).json()["choices"]) == 4
        body["n"] = 2
        never = await client.post("/v1/completions", json=body)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("stream", [False, True])
async def test_draining_finishes_what_runs_and_refuses_what_is_new(loaded: LoadedModel, stream: bool) -> None:
    app = create_app(loaded, ServerConfig())
    async with asgi_client(app) as client:
        running = asyncio.create_task(client.post("/v1/completions", json=LONG | {"stream": stream}))
        while not loaded.engine.has_work:
            await asyncio.sleep(0.001)
        bridge_of(app).drain()
        refused = await client.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        assert (await client.get("/health")).status_code == 503
        assert not running.done()
        await bridge_of(app).drained()
        finished = await running
        assert finished.status_code == 200
        assert "[DONE]" in finished.text if stream else finished.json()["usage"]["completion_tokens"] == 400


async def test_what_comes_while_the_engine_stops_is_refused(loaded: LoadedModel) -> None:
    """Not left to wait for a thread that has ended."""
    app = create_app(loaded, ServerConfig())
    async with asgi_client(app) as client, asyncio.timeout(20):
        running = asyncio.create_task(client.post("/v1/completions", json=LONG))
        while not loaded.engine.has_work:
            await asyncio.sleep(0.001)
        stopping = asyncio.create_task(bridge_of(app).stop())
        await asyncio.sleep(0)  # it waits for the thread now
        late = await client.post("/v1/completions", json=LONG)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        await stopping
        assert (await running).status_code == 503


# Special tokens are never text, so nothing can follow where a grammar asks for one.
DEAD_END = "start: LETTERS <[256]>\nLETTERS: /[a-z]{%d}/"


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("length", [1, 30])
async def test_a_text_that_nothing_can_follow_is_a_422(loaded: LoadedModel, length: int, speculative: bool) -> None:
    asked = {"prompt": "hi", "max_tokens": 99, "structured_outputs": {"grammar": DEAD_END % length}, "seed": 4}
    free = free_blocks(loaded)
    async with asgi_client(create_app(loaded, ServerConfig())) as client:
        answered = await client.post("/v1/completions", json=asked | {"speculative": speculative})
        assert answered.status_code == 422, answered.text
        error = answered.json()["error"]
        assert (error["code"], error["type"]) == ("constraint_dead_end", "invalid_request_error")
        assert "no token is allowed" in error["message"]
        assert loaded.engine.metrics.dead_ends == 1
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
    assert free_blocks(loaded) == free


async def test_a_stream_that_runs_into_a_dead_end_says_so_in_an_event(loaded: LoadedModel) -> None:
    asked = {"prompt": "hi", "max_tokens": 99, "structured_outputs": {"grammar": DEAD_END % 30}, "seed": 4}
    async with asgi_client(create_app(loaded, ServerConfig())) as client:
        answered = await client.post("/v1/completions", json=asked | {"stream": True})
        assert answered.status_code == 200
        *chunks, failed, end, rest = answered.text.split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        text = "".join(json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks)
        assert 20 < len(text) <= 30  # what was drawn in the step that fails is not sent
        assert json.loads(failed.removeprefix("data: "))["error"]["code"] == "constraint_dead_end"


async def test_stopping_the_server_fails_what_still_runs(loaded: LoadedModel) -> None:
    app = create_app(loaded, ServerConfig())
    free = free_blocks(loaded)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        async with app.router.lifespan_context(app):
            running = asyncio.create_task(client.post("/v1/completions", json=LONG))
            while not loaded.engine.has_work:
                await asyncio.sleep(0.001)
        answer = await running
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert free_blocks(loaded) == free


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("n", "must be at least 1"), 400, "invalid_value"),
        (ContextTooLong("prompt", "is too long"), 400, "context_length_exceeded"),
        (ModelNotFound("model", "is not served"), 404, "model_not_found"),
        (QueueFull("full", 7), 429, "queue_full"),
        (DeadEnd("nothing is allowed"), 422, "constraint_dead_end"),
        (ConstraintError("backend"), 500, "constraint_error"),
        (NumericalError("nan"), 500, "numerical_error"),
        (Draining("stopping"), 503, "draining"),
        (EngineDead("dead"), 503, "engine_dead"),
        (EngineFailed("failed"), 500, "internal_error"),
        (ClientGone("gone"), 499, "client_closed_request"),
        (HttpError(413, "large", "body_too_large"), 413, "body_too_large"),
        (SpecdecError("secret"), 500, "internal_error"),
        (ConfigError("/secret/path"), 500, "internal_error"),
        (ValueError("/secret/path"), 500, "internal_error"),
    ],
)
async def test_every_error_has_one_status_and_one_code(error: Exception, status: int, code: str) -> None:
    told = answer(error)
    assert (told.status, told.error["code"]) == (status, code)
    assert told.error.keys() == {"message", "type", "param", "code"}
    assert "secret" not in told.body.decode()
    if status == 429:
        assert told.headers["retry-after"] == "7"
