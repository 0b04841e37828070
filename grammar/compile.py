"""Specs in, grammars out: one compiler a model, shared by threads. Picks the backend; knows no engine."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from specdec.errors import ConfigError, InvalidRequest
from specdec.grammar.llguidance import LlguidanceTokens, compile_json, compile_llguidance, compile_structural
from specdec.grammar.patterns import PatternRefused
from specdec.grammar.refusal import refusal
from specdec.grammar.rust_patterns import one_of, reduced
from specdec.grammar.schema import prepare
from specdec.grammar.spec import (
    Choice,
    Ebnf,
    Formats,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    Spec,
    StructuralTag,
    Whitespace,
)
from specdec.grammar.structural import structural_grammar
from specdec.grammar.validated import ValidatedGrammar
from specdec.protocols import Grammar

MAX_CACHED = 128

# The backends beside llguidance, which is always there: where they are found, and the package that they need.
BACKENDS: Mapping[str, tuple[str, str, str]] = {
    "xgrammar": ("specdec.grammar.xgrammar", "XgrammarBackend", "xgrammar"),
    "outlines": ("specdec.grammar.outlines", "OutlinesBackend", "outlines_core"),
}
CHOICES = ("auto", "llguidance", *BACKENDS)

# The field of each spec that a complaint is about.
_FIELDS: dict[type, str] = {
    JsonSchema: "schema",
    JsonObject: "whitespace",
    Regex: "pattern",
    Choice: "options",
    Ebnf: "text",
    Lark: "text",
    StructuralTag: "tag",
}


class Compiler:
    """Compiles specs for one model, off the engine's thread, and keeps the 128 used last.

    `tokenizer_json` is the text of tokenizer.json, `vocab_size` the width of the logits, `end_ids` all tokens that end
    a text, `special_ids` tokens that are never text, `remotes` the documents by address that schemas may refer to. The
    tokenizer is read when the first spec is compiled.

    `backend` ("auto", "llguidance", "xgrammar" or "outlines") compiles regular expressions and choices, with the same
    meaning whichever it is. The other specs have one sound backend each, which no choice changes: EBNF xgrammar, all
    else llguidance.

    Raises `ConfigError` for end tokens that are missing or outside the vocabulary, and for a backend that is not known
    or not installed.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        end_ids: tuple[int, ...],
        special_ids: frozenset[int],
        *,
        remotes: Mapping[str, object] = MappingProxyType({}),
        backend: str = "auto",
    ) -> None:
        check_backend(backend)
        if not end_ids:
            raise ConfigError("end_ids: a grammar needs at least one token that ends the text, got none")
        for token in end_ids:
            if not 0 <= token < vocab_size:
                raise ConfigError(f"end_ids: token {token} is not in the vocabulary of {vocab_size}")
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._special_ids = special_ids
        self._remotes = remotes
        self._backend = backend
        self._tokens: LlguidanceTokens | None = None
        self._libraries: dict[str, Any] = {}
        self._loading = threading.RLock()
        self._cache: OrderedDict[Spec, Grammar] = OrderedDict()
        self._cache_lock = threading.Lock()

    def compile(self, spec: Spec, param: str | None = None) -> Grammar:
        """The grammar of `spec`, from the cache where it is there. May take seconds for a large one.

        Raises `InvalidRequest` naming `param` (the spec's own field where that is None) when the spec does not parse,
        asks for what no backend enforces, or cannot be satisfied; its code is one of "invalid_schema",
        "unsupported_schema", "unsatisfiable", "invalid_regex", "invalid_grammar", "invalid_structural_tag",
        "unsupported_structural_tag", "too_large".
        """
        if type(spec) not in _FIELDS:
            names = ", ".join(kind.__name__ for kind in _FIELDS)
            raise InvalidRequest(param or "grammar", f"must be one of {names}, got {type(spec).__name__}")
        with self._cache_lock:
            if spec in self._cache:
                self._cache.move_to_end(spec)
                return self._cache[spec]
        grammar = self._compile(spec, param or _FIELDS[type(spec)])
        with self._cache_lock:
            grammar = self._cache.setdefault(spec, grammar)
            self._cache.move_to_end(spec)
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return grammar

    def _compile(self, spec: Spec, param: str) -> Grammar:
        match spec:
            case JsonSchema():
                return self._json(spec.text, spec.whitespace, spec.formats, param)
            case JsonObject():
                return self._json('{"type":"object"}', spec.whitespace, "assert", param)
            case StructuralTag():
                return self._structural(spec, param)
            case Ebnf():
                if missing := _missing("xgrammar"):
                    raise refusal(param, f"is EBNF, which {missing}", "unsupported_parameter")
                ebnf: Grammar = self._library("xgrammar").compile_ebnf(spec.text, param)
                return ebnf
            case Regex() | Choice() if self._backend in BACKENDS:
                return self._regular(spec, param)
            case _:
                return compile_llguidance(spec, self._llguidance(), param)

    def _json(self, schema: str, whitespace: Whitespace, formats: Formats, param: str) -> Grammar:
        tokens = self._llguidance()
        try:
            prepared = prepare(schema, formats=formats, remotes=self._remotes, spelling=tokens.spelling)
        except InvalidRequest as error:
            raise InvalidRequest(param, error.message, code=error.code) from error
        return ValidatedGrammar(compile_json(prepared, whitespace, tokens, param), prepared.validator, tokens.spell)

    def _structural(self, spec: StructuralTag, param: str) -> Grammar:
        tokens = self._llguidance()
        structural = structural_grammar(
            json.loads(spec.text),
            param,
            lambda schema: prepare(
                JsonSchema(schema).text, formats=spec.formats, remotes=self._remotes, spelling=tokens.spelling
            ),
            lambda regex, name: compile_llguidance(regex, tokens, name),
        )
        return compile_structural(structural, spec.whitespace, tokens, param)

    def _llguidance(self) -> LlguidanceTokens:
        with self._loading:
            if self._tokens is None:
                self._tokens = LlguidanceTokens.load(
                    self._tokenizer_json, self._vocab_size, self._end_ids, self._special_ids
                )
            return self._tokens

    def _regular(self, spec: Regex | Choice, param: str) -> Grammar:
        """By the backend that was chosen. What llguidance refuses is refused here too, and what it takes is reduced to
        what means the same to all: a choice of backend never changes a language."""
        compile_llguidance(spec, self._llguidance(), param)
        try:
            node = reduced(spec.pattern) if isinstance(spec, Regex) else one_of(spec.options)
        except PatternRefused as error:
            message = f"{error} (grammar_backend is {self._backend})"
            raise refusal(param, message, "invalid_regex") from error
        grammar: Grammar = self._library(self._backend).compile(node, param)
        return grammar

    def _library(self, name: str) -> Any:
        """One of `BACKENDS`, loaded when it is first asked for."""
        with self._loading:
            if name not in self._libraries:
                module, kind, _ = BACKENDS[name]
                self._libraries[name] = getattr(import_module(module), kind)(self._llguidance())
            return self._libraries[name]


def check_backend(name: str) -> None:
    """Raises `ConfigError` for the name of a backend that is not known, or not installed."""
    if name not in CHOICES:
        raise ConfigError(f"grammar_backend must be one of {', '.join(CHOICES)}, got {name!r}")
    if missing := _missing(name):
        raise ConfigError(f"grammar_backend {name} {missing}")


def _missing(backend: str) -> str:
    """What is missing for a backend; empty where nothing is."""
    if backend not in BACKENDS or find_spec(BACKENDS[backend][2]) is not None:
        return ""
    package = BACKENDS[backend][2].replace("_", "-")
    return f"needs the package {package}, which is not installed: pip install 'specdec[{backend}]'"
