"""Schemas compiled by what other libraries make of JSON Schema, to be measured beside ours. For evaluation only: both
let invalid instances pass, so nothing that answers anybody may use this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specdec.errors import InvalidRequest
from specdec.grammar.spec import Ebnf, Regex, Spec

if TYPE_CHECKING:
    from specdec.evals.vocabulary import EvalVocabulary
    from specdec.protocols import Grammar


def rival_compiler(vocabulary: EvalVocabulary, backend: str) -> Callable[[str], Grammar]:
    """Makes grammars of schemas (JSON text) by the front end of xgrammar or outlines-core, in their defaults.

    Raises `ConfigError` where the library is not installed. What it makes raises `InvalidRequest` for a schema that
    the library refuses, or that is too large for our own limits.
    """
    compiler = vocabulary.compiler({}, backend)
    front = {"xgrammar": _ebnf, "outlines": _regex}[backend]

    def compile_schema(schema: str) -> Grammar:
        try:
            spec = front(schema)
        except (RuntimeError, ValueError, TypeError) as error:
            raise InvalidRequest("schema", " ".join(str(error).split())[:300], code="unsupported_schema") from error
        return compiler.compile(spec, "schema")

    return compile_schema


def _ebnf(schema: str) -> Spec:
    import xgrammar

    return Ebnf(str(xgrammar.Grammar.from_json_schema(schema)))


def _regex(schema: str) -> Spec:
    from outlines_core.json_schema import build_regex_from_schema

    return Regex(build_regex_from_schema(schema))
