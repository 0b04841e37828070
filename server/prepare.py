"""From a checked body to `Request`s: tokens, sampling with the model's defaults, and the compiled grammar.

Knows bodies and the loaded model, but no HTTP. What takes long (templates, tokenising, compiling) runs in a few worker
threads, never on the event loop and never on the engine thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from specdec.errors import ContextTooLong, InvalidRequest, QueueFull
from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Regex, Spec, StructuralTag, written_grammar
from specdec.request import Sampling, Speculative, Stopping
from specdec.server.schemas import Body, StructuredOutputs

if TYPE_CHECKING:
    from specdec.build import LoadedModel
    from specdec.protocols import Grammar

ResultT = TypeVar("ResultT")

TEXT_WORKERS = 2
GRAMMAR_WORKERS = 2
COMPILE_SECONDS = 20.0  # a grammar that takes longer is refused; its thread stays busy until the library returns
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # the model may have its own


class Workers:
    """A few threads. At most `max_pending` calls wait for them or run; further ones are refused with `QueueFull`."""

    def __init__(self, name: str, count: int, max_pending: int) -> None:
        self._max_pending = max_pending
        self._pending = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=f"specdec-{name}")

    async def run(self, work: Callable[..., ResultT], *arguments: object, seconds: float | None = None) -> ResultT:
        """`work(*arguments)` in a thread. Raises what the work raises; `QueueFull` for too many calls, or if after
        `seconds` no thread was free; `TimeoutError` if the work is not done by then (its thread stays busy with it)."""
        with self._lock:
            if self._pending >= self._max_pending:
                raise QueueFull(f"{self._pending} requests are being prepared already")
            self._pending += 1
        call = self._threads.submit(work, *arguments)
        call.add_done_callback(self._done)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(call)
        except TimeoutError:
            if call.cancelled():
                raise QueueFull("all workers are busy with other requests", 10) from None
            raise

    def close(self) -> None:
        """End the threads, when what they run now returns."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, _: Future[Any]) -> None:
        with self._lock:
            self._pending -= 1


@dataclass(frozen=True, slots=True)
class _Constraint:
    """What a text is asked to be, and the path of the field that says so."""

    param: str
    spec: Spec


class Preparer:
    """Prepares requests for one loaded model. Grammars have threads of their own, and those that take long one more:
    they hold up each other at most, never free text or what compiles at once. `max_pending` bounds each queue."""

    def __init__(self, loaded: LoadedModel, max_pending: int, compile_seconds: float = COMPILE_SECONDS) -> None:
        self.loaded = loaded
        self._compile_seconds = compile_seconds
        self.texts = Workers("text", TEXT_WORKERS, max_pending)
        self._grammars = Workers("grammar", GRAMMAR_WORKERS, max_pending)
        self._slow_grammars = Workers("slow-grammar", 1, max_pending)  # the process behind it does one at a time

    def close(self) -> None:
        """End the workers."""
        for workers in (self.texts, self._grammars, self._slow_grammars):
            workers.close()

    @cached_property
    def max_characters(self) -> int:
        """A text longer than this has more tokens than the context, whatever it says; checked before tokenising."""
        return self.loaded.max_model_len * max(1, *map(len, self.loaded.tokenizer.token_bytes_table()))

    def check_length(self, param: str, num_characters: int) -> None:
        """Raises `ContextTooLong` for a text that cannot fit."""
        if num_characters > self.max_characters:
            raise ContextTooLong(
                param, f"{num_characters} characters cannot fit the context of {self.loaded.max_model_len} tokens"
            )

    def sampling(self, body: Body, logprobs: int | None) -> Sampling:
        """The sampling of a body, the model's defaults filled in; `logprobs` alternatives are reported."""
        given = {name: value for name in DEFAULTED if (value := getattr(body, name)) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        return replace(
            self.loaded.default_sampling,
            **given,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=MappingProxyType(body.logit_bias or {}),
            seed=body.seed,
            logprobs=logprobs,
            speculative=speculative(body),
        )

    def prediction(self, body: Body, prompt: Sequence[int]) -> tuple[int, ...]:
        """The predicted output of a body as it would follow `prompt`; empty if there is none. Tokenises: run it in a
        worker thread. Raises `ContextTooLong` for one that could never be an answer."""
        if body.prediction is None:
            return ()
        text = body.prediction.text
        self.check_length("prediction.content", len(text))
        return self.check_tokens("prediction.content", self.loaded.tokenizer.encode_after(prompt, text))

    async def grammar(self, body: Body) -> Grammar | None:
        """The compiled constraint of a body, None for free text.

        Raises `InvalidRequest` that names the field, also where compiling takes too long, and `QueueFull`.
        """
        param = next((param for param, _, value in _wanted(body) if value is not None), None)
        if param is None:
            return None
        try:
            grammar = await self._grammars.run(self._quick_grammar, body, seconds=self._compile_seconds)
            if isinstance(grammar, _Constraint):
                grammar = await self._slow_grammars.run(self._compile, grammar, seconds=self._compile_seconds)
            return grammar
        except TimeoutError:
            message = f"takes longer than {self._compile_seconds:g} seconds to compile; make it smaller"
            raise InvalidRequest(param, message, code="too_large") from None

    def _quick_grammar(self, body: Body) -> Grammar | _Constraint | None:
        found = constraint(body)
        if found is None:
            return None
        asked = _Constraint(*found)
        return self._compile(asked) if self.loaded.compiler.is_quick(asked.spec) else asked

    def _compile(self, asked: _Constraint) -> Grammar:
        return self.loaded.compiler.compile(asked.spec, asked.param)

    def check_tokens(self, param: str, tokens: Sequence[object]) -> tuple[int, ...]:
        """`tokens` as ids. Raises `InvalidRequest` for anything that is not an id of the vocabulary."""
        limit, size = self.loaded.max_model_len, self.loaded.engine.runner.vocab_size
        if len(tokens) >= limit:
            raise ContextTooLong(param, f"{len(tokens)} tokens leave no room in the context of {limit}")
        ids = []
        for place, token in enumerate(tokens):
            if type(token) is not int:
                raise InvalidRequest(f"{param}.{place}", "must be a token id")
            if not 0 <= token < size:
                raise InvalidRequest(f"{param}.{place}", f"token {token} is not in the vocabulary of {size}")
            ids.append(token)
        return tuple(ids)


def speculative(body: Body) -> bool | Speculative:
    """Which guesses may help the texts of a body."""
    asked = body.speculative
    return True if asked is None else Speculative(asked.method, asked.max_nodes)


def stopping(body: Body, max_tokens: int | None) -> Stopping:
    """When the texts of a body end."""
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
    )


