"""The Python of README.md runs as it stands there."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = dict(re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL))


def test_every_block_of_python_is_run() -> None:
    assert README.read_text(encoding="utf-8").count("```python") == len(BLOCKS) > 0


@pytest.mark.weights
def test_the_python_face(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS["python"], "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert "Paris" in lines[0]
    assert re.fullmatch(r" (Mon|Tues|Wednes)day", lines[-1])


@pytest.mark.weights
def test_the_server_and_the_openai_client(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = BLOCKS["openai"].replace("8000", str(port))
    command = [sys.executable, "-m", "specdec", "serve", "smollm2-135m", "--port", str(port), "--max-model-len", "1k"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server)
        exec(compile(code, "README.md", "exec"), {})
    finally:
        server.terminate()
        assert server.wait(30) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"city", "country"}


def wait_for(url: str, server: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    """Return when the server answers. Raises AssertionError when it ends, or does not answer in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.poll() is None, f"the server ended with {server.returncode}"
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(f"no answer from {url} in {seconds} s")
