"""Specs in, grammars out: one compiler a model, shared by threads. Picks the backend; knows no engine."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from specdec.errors import ConfigError, InvalidRequest
from specdec.grammar.ebnf_process import EbnfProcess
from specdec.grammar.llguidance import LlguidanceTokens, compile_json, compile_llguidance
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
    Whitespace,
)
from specdec.grammar.validated import ValidatedGrammar
from specdec.protocols import Grammar

if TYPE_CHECKING:
    from specdec.grammar.xgrammar import XgrammarCompiler

MAX_CACHED = 128

# The field of each spec that a complaint is about.
_FIELDS: dict[type, str] = {
    JsonSchema: "schema",
    JsonObject: "whitespace",
    Regex: "pattern",
    Choice: "options",
    Ebnf: "text",
    Lark: "text",
}


class Compiler:
    """Compiles specs for one model, off the engine's thread, and keeps the 128 used last.

    `tokenizer_json` is the text of tokenizer.json, `vocab_size` the width of the logits, `end_ids` all tokens that end
    a text, `special_ids` tokens that are never text, `remotes` the documents by address that schemas may refer to. The
    tokenizer is read when the first spec is compiled.

    Raises `ConfigError` for end tokens that are missing or outside the vocabulary.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        end_ids: tuple[int, ...],
        special_ids: frozenset[int],
        *,
        remotes: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
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
        self._tokens: LlguidanceTokens | None = None
        self._ebnf: XgrammarCompiler | None = None
        self._loading = threading.RLock()
        self._cache: OrderedDict[Spec, Grammar] = OrderedDict()
        self._cache_lock = threading.Lock()

    def compile(self, spec: Spec, param: str | None = None) -> Grammar:
        """The grammar of `spec`, from the cache where it is there. May take seconds for a large one.

        Raises `InvalidRequest` naming `param` (the spec's own field where that is None) when the spec does not parse,
        asks for what no backend enforces, or cannot be satisfied; its code is one of "invalid_schema",
        "unsupported_schema", "unsatisfiable", "invalid_regex", "invalid_grammar", "too_large".
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
            case Ebnf():
                return self._xgrammar().compile(spec, param)
            case _:
                return compile_llguidance(spec, self._llguidance(), param)

    def _json(self, schema: str, whitespace: Whitespace, formats: Formats, param: str) -> Grammar:
        tokens = self._llguidance()
        try:
            prepared = prepare(schema, formats=formats, remotes=self._remotes, spelling=tokens.spelling)
        except InvalidRequest as error:
            raise InvalidRequest(param, error.message, code=error.code) from error
        return ValidatedGrammar(compile_json(prepared, whitespace, tokens, param), prepared.validator, tokens.spell)

    def _llguidance(self) -> LlguidanceTokens:
        with self._loading:
            if self._tokens is None:
                self._tokens = LlguidanceTokens.load(
                    self._tokenizer_json, self._vocab_size, self._end_ids, self._special_ids
                )
            return self._tokens

    def _xgrammar(self) -> XgrammarCompiler:
        with self._loading:
            if self._ebnf is None:
                tokens = self._llguidance()
                process = EbnfProcess()  # first: it loads xgrammar while we do
                from specdec.grammar.xgrammar import XgrammarCompiler

                self._ebnf = XgrammarCompiler(tokens.token_bytes(), tokens.vocabulary, process)
            return self._ebnf
