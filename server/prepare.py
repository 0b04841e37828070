"""From a checked body to `Request`s: tokens, sampling with the model's defaults, and the compiled grammar.

Knows bodies and the loaded model, but no HTTP. What takes long (templates, tokenising, compiling) runs in a few worker
threads, never on the event loop and never on the engine thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from specdec.errors import ContextTooLong, InvalidRequest, QueueFull
from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Regex, Spec, Whitespace
from specdec.request import MAX_LOGPROBS, Sampling, Stopping
from specdec.server.schemas import Body, StructuredOutputs

if TYPE_CHECKING:
    from specdec.build import LoadedModel
    from specdec.protocols import Grammar

ResultT = TypeVar("ResultT")

NUM_WORKERS = 2
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what a generation_config may set


class Preparer:
    """Prepares requests for one loaded model. At most `max_pending` bodies wait for a worker; further ones are refused
    with `QueueFull`."""

    def __init__(self, loaded: LoadedModel, max_pending: int) -> None:
        defaults = loaded.generation_defaults
        self.loaded = loaded
        self.defaults = MappingProxyType({name: defaults[name] for name in DEFAULTED if defaults.get(name) is not None})
        self._max_pending = max_pending
        self._pending = 0
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="specdec-prepare")

    def close(self) -> None:
        """End the workers."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[..., ResultT], *arguments: object) -> ResultT:
        """`work(*arguments)` in a worker thread. Raises `QueueFull` if too many wait already."""
        if self._pending >= self._max_pending:
            raise QueueFull(f"{self._pending} requests are being prepared already")
        self._pending += 1
        future = asyncio.get_running_loop().run_in_executor(self._workers, work, *arguments)
        future.add_done_callback(self._done)
        return await future

    def _done(self, _: asyncio.Future[Any]) -> None:
        self._pending -= 1

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
        given = {name: getattr(body, name) for name in DEFAULTED}
        values = {**self.defaults, **{name: value for name, value in given.items() if value is not None}}
        top_k = values.get("top_k", 0)
        assert logprobs is None or logprobs <= MAX_LOGPROBS
        return Sampling(
            temperature=values.get("temperature", 1.0),
            top_p=values.get("top_p", 1.0),
            top_k=0 if top_k == -1 else top_k,
            min_p=values.get("min_p", 0.0),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=values.get("repetition_penalty", 1.0),
            logit_bias=MappingProxyType(body.logit_bias or {}),
            seed=body.seed,
            logprobs=logprobs,
            speculative=body.speculative is not False,
        )

    def grammar(self, body: Body) -> Grammar | None:
        """The compiled constraint of a body, None for free text. Raises `InvalidRequest` that names the field."""
        found = constraint(body)
        return None if found is None else self.loaded.compiler.compile(found[1], param=found[0])

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
        if wanted.type == "json_object":
            yield "response_format", lambda _: JsonObject(), True
        elif wanted.json_schema is not None:
            yield "response_format.json_schema.schema", JsonSchema, wanted.json_schema.schema_
    if (outputs := body.structured_outputs) is not None:
        yield _structured(outputs)
    yield "guided_json", JsonSchema, body.guided_json
    yield "guided_regex", Regex, body.guided_regex
    yield "guided_choice", Choice, body.guided_choice
    yield "guided_grammar", Ebnf, body.guided_grammar
    yield "regex", Regex, body.regex
    yield "ebnf", Ebnf, body.ebnf
    yield "json_schema", JsonSchema, body.json_schema


def _structured(outputs: StructuredOutputs) -> tuple[str, Callable[[Any], Spec], object]:
    given = outputs.model_dump(by_alias=True, exclude_none=True)
    compact = given.pop("disable_any_whitespace", False)
    if len(given) != 1:
        kinds = "json, json_object, regex, choice and grammar"
        raise InvalidRequest("structured_outputs", f"must hold exactly one of {kinds}, got {len(given)}")
    [(kind, value)] = given.items()
    param = f"structured_outputs.{kind}"
    if compact and kind not in ("json", "json_object"):
        raise InvalidRequest("structured_outputs.disable_any_whitespace", f"means nothing for {kind}")
    whitespace: Whitespace = "compact" if compact else "flexible"
    makers: dict[str, Callable[[Any], Spec]] = {
        "json": lambda schema: JsonSchema(schema, whitespace),
        "json_object": lambda _: JsonObject(whitespace),
        "regex": Regex,
        "choice": Choice,
        "grammar": Ebnf,
    }
    if kind == "json_object" and value is not True:
        raise InvalidRequest(param, "must be true; leave it out for free text")
    return param, makers[kind], value
