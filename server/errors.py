"""What a client sees when something fails: OpenAI's error shape, one status an error type. Knows no route.

    {"error": {"message": "...", "type": "...", "param": "..." or null, "code": "..."}}

A message never holds a path, an address or a traceback; errors that are not ours become one fixed sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.errors import ConstraintError, DeadEnd, InvalidRequest, NumericalError, QueueFull, SpecdecError

MAX_MESSAGE = 2048  # characters; what a client sent is never echoed at length


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here (HTTP 404)."""

    code = "model_not_found"


class HttpError(SpecdecError):
    """A request that failed before any route looked at it: wrong key, no such route, body too large."""

    def __init__(self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


class Draining(SpecdecError):
    """The server finishes what runs and takes nothing new (HTTP 503)."""

    code = "draining"


class EngineDead(SpecdecError):
    """The engine failed for good; the process has to be started again (HTTP 503)."""

    code = "engine_dead"


class EngineFailed(SpecdecError):
    """A step of the engine failed and took this request with it (HTTP 500)."""

    code = "internal_error"


class ClientGone(SpecdecError):
    """Nobody reads the answer any more (499 in the log; nothing is sent)."""

    code = "client_closed_request"


@dataclass(frozen=True, slots=True)
class Answer:
    """An error as HTTP: status, the object under "error", and headers of its own."""

    status: int
    error: dict[str, str | None]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """The JSON body."""
        return json.dumps({"error": self.error}, separators=(",", ":")).encode()


NO_RETRY = {"x-should-retry": "false"}  # openai's client repeats every 5xx unless told otherwise

# The first type that fits, most special first: status, OpenAI's type, headers.
TABLE: tuple[tuple[type[SpecdecError], int, str, dict[str, str]], ...] = (
    (ModelNotFound, 404, "invalid_request_error", {}),
    (InvalidRequest, 400, "invalid_request_error", {}),
    (QueueFull, 429, "rate_limit_error", {}),
    (Draining, 503, "unavailable_error", {"retry-after": "5"}),
    (EngineDead, 503, "unavailable_error", {"retry-after": "30"}),
    (EngineFailed, 500, "server_error", {}),
    (ClientGone, 499, "invalid_request_error", {}),
    (DeadEnd, 422, "invalid_request_error", {}),
    (ConstraintError, 500, "server_error", NO_RETRY),
    (NumericalError, 500, "server_error", NO_RETRY),
)

TYPES = {401: "authentication_error", 503: "unavailable_error"}


def answer(error: Exception) -> Answer:
    """How to tell a client about `error`. Anything that is not a SpecdecError is a 500 that says nothing more."""
    if isinstance(error, HttpError):
        kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
        return _answer(error.status, str(error), kind, None, error.code, error.headers)
    for known, status, kind, headers in TABLE:
        if isinstance(error, known):
            if isinstance(error, QueueFull):
                headers = {"retry-after": str(error.retry_after)}
            param = error.param if isinstance(error, InvalidRequest) else None
            return _answer(status, str(error), kind, param, error.code, headers)
    return _answer(500, "the server failed on this request", "server_error", None, "internal_error", {})


def _answer(status: int, message: str, kind: str, param: str | None, code: str, headers: Mapping[str, str]) -> Answer:
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "..."
    if param is not None:
        param = param[:256]
    return Answer(status, {"message": message, "type": kind, "param": param, "code": code}, dict(headers))
