"""The xgrammar backend: EBNF, and regular expressions written as EBNF, since its own reading of them differs.
Importing this file costs seconds (it loads torch and transformers), so only `compile` does, when it is needed.
W words of 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq

import numpy as np
import xgrammar
from numpy.typing import NDArray

from specdec.grammar.compile_process import CompileProcess, TooSlow
from specdec.grammar.llguidance import LlguidanceTokens
from specdec.grammar.patterns import EMPTY, Class, Node, Repeat, Sequence
from specdec.grammar.patterns import Choice as Options
from specdec.grammar.refusal import refusal
from specdec.grammar.rust_patterns import NOTHING
from specdec.grammar.walk import MatcherFailed, TreeConstraint, Vocabulary

FEW_RANGES = 4  # a class of more gets a rule of its own


class XgrammarBackend:
    """Compiles EBNF and reduced patterns for one model, in a process of its own."""

    def __init__(self, tokens: LlguidanceTokens) -> None:
        self._vocabulary = tokens.vocabulary
        self._process = CompileProcess("xgrammar_worker.py")
        self._info = xgrammar.TokenizerInfo(
            tokens.token_bytes(),
            xgrammar.VocabType.RAW,
            vocab_size=self._vocabulary.size,
            stop_token_ids=sorted(self._vocabulary.end_ids),
        )
        self._info_json = self._info.serialize_json()

    def compile(self, node: Node, param: str) -> XgrammarGrammar:
        """The grammar of the texts of `node`. Raises `InvalidRequest` as `compile_ebnf` does."""
        if node == NOTHING:
            raise refusal(param, "no text satisfies it", "unsatisfiable")
        return self.compile_ebnf(written(node), param)

    def compile_ebnf(self, text: str, param: str) -> XgrammarGrammar:
        """The grammar of `text`. Raises `InvalidRequest` for `param` when it does not parse, derives no text or takes
        too long to compile."""
        try:
            compiled, result = self._process.compile(self._info_json, text)
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


def written(node: Node) -> str:
    """EBNF of the texts of a reduced pattern."""
    classes: dict[Class, str] = {}
    root = f"root ::= {_expression(node, classes)}\n"
    return root + "".join(f"{name} ::= {_members(item)}\n" for item, name in classes.items())


def _expression(node: Node, classes: dict[Class, str]) -> str:
    match node:
        case Class() if len(node.ranges) > FEW_RANGES:
            return classes.setdefault(node, f"class{len(classes)}")
        case Class():
            return _members(node)
        case Sequence() if node == EMPTY:
            return '""'
        case Sequence():
            return " ".join(_expression(part, classes) for part in node.parts)
        case Options():
            return f"({' | '.join(_expression(option, classes) for option in node.options)})"
        case Repeat():
            most = "" if node.most is None else node.most
            return f"({_expression(node.body, classes)}){{{node.least},{most}}}"
        case _:
            raise AssertionError(node)


def _members(node: Class) -> str:
    return "[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in node.ranges) + "]"


class XgrammarGrammar:
    """A compiled grammar."""

    __slots__ = ("_compiled", "vocabulary")

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._compiled = compiled
        self.vocabulary = vocabulary

    @property
    def num_bytes(self) -> int:
        """What it holds in memory."""
        return int(self._compiled.memory_size_bytes)

    def start(self) -> TreeConstraint:
        """See `Grammar.start`."""
        return TreeConstraint(self.matcher, self.matcher, self.vocabulary)

    def matcher(self) -> XgrammarMatcher:
        """A matcher at the beginning of the text."""
        return XgrammarMatcher(xgrammar.GrammarMatcher(self._compiled), min(self.vocabulary.end_ids))


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

    def copy(self) -> XgrammarMatcher:
        """See `Matcher.copy`."""
        return XgrammarMatcher(self._matcher.fork(), self._end_id)

    def forced(self) -> Seq[int]:
        """See `Matcher.forced`: none. What xgrammar names is not as the model's tokenizer would write it."""
        return ()
