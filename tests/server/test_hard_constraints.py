"""Constraints made to hold a server up: a clear answer soon, other texts go on, and so does the server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from specdec.build import LoadedModel
from specdec.server.app import ServerConfig, create_app
from tests.server.conftest import Server, asgi_client, load_tiny
from tests.server.hard_constraints import HARD, HARD_EBNF, Hard

pytestmark = pytest.mark.anyio
OWN_CPU_SECONDS = 2.0  # of the server itself; the process beside it has as many
FEW = ("300^3 letters", "rules of Lark that are nothing", "60 closed objects deep", "an empty enum")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def shared(model_folder: Path) -> LoadedModel:
    return load_tiny(model_folder)


@pytest.fixture(scope="module")
async def client(shared: LoadedModel) -> AsyncIterator[httpx.AsyncClient]:
    async with asgi_client(create_app(shared, ServerConfig())) as running:
        yield running


async def check(client: httpx.AsyncClient, hard: Hard) -> None:
    """The right status, and the next constraint works."""
    answer = await client.post("/v1/completions", json=hard.body, timeout=60)
    assert answer.status_code == (200 if hard.code is None else 400), answer.text
    if hard.code is not None:
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (hard.field, hard.code)
        assert len(answer.content) < 1_000
    works = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, "regex": "[ab]{3}"})
    assert works.status_code == 200, works.text
    assert set(works.json()["choices"][0]["text"]) <= set("ab")


@pytest.mark.parametrize("hard", HARD, ids=lambda hard: f"{hard.field}: {hard.name}")
async def test_a_hard_constraint_is_answered_soon(client: httpx.AsyncClient, hard: Hard) -> None:
    began = time.process_time()
    await check(client, hard)
    assert time.process_time() - began < OWN_CPU_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("hard", HARD_EBNF, ids=lambda hard: hard.name)
async def test_hard_ebnf_is_answered(client: httpx.AsyncClient, hard: Hard) -> None:
    pytest.importorskip("xgrammar")
    await check(client, hard)


POST = """
import http.client, json, sys
for body in json.load(sys.stdin):
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    print(answer.status, flush=True)
    connection.close()
"""


@pytest.mark.slow
def test_a_text_goes_on_while_hard_constraints_come(server: Server) -> None:
    """Prints the time between the tokens of one text, alone and while another client sends all of them."""
    times: dict[str, list[float]] = {"alone": [], "beside": []}
    body = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": True, "seed": 1}
    texts = set()
    for name, gaps in times.items():
        command = [sys.executable, "-c", POST if name == "beside" else "input()", str(server.port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdin is not None
            if name == "beside":
                json.dump([hard.body for hard in HARD], other.stdin)
                other.stdin.close()
            received = b""
            while (name == "beside" and other.poll() is None) or not gaps:
                with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
                    received, last = b"", time.perf_counter()
                    for data in reply.iter_raw():
                        gaps.append(time.perf_counter() - last)
                        received, last = received + data, time.perf_counter()
                chunks = [json.loads(line[6:]) for line in received.split(b"\n\n") if line[6:7] == b"{"]
                texts.add("".join(chunk["choices"][0]["text"] for chunk in chunks))
            other.kill()
        gaps.sort()
        median, most, longest = gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100], gaps[-1]
        print(f"{name}: {len(gaps)} gaps, median {median * 1e3:.2f} ms, p99 {most * 1e3:.2f}, most {longest * 1e3:.2f}")
        assert most < 0.1
    assert len(texts) == 1


def test_a_server_outlives_them(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for hard in HARD:
            if hard.name in FEW:
                answer = client.post("/v1/completions", json=hard.body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, hard.code)
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "hi", "regex": "[ab]{3}"}).status_code == 200