def constraint(body: Body) -> tuple[str, Spec] | None:
    """The one constraint of a body and the path of the field that holds it, None for free text.

    Raises `InvalidRequest` for a second one, and for one that its `Spec` refuses.
    """
    found = [(param, make, value) for param, make, value in _wanted(body) if value is not None]
    if not found:
        return None
    if len(found) > 1:
        raise InvalidRequest(found[1][0], f"constrains a text that {found[0][0]} constrains already; send one of them")
    [(param, make, value)] = found
    try:
        return param, make(value)
    except InvalidRequest as error:
        raise InvalidRequest(param, error.message, code=error.code) from None


def _wanted(body: Body) -> Iterator[tuple[str, Callable[[Any], Spec], object]]:
    """Every field that may constrain: its path, what makes a spec of its value, and the value (None: not given)."""
    if (wanted := body.response_format) is not None:
        if wanted.type == "structural_tag":
            tag = wanted.model_dump(exclude_none=True, include={"format", "structures", "triggers"})
            yield "response_format", StructuralTag, tag
        elif wanted.schema_ is not None:
            yield "response_format.schema", JsonSchema, wanted.schema_
        elif wanted.type == "json_object":
            yield "response_format", lambda _: JsonObject(), True
        elif wanted.json_schema is not None:
            yield "response_format.json_schema.schema", JsonSchema, wanted.json_schema.schema_
    if (outputs := body.structured_outputs) is not None:
        yield _structured(outputs)
    if body.guided_whitespace_pattern is not None and body.guided_json is None:
        raise InvalidRequest("guided_whitespace_pattern", "means nothing without guided_json")
    guided_whitespace = body.guided_whitespace_pattern or "flexible"
    yield "guided_json", lambda schema: JsonSchema(schema, guided_whitespace), body.guided_json
    yield "guided_regex", Regex, body.guided_regex
    yield "guided_choice", Choice, body.guided_choice
    yield "guided_grammar", written_grammar, body.guided_grammar
    yield "regex", Regex, body.regex
    yield "ebnf", Ebnf, body.ebnf
    yield "grammar", written_grammar, body.grammar
    yield "json_schema", JsonSchema, body.json_schema


def _structured(outputs: StructuredOutputs) -> tuple[str, Callable[[Any], Spec], object]:
    given = outputs.model_dump(by_alias=True, exclude_none=True)
    given.pop("disable_additional_properties", None)  # only false is taken
    compact, pattern = given.pop("disable_any_whitespace", False), given.pop("whitespace_pattern", None)
    order = given.pop("property_order", None)
    if len(given) != 1:
        kinds = "json, json_object, regex, choice, grammar and structural_tag"
        raise InvalidRequest("structured_outputs", f"must hold exactly one of {kinds}, got {len(given)}")
    [(kind, value)] = given.items()
    param = f"structured_outputs.{kind}"
    for name, asked in (("disable_any_whitespace", compact), ("whitespace_pattern", pattern is not None)):
        if asked and kind not in ("json", "json_object", "structural_tag"):
            raise InvalidRequest(f"structured_outputs.{name}", f"means nothing for {kind}")
    if order is not None and kind != "json":
        raise InvalidRequest("structured_outputs.property_order", f"means nothing for {kind}")
    if compact and pattern is not None:
        message = "contradicts disable_any_whitespace; give one of them"
        raise InvalidRequest("structured_outputs.whitespace_pattern", message)
    whitespace = "compact" if compact else "flexible" if pattern is None else pattern
    makers: dict[str, Callable[[Any], Spec]] = {
        "json": lambda schema: JsonSchema(schema, whitespace, property_order=order or "schema"),
        "json_object": lambda _: JsonObject(whitespace),
        "regex": Regex,
        "choice": Choice,
        "grammar": written_grammar,
        "structural_tag": lambda tag: StructuralTag(tag, whitespace),
    }
    if kind == "json_object" and value is not True:
        raise InvalidRequest(param, "must be true; leave it out for free text")
    return param, makers[kind], value
