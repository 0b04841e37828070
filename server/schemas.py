"""The bodies that clients send: strict types, every field honoured or refused by name. Knows no model and no engine.

Bounds that `Sampling`, `Stopping` and `Request` already check are not repeated here.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from specdec.errors import InvalidRequest

MAX_ERRORS = 10  # told of one body
MAX_MESSAGES = 4096
MAX_PROMPTS = 256
MAX_BIASES = 4096

# Fields of OpenAI's API that describe the caller or OpenAI's own service: nothing here depends on them, so taking them
# and doing nothing is what they mean. Their types are checked (see `Body`); everything else is honoured or refused.
#   user, safety_identifier, prompt_cache_key, metadata    labels of the caller (prefix caching needs no key here)
#   store false, service_tier auto/default                 what this server does anyway
#   parallel_tool_calls                                    means nothing without tools, which are refused
IGNORED = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
)

# Fields that other servers know and this one refuses, each with the values that ask for nothing: those are taken, like
# null. Any other value is a 400 with the code "unsupported_parameter".
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "tools": (),
    "tool_choice": ("none",),
    "functions": (),
    "function_call": ("none",),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "suffix": (),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "return_tokens_as_token_ids": (False,),
    "reasoning_effort": (),
    "reasoning": (),
    "thinking_token_budget": (),
    "include_reasoning": (),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "images": (),
    "web_search_options": (),
    "moderation": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "prompt_embeds": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": (),
    "continue_final_message": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "priority": (0,),
    "request_id": (),
    "session_id": (),
    "prompt_cache_retention": (),
    "guided_decoding_backend": (),
    "structural_tag": (),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "stop_regex": (),
    "no_stop_trim": (False,),
    "logits_processors": (),
    "custom_logit_processor": (),
    "repetition_detection": (),
    "lora_path": (),
    "lora_request": (),
    "mm_processor_kwargs": (),
    "kv_transfer_params": (),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
}

# Older names of vLLM, with what to send now: taken, with a warning in the headers of the answer.
DEPRECATED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
}

INSTEAD = {  # what to send in place of a refused field, where there is something
    "structural_tag": "send response_format or structured_outputs",
    "guided_decoding_backend": "the backend is chosen when the server starts",
    "grammar_lazy": "send a structural_tag, whose triggers begin tags in free text",
    "grammar_triggers": "send a structural_tag, whose triggers begin tags in free text",
    "chat_template": "the template is set when the server starts",
    "prompt_embeds": "send text or token ids",
}


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _bias(value: object) -> object:
    """JSON's keys are strings; token ids are not."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise PydanticCustomError("bias", "must hold at most {limit} tokens", {"limit": MAX_BIASES})
    bias = {}
    for token, amount in value.items():
        if not (isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 11):
            raise PydanticCustomError("token_id", "has the key {key}, not a token id", {"key": repr(token)[:64]})
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            raise PydanticCustomError("bias", "must be a number for token {token}", {"token": token})
        bias[int(token)] = amount
    return bias


def _nothing(value: object) -> None:
    if value is not None and value != []:
        raise PydanticCustomError("unsupported", "is not supported")


Nothing = Annotated[None, BeforeValidator(_nothing)]


def _guesses(value: object) -> object:
    """The short forms of `speculative` as the long one."""
    if isinstance(value, bool):
        return {} if value else {"max_nodes": 0}
    if value is not None and not isinstance(value, dict):
        raise PydanticCustomError("speculative", "must be true, false or an object with method, max_nodes or receipts")
    return value


def _parts(value: object) -> object:
    """Text as its one part."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Strict(BaseModel):
    """No coercion, no unknown field, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, populate_by_name=False)


class StreamOptions(Strict):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Strict):
    """OpenAI's wrapping of a schema. The schema is enforced whether `strict` or not."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """`{"type": "text" | "json_object" | "json_schema" | "structural_tag", ...}`: OpenAI's `json_schema`, llama.cpp's
    `schema` beside json_object, and xgrammar's `format`, or the older `structures` and `triggers`, of a structural
    tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("json_schema", "needs json_schema exactly if its type is json_schema")
        if self.schema_ is not None and self.type != "json_object":
            raise PydanticCustomError("schema", "takes schema only if its type is json_object")
        legacy = self.structures is not None, self.triggers is not None
        wanted = ((True, False, False), (False, True, True))
        given = (self.format is not None, *legacy)
        if given not in wanted if self.type == "structural_tag" else any(given):
            message = "needs format, or structures and triggers, exactly if its type is structural_tag"
            raise PydanticCustomError("structural_tag", message)
        return self


