"""The Python face: prompts in, results out, on one engine in the caller's thread. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, overload

from specdec.build import DEFAULT_MODEL, Options, build
from specdec.chat import encode_chat
from specdec.errors import InvalidRequest, QueueFull, SpecdecError
from specdec.grammar.spec import Spec
from specdec.metrics import Acceptance
from specdec.request import Request, Sampling, Stopping
from specdec.sequence import Emission, Logprob
from specdec.sequence import Sequence as TokenSequence

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished text. `finish_reason` is "stop", "length" or "error" (then `error` says what happened, and the text
    ends where it did); `seed` draws the same text again; `acceptance` counts what drafts gave, also by drafter;
    `num_predicted` are the tokens of the prediction that the text repeats, in order (`specdec.prediction`)."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[Logprob, ...]
    seed: int
    acceptance: Acceptance
    num_predicted: int = 0
    error: SpecdecError | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one prompt: its `n` choices, and how many of the prompt's tokens were computed or found cached."""

    prompt_tokens: int
    cached_tokens: int
    choices: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


class LLM:
    """A model and its engine, for use from one thread.

    `source` is a folder in Hugging Face layout, a .gguf file, a hub id, or a name that `specdec pull` knows. Raises
    `ModelError` when the model cannot be loaded and `ConfigError` for options that do not fit.
    """

    def __init__(
        self,
        source: str = DEFAULT_MODEL,
        options: Options | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.loaded = build(source, options, progress=progress)
        self._ids = count()
        self._inbox: dict[str, list[Emission]] = {}

    @overload
    def generate(
        self,
        prompts: str,
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
        *,
        constraint: Spec | None = None,
        n: int = 1,
        prediction: Prompt = "",
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
        *,
        constraint: Spec | None = None,
        n: int = 1,
        prediction: Prompt = "",
    ) -> list[Result]: ...
    def generate(
        self,
        prompts: str | list[str] | list[list[int]],
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
        *,
        constraint: Spec | None = None,
        n: int = 1,
        prediction: Prompt = "",
    ) -> Result | list[Result]:
        """Continue prompts, all in one batch; a single string gives a single `Result`. Without `sampling` the model's
        own defaults hold (its generation_config, if `Options` lets it speak; else temperature 1).

        A prompt is text, encoded as the model's tokenizer does by default (with its beginning token, if it has one), or
        token ids taken as they are. `prediction` is what the answer is expected to be, text or token ids: a guess, the
        same for all prompts. Raises `InvalidRequest`, naming the field; a text that fails on the way, as when its
        grammar runs into a dead end, is a choice with `error` set.
        """
        if isinstance(prompts, str):
            return self._run(
                [self.request(prompts, sampling, stopping, constraint=constraint, n=n, prediction=prediction)]
            )[0]
        if not isinstance(prompts, list | tuple):
            raise InvalidRequest("prompts", f"must be text or a list of prompts, got {type(prompts).__name__}")
        return self._run(
            [
                self.request(prompt, sampling, stopping, constraint=constraint, n=n, prediction=prediction)
                for prompt in prompts
            ]
        )

    def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
        *,
        constraint: Spec | None = None,
        n: int = 1,
        prediction: Prompt = "",
    ) -> Result:
        """Answer a conversation of `{"role": ..., "content": ...}` messages through the model's chat template."""
        prompt = self.chat_prompt(messages)
        return self._run([self.request(prompt, sampling, stopping, constraint=constraint, n=n, prediction=prediction)])[
            0
        ]

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
        *,
        constraint: Spec | None = None,
        n: int = 1,
        prediction: Prompt = "",
    ) -> Iterator[Emission]:
        """Like `generate`, step by step: each `Emission` has the newly visible `text` of choice `seq.index`.

        Closing the iterator aborts the request. `chat_prompt` makes a prompt of a conversation.
        """
        request = self.request(prompt, sampling, stopping, constraint=constraint, n=n, prediction=prediction)
        request_id = f"stream-{next(self._ids)}"
        sequences = self._add(request, request_id)
        try:
            while not all(seq.finished for seq in sequences) or self._inbox[request_id]:
                if not self._inbox[request_id]:
                    self._step()
                yield from self._take(request_id)
        finally:
            self.loaded.engine.abort(request_id)
            self._inbox.pop(request_id, None)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation up to where the answer begins. Raises `InvalidRequest` naming `messages`."""
        return encode_chat(self.loaded.tokenizer, self.loaded.template, messages)

    def request(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
        *,
        constraint: Spec | None = None,
        n: int = 1,
        prediction: Prompt = "",
    ) -> Request:
        """The `Request` of a prompt: encoded, and its constraint compiled."""
        tokens = self.loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not isinstance(tokens, Sequence) or isinstance(tokens, bytes) or {*map(type, tokens)} - {int}:
            raise InvalidRequest("prompt", "must be text or a list of token ids")
        grammar = None if constraint is None else self.loaded.compiler.compile(constraint)
        return Request(
            tuple(tokens),
            self.loaded.default_sampling if sampling is None else sampling,
            Stopping() if stopping is None else stopping,
            grammar,
            n,
            prediction=self._prediction(tokens, prediction),
        )

    def _prediction(self, prompt: Sequence[int], prediction: Prompt) -> tuple[int, ...]:
        if not isinstance(prediction, Sequence) or isinstance(prediction, bytes):
            raise InvalidRequest("prediction", "must be text or a list of token ids")
        if not isinstance(prediction, str):
            return tuple(prediction)
        try:
            return tuple(self.loaded.tokenizer.encode_after(prompt, prediction))
        except InvalidRequest as error:
            raise InvalidRequest("prediction", error.message) from None

    def _run(self, requests: Sequence[Request]) -> list[Result]:
        ids: list[str] = []
        sequences: list[list[TokenSequence]] = []
        try:
            for request in requests:
                request_id = f"generate-{next(self._ids)}"
                sequences.append(self._add_when_there_is_room(request, request_id))
                ids.append(request_id)
            while not all(seq.finished for choices in sequences for seq in choices):
                self._step()
            return [
                _result(choices, self._take(request_id)) for choices, request_id in zip(sequences, ids, strict=True)
            ]
        finally:
            for request_id in ids:
                self.loaded.engine.abort(request_id)
                self._inbox.pop(request_id, None)

    def _add(self, request: Request, request_id: str) -> list[TokenSequence]:
        sequences = self.loaded.engine.add(request, request_id)
        self._inbox[request_id] = []
        return sequences

    def _add_when_there_is_room(self, request: Request, request_id: str) -> list[TokenSequence]:
        """As `_add`; while the queue is full the engine works it off."""
        while True:
            try:
                return self._add(request, request_id)
            except QueueFull:
                self._step()

    def _step(self) -> None:
        """One engine step; what it emits goes to the inbox of its request, whoever drives the engine."""
        for emission in self.loaded.engine.step():
            self._inbox[emission.seq.request_id].append(emission)

    def _take(self, request_id: str) -> list[Emission]:
        emissions, self._inbox[request_id] = self._inbox[request_id], []
        return emissions


def _result(sequences: Sequence[TokenSequence], emissions: Sequence[Emission]) -> Result:
    choices = []
    parts_of: dict[int, list[Emission]] = {seq.index: [] for seq in sequences}
    for emission in emissions:
        parts_of[emission.seq.index].append(emission)
    for seq in sequences:
        parts = parts_of[seq.index]
        choices.append(
            Completion(
                "".join(part.text for part in parts),
                tuple(token for part in parts for token in part.tokens),
                seq.finish_reason or "abort",
                parts[-1].stop_reason if parts else None,
                tuple(seq.logprobs),
                seq.seed,
                seq.acceptance,
                seq.followed.num_tokens,
                seq.error,
            )
        )
    return Result(sequences[0].num_prompt, sequences[0].num_cached, tuple(choices))
