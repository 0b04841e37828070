"""What every request passes before a route sees it: limits, the key, an id, and an answer whatever happens. Knows ASGI.

A body is read here whole, within a size and a time, so that nothing is parsed that is not going to be used.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.server.errors import HttpError, answer

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
OPEN_PATHS = ("/health",)  # need no key
QUIET_PATHS = ("/health", "/metrics")  # asked every few seconds, logged only when they fail
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
CLOSE = {"connection": "close"}  # the rest of the body is not read


class Guard:
    """ASGI middleware. `api_keys` empty means that no key is asked for; `body_timeout` is in seconds."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], max_body_bytes: int, body_timeout: float) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in api_keys]
        self._max_body_bytes = max_body_bytes
        self._body_timeout = body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        try:
            headers: dict[bytes, bytes] = dict(scope["headers"])
            self._check(scope, headers)
            if b"content-length" in headers or b"transfer-encoding" in headers:
                receive = _replay(await self._read(headers, receive), receive)
            await self._app(scope, receive, exchange.send)
        except HttpError as error:
            await exchange.fail(error)
        except Exception as error:
            if exchange.status:
                raise
            logger.exception("%s %s failed", scope["method"], ascii(scope["path"][:256]))
            await exchange.fail(error)
        finally:
            exchange.log()

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if len(scope["headers"]) > MAX_HEADERS:
            raise HttpError(431, f"a request may have at most {MAX_HEADERS} headers", "headers_too_large", CLOSE)
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise HttpError(400, "content-length and transfer-encoding exclude each other", "bad_request", CLOSE)
        # The path as it was routed, never one rebuilt from the Host header.
        if self._keys and scope["path"] not in OPEN_PATHS:
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            given = _digest(key.strip())
            matches = [hmac.compare_digest(given, known) for known in self._keys]
            if kind.lower() != b"bearer" or not any(matches):
                raise HttpError(
                    401,
                    "this server needs a valid key: send Authorization: Bearer KEY",
                    "invalid_api_key",
                    {"www-authenticate": "Bearer", **CLOSE},
                )

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._max_body_bytes
        too_large = HttpError(413, f"the body must be at most {limit} bytes", "body_too_large", CLOSE)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18:
            raise HttpError(400, "content-length must be a number", "bad_request", CLOSE)
        if int(length) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_timeout):
                while (message := await receive())["type"] == "http.request":
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            seconds = f"{self._body_timeout:g} seconds"
            raise HttpError(408, f"the body did not arrive within {seconds}", "body_timeout", CLOSE) from None
        raise HttpError(499, "the client left before its body was complete", "client_closed_request")


class _Exchange:
    """One request and its answer: the id that both carry, the status, and the time it took."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._method = scope["method"]
        self._path = scope["path"]
        self._send = send
        self._start = time.monotonic()
        self.status = 0
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        self._id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._id)]
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        told = answer(error)
        body = told.body
        headers = {"content-type": "application/json", "content-length": str(len(body)), **told.headers}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": told.status, "headers": raw})
        await self.send({"type": "http.response.body", "body": body})

    def log(self) -> None:
        if self.status < 400 and self._path in QUIET_PATHS:
            return
        took = (time.monotonic() - self._start) * 1000
        # ascii: a path may hold line breaks.
        logger.info("%s %s %d %.0f ms", self._method, ascii(self._path[:256]), self.status, took)


def _digest(key: bytes) -> bytes:
    """Keys are compared as digests of one length, in a time that does not depend on where they differ."""
    return hashlib.sha256(key).digest()


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, then what the connection says."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message