class StructuredOutputs(Strict):
    """vLLM's constraints: exactly one of the first six."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None  # for json, json_object and structural_tag, as is the next
    whitespace_pattern: str | None = None
    property_order: Literal["schema", "any"] | None = None  # for json
    disable_additional_properties: Literal[False] | None = None


class SpeculativeBody(Strict):
    """Which guesses may help (see `Speculative`); `receipts` asks for what each drafter gave."""

    method: str | None = None
    max_nodes: int | None = None
    receipts: bool | None = None


class TextPart(Strict):
    """A piece of text."""

    type: Literal["text"]
    text: str


class Prediction(Strict):
    """OpenAI's predicted output: text, or parts whose texts are joined as they are."""

    type: Literal["content"]
    content: Annotated[list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])]

    @property
    def text(self) -> str:
        """The whole of it."""
        return "".join(part.text for part in self.content)


class Body(Strict):
    """What both routes take."""

    model: str | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1 and 0: off
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_bias)] = None
    seed: int | None = None
    n: int | None = None
    speculative: Annotated[
        SpeculativeBody | None, BeforeValidator(_guesses, json_schema_input_type=bool | SpeculativeBody | None)
    ] = None
    prediction: Prediction | None = None

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    min_tokens: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_listed)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None  # for guided_json
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00]*$")] | None = None

    user: Annotated[str, Field(max_length=1024)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is only allowed when stream is true")
        return self

    @property
    def warnings(self) -> dict[str, str]:
        """The headers that tell a client of fields with newer names."""
        old = [name for name in DEPRECATED if getattr(self, name) is not None]
        told = ", ".join(f'299 specdec "{name} is deprecated; send {DEPRECATED[name]}"' for name in old)
        return {"warning": told} if told else {}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def receipts(self) -> bool:
        """Whether an answer says what each drafter gave."""
        return bool(self.speculative and self.speculative.receipts)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class Message(Strict):
    """One message of a chat. `content` is a string or a list of text parts (checked in `chat`)."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Any
    name: Annotated[str, Field(max_length=64)] | None = None
    # Clients send an assistant's message back as they got it, with these set to null.
    refusal: Nothing = None
    annotations: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    tool_calls: Nothing = None
    reasoning: Nothing = None
    reasoning_content: Nothing = None


class ChatBody(Body):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        limits = (self.max_tokens, self.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ; send one of them")
        return self


class CompletionBody(Body):
    """The body of POST /v1/completions. `prompt` is a string, token ids, or a list of either (checked in
    `completions`)."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise PydanticCustomError("best_of", "best_of is supported only where it equals n")
        if self.echo and self.logprobs is not None:
            raise PydanticCustomError("echo", "echo with logprobs is not supported")
        return self


BodyT = TypeVar("BodyT", bound=Body)


def parse(raw: bytes, kind: type[BodyT]) -> BodyT:
    """The body `raw` as `kind`. Raises `InvalidRequest` that names the field; nothing of the body is echoed at length.

    A key given twice is refused, since one of its values would be ignored.
    """
    return validate(parse_object(raw), kind)


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`: UTF-8, at most 200 levels deep, numbers finite, no lone surrogates, no key twice."""
    try:
        # Fast, and bounded in depth; only what passes here reaches the parser that sees repeated keys.
        value = from_json(raw, allow_inf_nan=False)
        if isinstance(value, dict):
            value = json.loads(raw, object_pairs_hook=_unique, parse_float=_finite)
    except InvalidRequest:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("body", f"is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("body", f"must be a JSON object, got {type(value).__name__}", code="invalid_json")
    return value


def validate(value: dict[str, Any], kind: type[BodyT]) -> BodyT:
    """`value` as `kind`. Raises `InvalidRequest` that names the first field that is wrong."""
    names = {field.alias or name for name, field in kind.model_fields.items()}
    known = {}
    for key, item in value.items():
        if key in names:
            known[key] = item
        elif key in UNSUPPORTED:
            if item is not None and not any(type(item) is type(free) and item == free for free in UNSUPPORTED[key]):
                instead = f"; {INSTEAD[key]}" if key in INSTEAD else ""
                raise InvalidRequest(key, f"is not supported{instead}", code="unsupported_parameter")
        else:
            raise InvalidRequest(key[:128], "is not a field of this request", code="unknown_parameter")
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: ValidationError) -> InvalidRequest:
    problems = error.errors(include_url=False, include_context=False, include_input=False)[:MAX_ERRORS]
    told = []
    for problem in problems:
        path = ".".join(str(part) for part in problem["loc"] if part not in ("str", "dict[str,any]"))[:128]
        told.append((path or str(problem["type"]), str(problem["msg"])[:512]))
    param, message = told[0]
    others = "".join(f"; {path}: {text}" for path, text in told[1:])
    kind = problems[0]["type"]
    code = {
        "missing": "missing_required_parameter",
        "extra_forbidden": "unknown_parameter",
        "unsupported": "unsupported_parameter",
        "best_of": "unsupported_parameter",
        "echo": "unsupported_parameter",
    }.get(kind, "invalid_value")
    return InvalidRequest(param, message[:1].lower() + message[1:] + others, code=code)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequest(key[:128], "is given twice in one object", code="invalid_json")
            seen.add(key)
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InvalidRequest("body", f"holds the number {text[:32]}, which is not finite", code="invalid_json")
    return number
