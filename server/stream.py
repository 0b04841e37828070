"""Emissions become an answer: one JSON body, or server-sent events written as bytes. Knows no route: a `Form` words it.

The first emission is awaited before anything is sent, so an error before it has its own HTTP status; a later one is an
event, and the stream still ends with `data: [DONE]`.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.metrics import Acceptance
from specdec.request import Request
from specdec.sequence import Emission, Logprob
from specdec.sequence import Sequence as Text
from specdec.server.bridge import Stream
from specdec.server.errors import ClientGone, answer
from specdec.server.schemas import Body
from specdec.server.service import Service

logger = logging.getLogger(__name__)

NO_LOGPROB = -9999.0  # what JSON has instead of minus infinity
DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]


@dataclass(slots=True)
class Part:
    """What one choice has gained, or all of it."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, emission: Emission) -> None:
        """Take in one more emission of the choice."""
        self.text += emission.text
        self.tokens.extend(emission.tokens)
        self.logprobs.extend(emission.logprobs)
        self.finish_reason = emission.finish_reason
        self.stop_reason = emission.stop_reason


class Form(Protocol):
    """How a route words the entries under "choices"."""

    @property
    def prefix(self) -> str:
        """What ids begin with."""
        ...

    @property
    def whole_object(self) -> str:
        """The "object" of a body."""
        ...

    @property
    def chunk_object(self) -> str:
        """The "object" of a chunk."""
        ...

    def whole(self, choice: int, part: Part) -> Json:
        """A finished choice in one body."""
        ...

    def opening(self, choice: int) -> Json | None:
        """The first chunk of a choice, if it has one without a token."""
        ...

    def piece(self, choice: int, part: Part) -> Json:
        """A chunk with new text or tokens."""
        ...

    def closing(self, choice: int, part: Part) -> Json:
        """The last chunk of a choice, which says why it ended."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer on its way: what every chunk of it says, and what it has cost so far."""

    service: Service
    body: Body
    form: Form
    created: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def head(self, kind: str) -> Json:
        """The fields at the top of a body or chunk."""
        return {
            "id": f"{self.form.prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.service.names[0],
            "system_fingerprint": self.service.fingerprint,
        }


async def respond(http: HttpRequest, reply: Reply, requests: Sequence[Request], arrival: float) -> Response:
    """Run `requests` and answer. Raises what admission raises, and the error that ends a text before anything of it
    has been sent; what still runs is aborted then."""
    stream = await reply.service.bridge.submit(requests, arrival)
    stream.watch(partial(disconnected, http.receive))
    try:
        if reply.body.stream:
            events = EventStream(Events(reply, stream), stream, await checked_batch(stream))
            events.headers.update(reply.body.warnings)
            return events
        content = await whole(reply, stream)
    except BaseException:
        await stream.aclose()
        raise
    await stream.aclose()
    data = json.dumps(content, separators=(",", ":")).encode()
    return Response(data, media_type="application/json", headers=reply.body.warnings)


async def disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def checked_batch(stream: Stream) -> list[Emission]:
    """The next emissions. Raises the error of the first that has one."""
    emissions = await stream.batch()
    for emission in emissions:
        if emission.error is not None:
            raise emission.error
    return emissions


async def whole(reply: Reply, stream: Stream) -> Json:
    """The answer in one body."""
    parts = [Part() for _ in stream.seqs]
    while emissions := await checked_batch(stream):
        for emission in emissions:
            parts[stream.choice(emission)].add(emission)
    return reply.head(reply.form.whole_object) | {
        "choices": [
            reply.form.whole(choice, part) | {"seed": seq.seed}
            for choice, (part, seq) in enumerate(zip(parts, stream.seqs, strict=True))
        ],
        "usage": usage(stream.seqs, sum(len(part.tokens) for part in parts)),
        "speculation": speculation(stream.seqs, receipts=reply.body.receipts),
    }


