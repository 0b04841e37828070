"""Messages to a prompt: chat templates (Jinja) and their safe encoding. Knows no model and no HTTP.

A template is the operator's choice, like the weights beside it: it cannot run code or reach files, and its output, its
ranges, products and powers are bounded, but it may still take its time. Messages are data: nothing in them is run.
"""

from __future__ import annotations

import json
import operator
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.errors import InvalidRequest, ModelError
from specdec.tokenizer import Tokenizer

MAX_CHARACTERS = 10_000_000
MAX_DEPTH = 100
_OURS = frozenset(
    (
        "messages",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "chat_template",
        "tokenize",
        "continue_final_message",
    )
)


class ChatTemplate:
    """A compiled template, with the names and filters that Hugging Face's templates expect. Shared by threads."""

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        """The template may print the named tokens of `tokenizer`. Raises ModelError, with the line, for a template that
        does not parse."""
        self._named_tokens = tokenizer.named_tokens
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        max_characters: int = MAX_CHARACTERS,
    ) -> str:
        """The prompt as text. `extra` holds more variables for the template: `tools`, `documents`, or its own switches.

        Content may be a string, a list of `{"type": "text", "text": ...}` (joined by line feeds), or None.
        Raises InvalidRequest: for messages of another shape, for what the template refuses or fails at, for a text of
        more than `max_characters`, and for names in `extra` that are not the caller's to set.
        """
        variables = {
            "tools": None,
            "documents": None,
            **self._checked(extra),
            **self._named_tokens,
            "messages": flatten(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        pieces, length = [], 0
        try:
            for piece in self._template.generate(variables):
                length += len(piece)
                if length > max_characters:
                    break
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise InvalidRequest("messages", f"the chat template refuses them: {error.message}") from error
        except Exception as error:  # whatever the template's expressions raise on these messages
            raise InvalidRequest("messages", f"the chat template fails on them: {error!r}") from error
        if length > max_characters:
            raise InvalidRequest("messages", f"the prompt is longer than {max_characters} characters")
        return "".join(pieces)

    def _checked(self, extra: Mapping[str, Any] | None) -> Mapping[str, Any]:
        for name in extra or {}:
            if not isinstance(name, str) or not name.isidentifier():
                raise InvalidRequest("chat_template_kwargs", f"{name!r} is not a name")
            if name in _OURS or name in self._named_tokens or name in self._environment.globals:
                raise InvalidRequest(f"chat_template_kwargs.{name}", "is not for a request to set")
        return extra or {}


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    extra: Mapping[str, Any] | None = None,
    max_characters: int = MAX_CHARACTERS,
) -> list[int]:
    """The prompt's ids. Special tokens come from the template only: where a message (or `extra`) spells one, that stays
    text. Otherwise the ids are those of the whole rendered text. BOS stands first if the tokenizer puts one before a
    text, once, whether the template prints it or not.

    Raises InvalidRequest as `ChatTemplate.render`, and if there is no template.
    """
    if template is None:
        raise InvalidRequest("messages", "the model has no chat template; pass one with --chat-template")
    guard = _Guard(tokenizer)
    text = template.render(
        [guard.hide(message, f"messages.{index}") for index, message in enumerate(flatten(messages))],
        add_generation_prompt=add_generation_prompt,
        extra=guard.hide(dict(extra or {}), "chat_template_kwargs"),
        max_characters=max_characters,
    )
    ids = tokenizer.encode_parts(guard.reveal(text))
    prefix = list(tokenizer.prefix)
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def flatten(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose content is a string or None, text parts joined by line feeds. Raises InvalidRequest, naming the
    place, for anything else and for an empty list."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages", "must be a list of at least one message")
    flat = []
    for index, message in enumerate(messages):
        place = f"messages.{index}"
        if not isinstance(message, Mapping):
            raise InvalidRequest(place, f"must be an object with role and content, got {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequest(f"{place}.role", f"must be a string that is not empty, got {role!r:.50}")
        flat.append({**message, "content": _content(message.get("content"), f"{place}.content")})
    return flat


def _content(content: object, place: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(place, f"must be a string or a list of text parts, got {type(content).__name__}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise InvalidRequest(f"{place}.{index}.type", f"must be 'text', got {kind!r:.50}")
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{place}.{index}.text", f"must be a string, got {type(text).__name__}")
        texts.append(text)
    return "\n".join(texts)


class _Guard:
    """Stands an unguessable word in for each special token that a caller's string spells, until rendering is done."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._nonce = secrets.token_hex(16)
        self._hidden: list[str] = []

    def hide(self, value: Any, place: str, depth: int = 0) -> Any:
        """`value` with words for special tokens in all its strings, keys too. Raises InvalidRequest, naming `place`."""
        if depth > MAX_DEPTH:
            raise InvalidRequest(place, f"is nested deeper than {MAX_DEPTH}")
        if isinstance(value, str):
            return self._hide_text(value, place)
        if isinstance(value, Mapping):
            return {
                self.hide(key, place, depth + 1): self.hide(item, f"{place}.{key}" if depth < 2 else place, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(item, place, depth + 1) for item in value]
        return value

    def reveal(self, text: str) -> list[tuple[str, bool]]:
        """The rendered text in parts, and for each whether special tokens in it are meant."""
        parts: list[tuple[str, bool]] = []
        for index, piece in enumerate(re.split(rf"q{self._nonce}n(\d+)q", text)):
            parts.append((self._hidden[int(piece)], False) if index % 2 else (piece, True))
        return parts

    def _hide_text(self, text: str, place: str) -> str:
        try:
            spans = self._tokenizer.special_spans(text)
        except InvalidRequest as error:
            raise InvalidRequest(place, error.message) from None
        pieces, start = [], 0
        for begin, end, _ in spans:
            pieces += [text[start:begin], f"q{self._nonce}n{len(self._hidden)}q"]
            self._hidden.append(text[begin:end])
            start = end
        return "".join([*pieces, text[start:]]) if pieces else text


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the assistant says, for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers' `apply_chat_template` sets Jinja up, with products and powers bounded."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.intercepted_binops = frozenset(("*", "**"))
    environment.binop_table |= {"*": _multiply, "**": _power}
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _multiply(left: Any, right: Any) -> Any:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple | bytes) and isinstance(count, int):
            if len(sequence) * count > MAX_CHARACTERS:
                raise jinja2.TemplateError(f"a sequence of {len(sequence)} repeated {count} times is too long")
            return sequence * count
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
        raise jinja2.TemplateError("a product of more than 4096 bits is too large")
    return operator.mul(left, right)


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > 4096:
        raise jinja2.TemplateError("a power of more than 4096 bits is too large")
    return operator.pow(left, right)
