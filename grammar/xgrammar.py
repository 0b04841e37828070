"""The xgrammar backend: EBNF. Importing this file costs seconds (it loads torch and transformers), so only
`compile` does, when the first EBNF spec comes. W words of 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq

import numpy as np
import xgrammar
from numpy.typing import NDArray

from specdec.grammar.ebnf_process import EbnfProcess, TooSlow
from specdec.grammar.refusal import refusal
from specdec.grammar.spec import Ebnf
from specdec.grammar.walk import MatcherFailed, TreeConstraint, Vocabulary


class XgrammarCompiler:
    """Compiles EBNF for one model, in `process`. `token_bytes` has one entry a token, empty where it is no text."""

    def __init__(self, token_bytes: list[bytes], vocabulary: Vocabulary, process: EbnfProcess) -> None:
        self._vocabulary = vocabulary
        self._process = process
        self._info = xgrammar.TokenizerInfo(
            token_bytes,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=sorted(vocabulary.end_ids),
        )
        self._info_json = self._info.serialize_json()

    def compile(self, spec: Ebnf, param: str) -> XgrammarGrammar:
        """The grammar of `spec`. Raises `InvalidRequest` for `param` when it does not parse, derives no text or takes
        too long to compile."""
        try:
            compiled, result = self._process.compile(self._info_json, spec.text)
        except TooSlow as error:
            raise refusal(param, str(error), "too_large") from error
        if not compiled:
            # "[time] /path/file.cc:106: what is wrong"
            raise refusal(param, re.sub(r"^\[[^\]]*\]\s*\S+:\d+:\s*", "", result), "invalid_grammar")
        grammar = XgrammarGrammar(xgrammar.CompiledGrammar.deserialize_json(result, self._info), self._vocabulary)
        try:
            row_W = self._vocabulary.row(grammar.matcher())
        except MatcherFailed as failure:
            raise refusal(param, f"is too complex: {failure}", "too_large") from failure
        if not row_W.any():
            raise refusal(param, "the rule root derives no text that this model can write", "unsatisfiable")
        return grammar


class XgrammarGrammar:
    """A compiled grammar."""

    __slots__ = ("_compiled", "_vocabulary")

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary

    def start(self) -> TreeConstraint:
        """See `Grammar.start`."""
        return TreeConstraint(self.matcher, self.matcher, self._vocabulary)

    def matcher(self) -> XgrammarMatcher:
        """A matcher at the beginning of the text."""
        return XgrammarMatcher(xgrammar.GrammarMatcher(self._compiled), min(self._vocabulary.end_ids))


class XgrammarMatcher:
    """A `Matcher` over GrammarMatcher. It never sees an end token; the bit of one says that the text may end."""

    __slots__ = ("_end_id", "_matcher")

    def __init__(self, matcher: xgrammar.GrammarMatcher, end_id: int) -> None:
        self._matcher = matcher
        self._end_id = end_id

    def fill(self, words_W: NDArray[np.int32], address: int) -> bool:
        """See `Matcher.fill`."""
        rows = words_W.reshape(1, -1)
        try:
            partial = self._matcher.fill_next_token_bitmask(rows)
        except RuntimeError as error:
            raise MatcherFailed(str(error)) from error
        if not partial:
            rows[:] = -1
        return bool(int(words_W[self._end_id >> 5]) >> (self._end_id & 31) & 1)

    def consume(self, tokens: Seq[int]) -> None:
        """See `Matcher.consume`."""
        for token in tokens:
            if not self._matcher.accept_token(token):
                raise MatcherFailed(f"token {token} cannot follow")

    def rollback(self, count: int) -> None:
        """See `Matcher.rollback`."""
        try:
            self._matcher.rollback(count)
        except RuntimeError as error:
            raise MatcherFailed(str(error)) from error

    def forced(self) -> Seq[int]:
        """See `Matcher.forced`: none. What xgrammar names is not as the model's tokenizer would write it."""
        return ()