class Events:
    """The chunks of one streamed answer."""

    __slots__ = ("_body", "_end", "_form", "_head", "_num_tokens", "_opened", "_stream")

    def __init__(self, reply: Reply, stream: Stream) -> None:
        self._stream = stream
        self._form = reply.form
        self._body = reply.body
        head = json.dumps(reply.head(reply.form.chunk_object), separators=(",", ":"))
        self._head = f'data: {head[:-1]},"choices":['
        # OpenAI's streams hold "usage": null in every chunk but the last, if usage was asked for.
        self._end = '],"usage":null}\n\n' if reply.body.include_usage else "]}\n\n"
        self._opened = [False] * len(stream.seqs)
        self._num_tokens = 0

    def write(self, emissions: Sequence[Emission]) -> bytes:
        """The events of some emissions, in their order."""
        return "".join(chunk for emission in emissions for chunk in self._chunks(emission)).encode()

    def last(self) -> bytes:
        """The usage chunk, if asked for, and the end."""
        if not self._body.include_usage:
            return DONE
        seqs = self._stream.seqs
        tail = {
            "usage": usage(seqs, self._num_tokens),
            "speculation": speculation(seqs, receipts=self._body.receipts),
        }
        return f"{self._head}],{json.dumps(tail, separators=(',', ':'))[1:]}\n\n".encode() + DONE

    def failed(self, error: Exception) -> bytes:
        """An error after the first chunk, and the end."""
        return b"data: " + answer(error).body + b"\n\n" + DONE

    def _chunks(self, emission: Emission) -> Iterator[str]:
        choice = self._stream.choice(emission)
        if not self._opened[choice]:
            self._opened[choice] = True
            if (opening := self._form.opening(choice)) is not None:
                yield self._chunk(opening)
        self._num_tokens += len(emission.tokens)
        part = Part()
        part.add(emission)
        if part.text or part.logprobs or (self._body.return_token_ids and part.tokens):
            yield self._chunk(self._form.piece(choice, part))
        if part.finish_reason is not None:
            yield self._chunk(self._form.closing(choice, part) | {"seed": emission.seq.seed})

    def _chunk(self, entry: Json) -> str:
        # Escaping all but ASCII costs a few bytes; some clients split events at U+2028, which is a character of text.
        entry_json = json.dumps(entry, separators=(",", ":"))
        if self._body.continuous_usage:
            so_far = json.dumps(usage(self._stream.seqs, self._num_tokens), separators=(",", ":"))
            return f'{self._head}{entry_json}],"usage":{so_far}}}\n\n'
        return f"{self._head}{entry_json}{self._end}"


class EventStream(Response):
    """Sends events as the engine emits, everything that is ready in one write, and frees the engine's blocks however it
    ends. A Response because FastAPI takes nothing else from a route."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, stream: Stream, first: list[Emission]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._stream = stream
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            emissions = self._first
            try:
                while emissions:
                    await send(_body(self._events.write(emissions), more=True))
                    emissions = await checked_batch(self._stream)
                end = self._events.last()
            except ClientGone:
                return
            except Exception as error:
                logger.warning("a stream ends early: %s", error)
                end = self._events.failed(error)
            await send(_body(end, more=False))
        finally:
            await self._stream.aclose()


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def usage(seqs: Sequence[Text], num_tokens: int) -> Json:
    """OpenAI's usage: a prompt counts once, however many choices it has. A prediction counts once a choice: its tokens
    that appear in the completion, in order (`Followed`), are accepted, the others rejected."""
    accepted = sum(seq.followed.num_tokens for seq in seqs)
    prompts = [seq for seq in seqs if seq.index == 0]
    num_prompt = sum(seq.num_prompt for seq in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(seq.num_cached for seq in prompts), "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(len(seq.request.prediction) for seq in seqs) - accepted,
        },
    }


def speculation(seqs: Sequence[Text], *, receipts: bool) -> Json:
    """How far drafts were right: target forwards, drafts, and accepted tokens in all and by depth; with `receipts` also
    by drafter."""
    total = Acceptance.total(seq.acceptance for seq in seqs)
    counts = {
        "forwards": total.draws,
        "drafts": total.drafts,
        "draft_tokens": total.draft_tokens,
        "accepted_tokens": total.accepted_tokens,
        "accepted_per_position": total.accepted_per_depth,
    }
    if not receipts:
        return counts
    return counts | {"by_source": {name: asdict(count) for name, count in sorted(total.by_source.items())}}


def clamp(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, NO_LOGPROB)
