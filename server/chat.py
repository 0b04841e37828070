"""POST /v1/chat/completions: messages in, a message out. Knows OpenAI's wording, not how tokens come about."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from specdec.chat import encode_chat
from specdec.errors import ContextTooLong, InvalidRequest
from specdec.protocols import Grammar
from specdec.request import Request
from specdec.sequence import Logprob
from specdec.server.prepare import Preparer, stopping
from specdec.server.schemas import ChatBody, Message
from specdec.server.service import Service
from specdec.server.stream import Json, Part, Reply, clamp, respond
from specdec.tokenizer import Tokenizer


async def chat_completions(http: HttpRequest) -> Response:
    """Answer one chat."""
    arrival = time.monotonic()
    service: Service = http.app.state.service
    body = await service.read(http, ChatBody)
    grammar = await service.preparer.grammar(body)
    request = await service.preparer.texts.run(chat_request, service.preparer, body, grammar)
    form = ChatForm(service.loaded.tokenizer, request.prompt if body.return_token_ids else None)
    return await respond(http, Reply(service, body, form, int(time.time())), [request], arrival)


def chat_request(preparer: Preparer, body: ChatBody, grammar: Grammar | None) -> Request:
    """The engine's request. Renders and tokenises: run it in a worker thread.

    Raises `InvalidRequest` that names the field.
    """
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling, when = preparer.sampling(body, logprobs), stopping(body, limit)
    messages = chat_messages(preparer, body.messages)
    template = preparer.loaded.template
    if template is None:
        raise InvalidRequest(
            "messages",
            "the model has no chat template; start the server with --chat-template, or use /v1/completions",
            code="chat_template_missing",
        )
    prompt = encode_chat(
        preparer.loaded.tokenizer,
        template,
        messages,
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    tokens = preparer.check_tokens("messages", prompt)
    return Request(
        prompt=tokens,
        sampling=sampling,
        stopping=when,
        grammar=grammar,
        n=1 if body.n is None else body.n,
        cache_salt=body.cache_salt or "",
        prediction=preparer.prediction(body, tokens),
    )


def chat_messages(preparer: Preparer, messages: list[Message]) -> list[dict[str, str]]:
    """Messages as templates take them. Raises `ContextTooLong` before anything is rendered where they cannot fit."""
    if len(messages) > preparer.loaded.max_model_len:
        raise ContextTooLong("messages", f"{len(messages)} messages cannot fit the context")
    plain = []
    for index, message in enumerate(messages):
        # Templates know no developer; OpenAI gives the two the same meaning.
        role = "system" if message.role == "developer" else message.role
        entry = {"role": role, "content": content_text(f"messages.{index}.content", message.content)}
        if message.name is not None:
            entry["name"] = message.name
        plain.append(entry)
    preparer.check_length("messages", sum(len(entry["content"]) for entry in plain))
    return plain


def content_text(param: str, content: Any) -> str:
    """The text of a message: a string, or text parts joined by line breaks. Raises `InvalidRequest` for other parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(param, "must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        path = f"{param}.{index}"
        if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
            raise InvalidRequest(path, 'must be an object like {"type": "text", "text": "..."}')
        if kind != "text":
            raise InvalidRequest(f"{path}.type", f"{kind[:32]!r} is not supported", code="unsupported_parameter")
        if unknown := sorted(part.keys() - {"type", "text"}):
            raise InvalidRequest(f"{path}.{unknown[0][:64]}", "is not a field of a text part", code="unknown_parameter")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{path}.text", "must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How a chat's choices are worded. `prompt` is set where token ids were asked for."""

    tokenizer: Tokenizer
    prompt: tuple[int, ...] | None
    prefix: str = "chatcmpl"
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def whole(self, choice: int, part: Part) -> Json:
        """A finished choice in one body."""
        entry = {
            "index": choice,
            "message": {"role": "assistant", "content": part.text, "refusal": None},
            "logprobs": self._logprobs(part.logprobs),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self.prompt is not None:
            entry |= {"prompt_token_ids": self.prompt, "token_ids": part.tokens}
        return entry

    def opening(self, choice: int) -> Json | None:
        """The chunk that says whose text this is."""
        entry = {
            "index": choice,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return entry if self.prompt is None else entry | {"prompt_token_ids": self.prompt}

    def piece(self, choice: int, part: Part) -> Json:
        """A chunk with new text or tokens."""
        entry = {
            "index": choice,
            "delta": {"content": part.text},
            "logprobs": self._logprobs(part.logprobs),
            "finish_reason": None,
        }
        return entry if self.prompt is None else entry | {"token_ids": part.tokens}

    def closing(self, choice: int, part: Part) -> Json:
        """The last chunk of a choice."""
        return {
            "index": choice,
            "delta": {},
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }

    def _logprobs(self, logprobs: list[Logprob]) -> Json | None:
        if not logprobs:
            return None
        return {
            "content": [
                self._token(one.token, one.logprob)
                | {"top_logprobs": [self._token(token, logprob) for token, logprob in one.top]}
                for one in logprobs
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> Json:
        data = self.tokenizer.token_bytes(token)
        return {"token": self.tokenizer.token_text(token), "logprob": clamp(logprob), "bytes": list(data)}
