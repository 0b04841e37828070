"""Between asyncio and the engine: the one thread that steps it, and streams that carry its emissions out.

The thread owns the engine; the event loop owns the streams. They meet in two places only: an inbox that the thread
empties between steps, and one `call_soon_threadsafe` a step that hands over everything the step emitted.

When a step raises, every request then in the engine fails and is aborted. If that leaves the engine empty it goes on
with new requests; if not, or after three failing steps in a row, it is dead: `state` says so and nothing is admitted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal, Protocol

from specdec.errors import InvalidRequest, QueueFull
from specdec.request import Request
from specdec.sequence import Emission
from specdec.sequence import Sequence as Text
from specdec.server.errors import ClientGone, Draining, EngineDead, EngineFailed

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # failing steps in a row before the engine counts as dead
SWITCH_INTERVAL = 1e-4  # seconds the engine thread may wait for the interpreter (5 ms by default: half a step)

State = Literal["ok", "draining", "dead", "stopped"]


class Engine(Protocol):
    """What the bridge needs of the engine. Called by the engine thread only."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def add(self, request: Request, request_id: str) -> list[Text]:
        """Queue a request. Raises `InvalidRequest` and `QueueFull`."""
        ...

    def abort(self, request_id: str) -> object:
        """Forget a request and free what it holds; an unknown id is nothing to do."""
        ...

    def step(self) -> list[Emission]:
        """Run one step."""
        ...


class Latency(Protocol):
    """Who is told how long things took, in seconds."""

    def first_token(self, seconds: float) -> None:
        """From arrival to the first token of a choice."""
        ...

    def tokens(self, seconds: float, count: int) -> None:
        """Between one emission of a choice and the next, which brought `count` tokens."""
        ...

    def finished(self, seconds: float) -> None:
        """From arrival to the end of a choice."""
        ...


