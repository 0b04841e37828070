"""The server on a real socket, with the `openai` client, and as a process that is told to stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from specdec.errors import ConfigError
from specdec.server.app import ServerConfig, serve
from tests.server.conftest import Server, free_blocks, wait_until

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_chat_with_n_seed_stop_and_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=3, seed=4, max_tokens=10, logprobs=True, top_logprobs=2
    )
    texts = [choice.message.content for choice in reply.choices]
    assert len(texts) == 3
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content[0].top_logprobs) == 2
    again = client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, seed=4, max_tokens=10)
    assert [choice.message.content for choice in again.choices] == texts


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=4, max_tokens=10)
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, seed=4, max_tokens=10, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_json_schema(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
    )
    content = reply.choices[0].message.content
    assert content is not None
    assert json.loads(content).keys() == {"name", "old"}


def test_a_prediction_and_what_became_of_it(client: openai.OpenAI) -> None:
    """OpenAI's predicted outputs, as the client knows them."""
    shape = {"regex": "[a-z]{60}"}
    told = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=4, max_tokens=60, extra_body=shape)
    text = told.choices[0].message.content
    assert text is not None
    predictions: list[tuple[openai.types.chat.ChatCompletionPredictionContentParam, tuple[int, int]]] = [
        ({"type": "content", "content": text}, (60, 0)),
        ({"type": "content", "content": [{"type": "text", "text": text[:20] + "ZZ" + text[20:]}]}, (60, 2)),
    ]
    for prediction, counts in predictions:
        reply = client.chat.completions.create(
            model="tiny", messages=MESSAGES, seed=4, max_tokens=60, prediction=prediction, extra_body=shape
        )
        assert reply.choices[0].message.content == text
        assert reply.usage is not None
        details = reply.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == counts
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, prediction={"type": "content", "content": "x"},
            extra_body={"speculative": False},
        )  # fmt: skip
    assert refused.value.param == "prediction"


def test_completions_and_models(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4, echo=True)
    assert [choice.text[0] for choice in reply.choices] == ["a", "b"]
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_the_client_sees_what_was_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 1000, stream=True)
    assert long.value.code == "context_length_exceeded"


def test_blocks_return_when_a_client_closes_its_socket(server: Server) -> None:
    free = free_blocks(server.loaded)
    aborted = server.loaded.engine.metrics.finished["abort"]
    body = {"prompt": "hi", "max_tokens": 480, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        next(reply.iter_lines())
    wait_until(lambda: not server.loaded.engine.has_work)
    assert server.loaded.engine.metrics.finished["abort"] == aborted + 1
    with socket.create_connection(("127.0.0.1", server.port)) as raw:  # not streamed: the server waits meanwhile
        content = json.dumps(body | {"stream": False}).encode()
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(content), content)
        )
        wait_until(lambda: server.loaded.engine.has_work)
    wait_until(lambda: not server.loaded.engine.has_work)
    assert server.loaded.engine.metrics.finished["abort"] == aborted + 2
    assert free_blocks(server.loaded) == free


def test_headers_above_the_limit_are_refused(server: Server) -> None:
    with contextlib.suppress(httpx.ReadError):  # closed before the client had sent them all
        assert httpx.get(f"{server.url}/v1/models", headers={"x-large": "x" * 200_000}).status_code in (400, 431)
    assert httpx.get(f"{server.url}/health").status_code == 200


POST = """
import http.client, json, sys
body = json.dumps({"prompt": "word " * 200_000})
while True:
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    assert connection.getresponse().status == 400
    connection.close()
"""


def test_large_bodies_of_one_client_leave_steps_short(server: Server) -> None:
    """Prints the time between writes of a stream while another client posts 1 MB bodies."""
    times: dict[str, list[float]] = {"alone": [], "beside": []}
    texts = []
    body = {"prompt": "hi", "max_tokens": 480, "ignore_eos": True, "stream": True, "logprobs": 0, "seed": 1}
    for name, gaps in times.items():
        command = [sys.executable, "-c", POST if name == "beside" else "input()", str(server.port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
                received, last = b"", time.perf_counter()
                for data in reply.iter_raw():
                    gaps.append(time.perf_counter() - last)
                    received, last = received + data, time.perf_counter()
            assert other.poll() is None
            other.kill()
        chunks = [json.loads(line[6:]) for line in received.split(b"\n\n") if line not in (b"", b"data: [DONE]")]
        texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks))
        gaps.sort()
        print(f"{name}: median {gaps[len(gaps) // 2] * 1e3:.2f} ms, p99 {gaps[len(gaps) * 99 // 100] * 1e3:.2f} ms")
        assert gaps[len(gaps) * 99 // 100] < 0.5
    assert texts[0] == texts[1]


SERVE = """
import logging, sys
from specdec.build import Options, build
from specdec.server.app import ServerConfig, create_app, serve
logging.basicConfig(level="INFO", stream=sys.stdout)
options = Options(device="cpu", dtype="float32", max_model_len=1000, kv_cache_tokens=8000)
config = ServerConfig(port=0, shutdown_timeout=30)
serve(create_app(build(sys.argv[1], options), config), config)
"""


class Process:
    """The server as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ()))
        self._reader.start()
        wait_until(lambda: any("serving on" in line for line in self.lines), 60)
        [line] = [line for line in self.lines if "serving on" in line]
        self.url = line.split("serving on ")[1].strip()
        wait_until(self._answers, 30)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> int:
        """Wait for the exit: its code."""
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()


BODY = {"prompt": "hi", "max_tokens": 500, "ignore_eos": True, "n": 4}


def post_in_background(url: str, answers: list[httpx.Response | Exception]) -> threading.Thread:
    def post() -> None:
        try:
            answers.append(httpx.post(f"{url}/v1/completions", json=BODY, timeout=60))
        except httpx.TransportError as error:
            answers.append(error)

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def running(url: str) -> bool:
    return 'num_requests_running{model_name="tiny"} 4.0' in httpx.get(f"{url}/metrics").text


def test_sigterm_finishes_what_runs_refuses_what_is_new_and_exits_cleanly(model_folder: Path) -> None:
    server = Process(model_folder)
    answers: list[httpx.Response | Exception] = []
    thread = post_in_background(server.url, answers)
    wait_until(lambda: running(server.url))
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
    refused = httpx.post(f"{server.url}/v1/completions", json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    thread.join()
    code = server.end()
    [answer] = answers
    assert isinstance(answer, httpx.Response), server.lines
    assert answer.json()["usage"]["completion_tokens"] == 2000
    assert code == 0, server.lines


def test_a_second_sigterm_ends_it_at_once(model_folder: Path) -> None:
    server = Process(model_folder)
    answers: list[httpx.Response | Exception] = []
    thread = post_in_background(server.url, answers)
    wait_until(lambda: running(server.url))
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    server.end()
    assert time.monotonic() - start < 5, server.lines
    thread.join()
    [answer] = answers
    assert isinstance(answer, Exception) or answer.status_code == 503


def test_a_port_in_use_is_one_line(server: Server) -> None:
    with pytest.raises(ConfigError, match=f"port {server.port} of host '127.0.0.1' cannot be had"):
        serve(server.app, ServerConfig(port=server.port))
