"""What a caller is told about a spec that cannot be enforced: one short line, with a stable code."""

from __future__ import annotations

from specdec.errors import InvalidRequest

MAX_MESSAGE = 300


def refusal(param: str, message: str, code: str) -> InvalidRequest:
    """`InvalidRequest` for `param` with a backend's message on one line, cut to 300 characters."""
    line = " ".join(message.split())
    if len(line) > MAX_MESSAGE:
        line = line[: MAX_MESSAGE - 3] + "..."
    return InvalidRequest(param, line or "cannot be compiled", code=code)
