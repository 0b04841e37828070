"""From a reading to a grammar, natively: what runs once in the process that tries a spec out, and once where its texts
are written. Knows no cache and no process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from specdec.grammar.llguidance import LlguidanceTokens, compile_json, compile_llguidance, compile_structural
from specdec.grammar.reading import Reading
from specdec.grammar.refusal import refusal
from specdec.grammar.spec import Choice, Lark, Regex, Spec, StructuralTag
from specdec.grammar.structural import StructuralGrammar
from specdec.grammar.validated import ValidatedGrammar
from specdec.protocols import Grammar

ResultT = TypeVar("ResultT")

MAX_CHARACTERS = 500_000  # of a grammar's text: about a second of CPU and 30 MB
_STACK_SIZE = threading.Lock()  # it is set for the whole process


def build(spec: Spec, reading: Reading, tokens: LlguidanceTokens, param: str) -> Grammar:
    """The grammar of `spec`, whose reading is `reading`. Raises `InvalidRequest` for `param` when it is too large or
    unsatisfiable."""
    if reading.num_characters > MAX_CHARACTERS:
        message = f"becomes a grammar of {reading.num_characters} characters; at most {MAX_CHARACTERS} are allowed"
        raise refusal(param, message, "too_large")
    if isinstance(spec, Regex | Choice | Lark):
        return compile_llguidance(spec, tokens, param)
    if isinstance(spec, StructuralTag):
        schemas = tuple((schema.prepared, schema.whitespace) for schema in reading.schemas)
        return compile_structural(StructuralGrammar(reading.lark, schemas), spec.whitespace, tokens, param)
    [schema] = reading.schemas
    grammar = compile_json(schema.prepared, schema.whitespace, tokens, param)
    return ValidatedGrammar(grammar, schema.prepared.validator, tokens.spell)


def on_stack(num_bytes: int, work: Callable[[], ResultT]) -> ResultT:
    """`work()` in a thread that has a stack of `num_bytes`: native code that runs out of it ends the process. Raises
    what the work raises."""
    results: list[ResultT] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="specdec-compile", daemon=True)
    with _STACK_SIZE:
        before = threading.stack_size(num_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
