"""Worker threads: bounded in number and in time, and one kind does not hold up the other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from specdec.errors import QueueFull
from specdec.server.prepare import Workers

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("test", 1, 3)
    yield workers
    workers.close()


async def test_work_that_takes_too_long_is_a_timeout_and_work_behind_it_finds_the_queue_full(workers: Workers) -> None:
    release = threading.Event()
    hung = asyncio.create_task(workers.run(release.wait, seconds=0.1))
    await asyncio.sleep(0.01)
    behind = asyncio.create_task(workers.run(time.monotonic, seconds=0.1))
    with pytest.raises(TimeoutError):
        await hung
    with pytest.raises(QueueFull):
        await behind
    release.set()
    assert await workers.run(lambda: "free again") == "free again"


async def test_a_call_above_the_bound_is_refused_at_once_and_room_returns(workers: Workers) -> None:
    release = threading.Event()
    calls = [asyncio.create_task(workers.run(release.wait)) for _ in range(3)]
    await asyncio.sleep(0.01)
    with pytest.raises(QueueFull):
        await workers.run(time.monotonic)
    release.set()
    assert await asyncio.gather(*calls) == [True] * 3
    assert isinstance(await workers.run(time.monotonic), float)


async def test_what_the_work_raises_reaches_the_caller(workers: Workers) -> None:
    with pytest.raises(ZeroDivisionError):
        await workers.run(lambda: 1 // 0, seconds=1)
