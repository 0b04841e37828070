"""What a caller asks for. Frozen values, checked when they are made; they know no engine and no text.

A range that depends on the model (ids in the vocabulary, room in the context) is checked where the model is known,
in `Engine.add`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from specdec.errors import InvalidRequest
from specdec.tree import MAX_DRAFTS

if TYPE_CHECKING:
    from specdec.protocols import Grammar

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_METHOD_LENGTH = 256
PREDICTION = "prediction"  # the drafter that a request's prediction is for


def _shown(value: object) -> str:
    """`value` for a message. Python refuses to spell integers of more than 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 14_000:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _number(param: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or (value != value or abs(value) == math.inf):
        raise InvalidRequest(param, f"must be a finite number, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        raise InvalidRequest(
            param, f"must be {'above' if open_low else 'at least'} {low} and at most {high}, got {_shown(value)}"
        )


def _text(param: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(param, f"must be a string, got {value!r}")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidRequest(param, f"must not hold a lone surrogate, got {value!r}")


def _integer(param: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(param, f"must be an integer, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequest(param, f"must be between {low} and {high}, got {_shown(value)}")


@dataclass(frozen=True, slots=True)
class Speculative:
    """Which guesses may help a request, and how many at once. They change its speed, never its text.

    `method` names drafters, separated by commas, among those that the engine runs; None is all of them. `max_nodes` is
    the most nodes that a step verifies for the request (0 to 62, and never more than the engine's own `max_drafts`);
    None leaves that to the engine, 0 turns drafts off.

    Raises `InvalidRequest`, naming the field; a name that the engine does not have is refused by `Engine.add`.
    """

    method: str | None = None
    max_nodes: int | None = None

    def __post_init__(self) -> None:
        if self.method is not None:
            _text("speculative.method", self.method)
            if not all(self.methods) or len(self.method) > MAX_METHOD_LENGTH:
                raise InvalidRequest(
                    "speculative.method", f"must name drafters, separated by commas, got {self.method[:64]!r}"
                )
        if self.max_nodes is not None:
            _integer("speculative.max_nodes", self.max_nodes, 0, MAX_DRAFTS)

    @property
    def methods(self) -> tuple[str, ...]:
        """The names in `method`; empty where all drafters may help."""
        return () if self.method is None else tuple(name.strip() for name in self.method.split(","))

    @property
    def limit(self) -> int:
        """The most nodes that a step may verify for the request, as far as the request goes."""
        return MAX_DRAFTS if self.max_nodes is None else self.max_nodes


ALL_GUESSES = Speculative()
NO_GUESSES = Speculative(max_nodes=0)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target picks a token, and how far drafts may help it.

    Fields have the meaning they have in the OpenAI API and in vLLM. `top_k` 0 keeps everything; `logprobs` is None for
    none, else the number of alternatives to report beside the picked token (0 to 20); `seed` None draws a fresh one,
    which the result returns. `speculative` says which drafts may help: True is all that the engine runs, False none.
    The text is the same either way.

    Raises `InvalidRequest`, naming the field, for a value out of range or of the wrong type.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    logprobs: int | None = None
    speculative: bool | Speculative = True

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest("logit_bias", f"must be a mapping from token id to bias, got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number(f"logit_bias.{token}", bias, -100.0, 100.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.speculative, bool | Speculative):
            raise InvalidRequest("speculative", f"must be true, false or a Speculative, got {self.speculative!r}")

    @property
    def guesses(self) -> Speculative:
        """`speculative` in its long form."""
        if isinstance(self.speculative, Speculative):
            return self.speculative
        return ALL_GUESSES if self.speculative else NO_GUESSES


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a text ends. `max_tokens` None means the rest of the context; the model's end tokens stop unless
    `ignore_eos`; neither comes before `min_tokens` tokens.

    Raises `InvalidRequest`, naming the field.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if not isinstance(self.stop, tuple) or len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"must be a tuple of at most {MAX_STOP_STRINGS} strings")
        for stop in self.stop:
            _text("stop", stop)
            if not stop:
                raise InvalidRequest("stop", "must hold strings that are not empty")
            if len(stop) > MAX_STOP_LENGTH:
                raise InvalidRequest("stop", f"must hold strings of at most {MAX_STOP_LENGTH} characters")
        if not isinstance(self.stop_token_ids, tuple):
            raise InvalidRequest("stop_token_ids", f"must be a tuple of token ids, got {self.stop_token_ids!r}")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        for name in ("ignore_eos", "include_stop"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(name, f"must be true or false, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with all that shapes its answer. `grammar` None is free text; `n` is the number of choices.

    `prediction` is what the caller expects the answer to be, in tokens (the OpenAI API's predicted outputs): the
    "prediction" drafter guesses from it.

    Raises `InvalidRequest`, naming the field, for a prompt that is empty or not of integers, a prediction not of
    integers or one that `sampling.speculative` leaves unused, an `n` outside 1 to 128, and anything of the wrong type.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    grammar: Grammar | None = None
    n: int = 1
    cache_salt: str = ""
    prediction: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, tuple) or not self.prompt or set(map(type, self.prompt)) != {int}:
            raise InvalidRequest("prompt", "must be a tuple of at least one token id")
        if not isinstance(self.prediction, tuple) or not set(map(type, self.prediction)) <= {int}:
            raise InvalidRequest("prediction", "must be a tuple of token ids")
        for name, kind in (("sampling", Sampling), ("stopping", Stopping)):
            if not isinstance(getattr(self, name), kind):
                found = type(getattr(self, name)).__name__
                raise InvalidRequest(name, f"must be a {kind.__name__}, got {found}")
        guesses = self.sampling.guesses
        if self.prediction and guesses.limit == 0:
            raise InvalidRequest("prediction", "is of no use where speculative turns drafts off; leave one of them out")
        if self.prediction and guesses.methods and PREDICTION not in guesses.methods:
            raise InvalidRequest(
                "prediction", f"is of no use with speculative.method {guesses.method!r}; add {PREDICTION!r} to it"
            )
        _integer("n", self.n, 1, MAX_CHOICES)
        _text("cache_salt", self.cache_salt)
