"""POST /v1/completions: text or token ids in, text out. Knows OpenAI's older wording, not how tokens come about."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from specdec.errors import InvalidRequest
from specdec.protocols import Grammar
from specdec.request import Request
from specdec.sequence import Logprob
from specdec.server.prepare import Preparer, stopping
from specdec.server.schemas import MAX_PROMPTS, CompletionBody
from specdec.server.service import Service
from specdec.server.stream import Json, Part, Reply, clamp, respond
from specdec.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(http: HttpRequest) -> Response:
    """Complete one or more prompts; choice j of prompt i has the index i * n + j."""
    arrival = time.monotonic()
    service: Service = http.app.state.service
    body = await service.read(http, CompletionBody)
    grammar = await service.preparer.grammar(body)
    requests, echoes = await service.preparer.texts.run(completion_requests, service.preparer, body, grammar)
    form = CompletionForm(
        service.loaded.tokenizer,
        num_choices=requests[0].n,
        echoes=echoes,
        prompts=[request.prompt for request in requests] if body.return_token_ids else None,
    )
    return await respond(http, Reply(service, body, form, int(time.time())), requests, arrival)


def completion_requests(
    preparer: Preparer, body: CompletionBody, grammar: Grammar | None
) -> tuple[list[Request], list[str]]:
    """One request a prompt, and the texts to put before their completions (none without `echo`). Tokenises: run it in
    a worker thread. Raises `InvalidRequest` that names the field."""
    prompts = prompt_tokens(preparer, body)
    first = Request(
        prompt=prompts[0],
        sampling=preparer.sampling(body, body.logprobs),
        stopping=stopping(body, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens),
        grammar=grammar,
        n=1 if body.n is None else body.n,
        cache_salt=body.cache_salt or "",
        prediction=preparer.prediction(body, prompts[0]),
    )
    queue = preparer.loaded.engine.config.max_waiting
    if (len(prompts) - 1) * first.n >= queue:
        raise InvalidRequest(
            "prompt", f"{len(prompts)} prompts of {first.n} choices are more than the queue of {queue} can ever hold"
        )
    echoes = [preparer.loaded.tokenizer.decode(prompt) for prompt in prompts] if body.echo else []
    others = [replace(first, prompt=prompt, prediction=preparer.prediction(body, prompt)) for prompt in prompts[1:]]
    return [first, *others], echoes


def prompt_tokens(preparer: Preparer, body: CompletionBody) -> list[tuple[int, ...]]:
    """The prompts of a body as token ids; text is never read as special tokens."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [_encode(preparer, "prompt", prompt, body)]
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt", "must be a string, token ids, or a list of either")
    if not prompt:
        raise InvalidRequest("prompt", "must not be empty")
    if type(prompt[0]) is int:
        return [preparer.check_tokens("prompt", prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"must hold at most {MAX_PROMPTS} prompts, got {len(prompt)}")
    return [_one(preparer, f"prompt.{index}", item, body) for index, item in enumerate(prompt)]


def _one(preparer: Preparer, param: str, prompt: Any, body: CompletionBody) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return _encode(preparer, param, prompt, body)
    if isinstance(prompt, list) and prompt:
        return preparer.check_tokens(param, prompt)
    raise InvalidRequest(param, "must be a string or a list of token ids")


def _encode(preparer: Preparer, param: str, prompt: str, body: CompletionBody) -> tuple[int, ...]:
    preparer.check_length(param, len(prompt))
    tokens = preparer.loaded.tokenizer.encode(
        prompt, add_special_tokens=body.add_special_tokens is not False, parse_special=False
    )
    if not tokens:
        raise InvalidRequest(param, "must hold at least one token")
    return preparer.check_tokens(param, tokens)


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """How completions are worded. `echoes` holds one text a prompt, or nothing; `prompts` is set where token ids were
    asked for."""

    tokenizer: Tokenizer
    num_choices: int
    echoes: list[str]
    prompts: list[tuple[int, ...]] | None
    prefix: str = "cmpl"
    whole_object: str = "text_completion"
    chunk_object: str = "text_completion"
    offsets: dict[int, int] = field(default_factory=dict)  # of each choice, the characters of the tokens so far

    def whole(self, choice: int, part: Part) -> Json:
        """A finished choice in one body."""
        prompt = choice // self.num_choices
        entry = self._entry(choice, (self.echoes[prompt] if self.echoes else "") + part.text, part.logprobs)
        entry |= {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        if self.prompts is not None:
            entry |= {"prompt_token_ids": self.prompts[prompt], "token_ids": part.tokens}
        return entry

    def opening(self, choice: int) -> Json | None:
        """The prompt, where it was asked for."""
        prompt = choice // self.num_choices
        if not self.echoes and self.prompts is None:
            return None
        entry = self._entry(choice, self.echoes[prompt] if self.echoes else "", [])
        return entry if self.prompts is None else entry | {"prompt_token_ids": self.prompts[prompt]}

    def piece(self, choice: int, part: Part) -> Json:
        """A chunk with new text or tokens."""
        entry = self._entry(choice, part.text, part.logprobs)
        return entry if self.prompts is None else entry | {"token_ids": part.tokens}

    def closing(self, choice: int, part: Part) -> Json:
        """The last chunk of a choice."""
        ends = {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        return self._entry(choice, "", []) | ends

    def _entry(self, choice: int, text: str, logprobs: list[Logprob]) -> Json:
        return {"index": choice, "text": text, "logprobs": self._logprobs(choice, logprobs), "finish_reason": None}

    def _logprobs(self, choice: int, logprobs: list[Logprob]) -> Json | None:
        if not logprobs:
            return None
        tokens, offsets, tops = [], [], []
        offset = self.offsets.get(choice, 0)
        for one in logprobs:
            tokens.append(self.tokenizer.token_text(one.token))
            offsets.append(offset)
            offset += len(self.tokenizer.token_bytes(one.token).decode("utf-8", "replace"))
            top: dict[str, float] = {}
            for token, logprob in (*one.top, (one.token, one.logprob)):
                top.setdefault(
                    self.tokenizer.token_text(token), clamp(logprob)
                )  # two tokens may read the same: the likelier stays
            tops.append(top)
        self.offsets[choice] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [clamp(one.logprob) for one in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