class Stream:
    """The emissions of one or more requests that were admitted together, as they come. Belongs to the event loop.

    Always `aclose` it: what has not finished is aborted then, and its blocks are free after the engine's next step.
    """

    __slots__ = (
        "_bridge",
        "_choices",
        "_error",
        "_last",
        "_ready",
        "_unfinished",
        "_waiter",
        "_watcher",
        "admitted",
        "arrival",
    )

    def __init__(self, bridge: Bridge, choices: dict[str, int], count: int, arrival: float) -> None:
        self._bridge = bridge
        self._choices = choices  # of each request id, the number of its first choice
        self._unfinished = count
        self._ready: deque[Emission] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._last: list[float] = [0.0] * count
        self.arrival = arrival
        self.admitted: asyncio.Future[list[Text]] = asyncio.get_running_loop().create_future()

    @property
    def seqs(self) -> list[Text]:
        """The sequences, one a choice."""
        return self.admitted.result()

    def choice(self, emission: Emission) -> int:
        """The number of the choice that an emission belongs to."""
        return self._choices[emission.seq.request_id] + emission.seq.index

    async def batch(self) -> list[Emission]:
        """All emissions that are there, waiting for one if none is; empty once all choices have finished.

        Raises `EngineFailed` if the engine failed under this request, `ClientGone` once `watch` says so.
        """
        while self._error is None and not self._ready:
            if not self._unfinished:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        emissions = list(self._ready)
        self._ready.clear()
        return emissions

    async def __aiter__(self) -> AsyncIterator[Emission]:
        while emissions := await self.batch():
            for emission in emissions:
                yield emission

    def watch(self, gone: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Abort everything when `gone()` returns: the client has left."""

        async def leave() -> None:
            await gone()
            self._fail(ClientGone("the client closed the connection"))
            self._bridge._close(self._choices)

        self._watcher = asyncio.create_task(leave())

    async def aclose(self) -> None:
        """Abort what has not finished. May be called twice."""
        if self._watcher is not None:
            self._watcher.cancel()
        self._bridge._close(self._choices)

    def _put(self, emission: Emission, now: float, latency: Latency) -> None:
        choice = self.choice(emission)
        if emission.tokens:
            if self._last[choice]:
                latency.tokens(now - self._last[choice], len(emission.tokens))
            else:
                latency.first_token(now - self.arrival)
            self._last[choice] = now
        if emission.finish_reason is not None:
            self._unfinished -= 1
            latency.finished(now - self.arrival)
        self._ready.append(emission)
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = error
        if not self.admitted.done():
            self.admitted.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Bridge:
    """Owns the engine thread. Made anywhere, started on the event loop that it will serve."""

    def __init__(self, engine: Engine, latency: Latency) -> None:
        self._engine = engine
        self._latency = latency
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # of the event loop
        self._streams: dict[str, Stream] = {}
        self._state: State = "stopped"
        self._idle = asyncio.Event()
        # of the engine thread
        self._live: dict[str, int] = {}  # request id -> choices that have not finished
        self._failures = 0
        self._taken: deque[Callable[[], None]] = deque()
        # of both, under the lock
        self._condition = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._stopping = False

    @property
    def state(self) -> State:
        """ "ok", "draining" (takes nothing new), "dead" (the engine failed for good), or "stopped"."""
        return self._state

    @property
    def num_requests(self) -> int:
        """Requests admitted and not finished."""
        return len(self._streams)

    def start(self) -> None:
        """Start the engine thread; call it on the running event loop."""
        assert self._thread is None, "the bridge is started once"
        self._loop = asyncio.get_running_loop()
        self._state = "ok"
        self._idle.set()
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
        self._thread.start()

    async def submit(self, requests: Sequence[Request], arrival: float | None = None) -> Stream:
        """Admit all of `requests` or none; `arrival` is the `time.monotonic()` at which the client came.

        Raises `InvalidRequest` and `QueueFull` from the engine, `Draining`, and `EngineDead`.
        """
        self.check_admission()
        name = uuid.uuid4().hex
        ids = [f"{name}-{index}" for index in range(len(requests))]
        starts = [0, *itertools.accumulate(request.n for request in requests)]
        stream = Stream(
            self, dict(zip(ids, starts, strict=False)), starts[-1], time.monotonic() if arrival is None else arrival
        )
        self._streams |= dict.fromkeys(ids, stream)
        self._idle.clear()
        try:
            self._post(partial(self._add, list(zip(ids, requests, strict=True)), stream.admitted))
            await stream.admitted
        except BaseException:
            self._close(ids)
            raise
        return stream

    def check_admission(self) -> None:
        """Raises `Draining` or `EngineDead` if nothing new is taken."""
        if self._state == "dead":
            raise EngineDead("the engine failed and has to be started again")
        if self._state != "ok":
            raise Draining("the server is shutting down")

    def drain(self) -> None:
        """Take nothing new from here on."""
        if self._state == "ok":
            self._state = "draining"

    async def drained(self) -> None:
        """Wait until nothing is running."""
        await self._idle.wait()

    def abort_all(self) -> None:
        """Fail every request that runs."""
        running = list(self._streams)
        for request_id in running:
            self._streams[request_id]._fail(Draining("the server shut down before the answer was complete"))
        self._close(running)

    async def stop(self) -> None:
        """Abort what runs and end the engine thread."""
        if self._thread is None:
            return
        self.drain()
        self.abort_all()
        with self._condition:
            self._stopping = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)
        if self._state != "dead":
            self._state = "stopped"

    # On the event loop

    def _post(self, message: Callable[[], None]) -> None:
        with self._condition:
            self._inbox.append(message)
            self._condition.notify()

    def _close(self, ids: Sequence[str] | dict[str, int]) -> None:
        open_ids = [request_id for request_id in ids if self._streams.pop(request_id, None) is not None]
        if open_ids:
            self._post(partial(self._abort, open_ids))
        if not self._streams:
            self._idle.set()

    def _dispatch(self, emissions: list[Emission], finished: list[str], now: float) -> None:
        for emission in emissions:
            stream = self._streams.get(emission.seq.request_id)
            if stream is not None:
                stream._put(emission, now, self._latency)
        for request_id in finished:
            self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    def _failed(self, ids: list[str], dead: bool) -> None:
        if dead:
            self._state = "dead"
            ids = list(self._streams)
        for request_id in ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                stream._fail(EngineFailed("the engine failed while it worked on this request"))
        if not self._streams:
            self._idle.set()

    # On the engine thread

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._inbox or self._taken or self._stopping or self._engine.has_work):
                    self._condition.wait()
                self._taken.extend(self._inbox)
                self._inbox.clear()
                stopping = self._stopping
            try:
                while self._taken:
                    self._taken.popleft()()
                if stopping:
                    return
                if self._engine.has_work:
                    self._step()
            except BaseException:  # a panic in native code is no Exception, and this thread must not end unseen
                logger.exception("the engine failed; %d requests fail with it", len(self._live))
                if not self._recover():
                    return

    def _step(self) -> None:
        emissions = self._engine.step()
        self._failures = 0
        finished = []
        for emission in emissions:
            request_id = emission.seq.request_id
            if emission.finish_reason is not None and request_id in self._live:
                self._live[request_id] -= 1
                if not self._live[request_id]:
                    del self._live[request_id]
                    finished.append(request_id)
        if emissions:
            self._call(partial(self._dispatch, emissions, finished, time.monotonic()))

    def _recover(self) -> bool:
        """Empty the engine after a failure. Whether it can go on."""
        self._failures += 1
        failed = list(self._live)
        self._live.clear()
        try:
            for request_id in failed:
                self._engine.abort(request_id)
            dead = self._engine.has_work or self._failures >= MAX_FAILURES
        except Exception:
            logger.exception("the engine could not be emptied after its failure")
            dead = True
        if dead:
            logger.critical("the engine is dead")
        self._call(partial(self._failed, failed, dead))
        return not dead

    def _add(self, requests: list[tuple[str, Request]], admitted: asyncio.Future[list[Text]]) -> None:
        seqs: list[Text] = []
        done = []
        try:
            for request_id, request in requests:
                seqs += self._engine.add(request, request_id)
                done.append(request_id)
                self._live[request_id] = request.n
        except Exception as error:
            self._abort(done)
            if not isinstance(error, InvalidRequest | QueueFull):
                logger.exception("the engine could not take a request")
            self._call(partial(_resolve, admitted, error))
        else:
            self._call(partial(_resolve, admitted, seqs))

    def _abort(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            if self._live.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _call(self, message: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(message)


def _resolve(future: asyncio.Future[list[Text]], outcome: list[Text] | Exception) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
