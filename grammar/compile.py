"""Specs in, grammars out: one compiler a model, shared by threads. Picks the backend; knows no engine.

What llguidance compiles is read and built here where it is small. Anything else is first tried out in a process that
can be killed (`llguidance_worker`), which hands over the reading, so that all there is left to do here is native.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from specdec.errors import ConfigError, InvalidRequest
from specdec.grammar.building import build, on_stack
from specdec.grammar.compile_process import CompileProcess, TooSlow
from specdec.grammar.llguidance import LlguidanceTokens, TaggedGrammar, compile_llguidance
from specdec.grammar.patterns import PatternRefused
from specdec.grammar.reading import read, unpacked
from specdec.grammar.refusal import refusal
from specdec.grammar.rust_patterns import one_of, reduced
from specdec.grammar.small import is_small
from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Lark, Regex, Spec, StructuralTag
from specdec.grammar.validated import ValidatedGrammar
from specdec.protocols import Grammar

MAX_CACHED_BYTES = 64 * 2**20
VERDICT_BYTES = 1_000
VALIDATOR_BYTES = 20  # for each character of a schema
STACK_BYTES = 64 * 2**20  # eight times what the process that tries out has: what it could build can be built here

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
    """Compiles specs for one model, off the engine's thread, and keeps 64 MiB of those used last.

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
        self._trials: CompileProcess | None = None
        self._cache: OrderedDict[Spec, tuple[Grammar | InvalidRequest, int]] = OrderedDict()
        self._cached_bytes = 0
        self._cache_lock = threading.Lock()

    def is_quick(self, spec: Spec) -> bool:
        """Whether `compile` answers within some 0.1 seconds of CPU, without another process."""
        with self._cache_lock:
            if spec in self._cache:
                return True
        return is_small(spec) and not (self._backend in BACKENDS and isinstance(spec, Regex | Choice))

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
        param = param or _FIELDS[type(spec)]
        with self._cache_lock:
            known, _ = self._cache.get(spec, (None, 0))
            if known is not None:
                self._cache.move_to_end(spec)
        if known is None:
            known = self._keep(spec, self._verdict(spec, param))
        if isinstance(known, InvalidRequest):
            raise InvalidRequest(param, known.message, code=known.code)
        return known

    def _verdict(self, spec: Spec, param: str) -> Grammar | InvalidRequest:
        """What becomes of a spec, for good. Raises `InvalidRequest` where another time it may be something else."""
        try:
            return self._compile(spec, param)
        except InvalidRequest as error:
            if isinstance(error.__cause__, TooSlow):
                raise
            return InvalidRequest(param, error.message, code=error.code)  # without what hangs on the one at hand

    def _keep(self, spec: Spec, verdict: Grammar | InvalidRequest) -> Grammar | InvalidRequest:
        """`verdict`, or what another thread has found meanwhile."""
        with self._cache_lock:
            if spec in self._cache:
                return self._cache[spec][0]
            self._cache[spec] = verdict, _num_bytes(spec, verdict)
            self._cached_bytes += self._cache[spec][1]
            while self._cached_bytes > MAX_CACHED_BYTES:
                self._cached_bytes -= self._cache.popitem(last=False)[1][1]
        return verdict

    def _compile(self, spec: Spec, param: str) -> Grammar:
        match spec:
            case Ebnf():
                if missing := _missing("xgrammar"):
                    raise refusal(param, f"is EBNF, which {missing}", "unsupported_parameter")
                ebnf: Grammar = self._library("xgrammar").compile_ebnf(spec.text, param)
                return ebnf
            case Regex() | Choice() if self._backend in BACKENDS:
                return self._regular(spec, param)
            case _:
                return self._built(spec, param)

    def _built(self, spec: Spec, param: str) -> Grammar:
        """The grammar that llguidance makes of `spec`."""
        tokens = self._llguidance()
        if is_small(spec):
            reading = read(
                spec,
                param,
                lambda regex, name: compile_llguidance(regex, tokens, name),
                remotes=self._remotes,
                spelling=tokens.spelling,
            )
        else:
            reading = unpacked(self._tried(spec, param), spec, self._remotes)
        return on_stack(STACK_BYTES, lambda: build(spec, reading, tokens, param))

    def _tried(self, spec: Spec, param: str) -> dict[str, Any]:
        """The reading of `spec`, packed, from the process that tries it out first."""
        with self._loading:
            if self._trials is None:
                self._trials = CompileProcess("llguidance_worker.py")
        target = {
            "tokenizer": self._tokenizer_json,
            "vocab_size": self._vocab_size,
            "end_ids": self._end_ids,
            "special_ids": sorted(self._special_ids),
            "remotes": dict(self._remotes),
        }
        job = {"kind": type(spec).__name__, "fields": dataclasses.asdict(spec), "param": param}
        try:
            compiled, result = self._trials.compile(target, job)
        except TooSlow as error:
            raise refusal(param, str(error), "too_large") from error
        if not compiled:
            raise InvalidRequest(param, result["message"], code=result["code"])
        reading: dict[str, Any] = result
        return reading

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
        self._built(spec, param)
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


def _num_bytes(spec: Spec, verdict: Any) -> int:
    """About what a verdict holds in memory, with the spec that it is kept under and the validators of its schemas."""
    texts = (value for value in dataclasses.astuple(spec) if isinstance(value, str))
    num_characters = sum(map(len, spec.options if isinstance(spec, Choice) else texts))
    if isinstance(verdict, InvalidRequest):
        return VERDICT_BYTES + num_characters
    inner: Any = verdict.grammar if isinstance(verdict, ValidatedGrammar | TaggedGrammar) else verdict
    num_bytes: int = inner.num_bytes
    return VERDICT_BYTES + VALIDATOR_BYTES * num_characters + num_bytes


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
