"""JSON text through a compiled schema, token by token under the mask, as a model would write it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec.grammar.compile import Compiler
from specdec.grammar.spec import Formats, JsonSchema
from specdec.mask import TokenMask
from specdec.protocols import Constraint, Grammar
from specdec.tree import root
from tests.grammar.small_tokenizer import END_IDS, SPECIAL_IDS, VOCAB_SIZE, encode, small_tokenizer


def compact(value: Any) -> str:
    """JSON text without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@functools.cache
def _compiler() -> Compiler:
    return Compiler(small_tokenizer().to_str(), VOCAB_SIZE, END_IDS, SPECIAL_IDS)


def compiled(schema: Any, formats: Formats = "assert", remotes: Mapping[str, object] | None = None) -> Grammar:
    """The grammar of a schema, compact."""
    compiler = _compiler()
    if remotes is not None:
        compiler = Compiler(small_tokenizer().to_str(), VOCAB_SIZE, END_IDS, SPECIAL_IDS, remotes=remotes)
    return compiler.compile(JsonSchema(schema, "compact", formats))


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether every token of a text is allowed where it stands, and the end after the last."""
    constraint = grammar.start()
    for token in encode(text):
        if not allowed(constraint)[token]:
            return False
        constraint.advance([token])
    return bool(allowed(constraint)[list(END_IDS)].all())


def allowed(constraint: Constraint) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The tokens that may follow."""
    mask = TokenMask(1, VOCAB_SIZE)
    constraint.mask(root(0), 0, mask)
    row = mask.allowed(0)
    assert row is not None
    return row
