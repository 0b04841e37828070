"""The outlines-core backend: regular expressions and choices. The library itself runs in a process of its own; what
comes back is a table, and a place in a text is a number of a state. W words of 32 bits, S states.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.grammar.compile_process import CompileProcess, TooSlow
from specdec.grammar.llguidance import LlguidanceTokens
from specdec.grammar.patterns import Node
from specdec.grammar.refusal import refusal
from specdec.grammar.rust_patterns import NOTHING, without, written
from specdec.grammar.walk import MatcherFailed, TreeConstraint, Vocabulary

MAX_WRITTEN = 1_000_000  # characters of a pattern with every class spelled out
CPU_SECONDS = 10.0  # a pattern that others take at once may need as many
SENTINEL = 0x10FFFF  # a noncharacter, which marks the end of the pattern


class OutlinesBackend:
    """Compiles reduced patterns for one model, in a process of its own."""

    def __init__(self, tokens: LlguidanceTokens) -> None:
        self._vocabulary = tokens.vocabulary
        self._target = [base64.b64encode(data).decode() for data in tokens.token_bytes()]
        self._process = CompileProcess("outlines_worker.py", CPU_SECONDS)

    def compile(self, node: Node, param: str) -> Automaton:
        """The automaton of the texts of `node`. U+10FFFF, a noncharacter, is never written. Raises `InvalidRequest` for
        `param` when no text is left, or it takes too long, too much memory or too many states."""
        node = without(node, SENTINEL)
        if node == NOTHING:
            raise refusal(param, "no text without U+10FFFF, a noncharacter, satisfies it", "unsatisfiable")
        text = written(node)
        if len(text) > MAX_WRITTEN:
            raise refusal(param, f"has {len(text)} characters with its classes spelled out", "too_large")
        try:
            compiled, result = self._process.compile(self._target, text)
        except TooSlow as error:
            raise refusal(param, str(error), "too_large") from error
        if not compiled:
            if "too large" in result or "exceed" in result:
                raise refusal(param, result, "too_large")
            raise refusal(param, "no text that this model can write satisfies it", "unsatisfiable")
        num_words = len(self._vocabulary.text_words_W)
        ends_S = np.array(result["ends"], np.bool_)
        rows_SW = np.frombuffer(base64.b64decode(result["rows"]), np.int32).reshape(len(ends_S), num_words)
        counts_S = np.bitwise_count(rows_SW.view(np.uint32)).sum(axis=1, dtype=np.int64)
        return Automaton(
            rows_SW,
            np.frombuffer(base64.b64decode(result["nexts"]), np.uint16),
            np.concatenate([[0], np.cumsum(counts_S)]),
            ends_S,
            self._vocabulary,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Automaton:
    """A grammar as a table. State 0 is where texts begin; bit t of row s says that token t may follow state s, and the
    states that follow s lie in `nexts` from `firsts_S[s]` on, in the order of the bits."""

    rows_SW: NDArray[np.int32]
    nexts: NDArray[np.uint16]
    firsts_S: NDArray[np.int64]
    ends_S: NDArray[np.bool_]
    vocabulary: Vocabulary

    @property
    def num_bytes(self) -> int:
        """What its tables hold in memory."""
        return sum(table.nbytes for table in (self.rows_SW, self.nexts, self.firsts_S, self.ends_S))

    def start(self) -> TreeConstraint:
        """See `Grammar.start`."""
        return TreeConstraint(lambda: AutomatonMatcher(self), lambda: AutomatonMatcher(self), self.vocabulary)

    def next(self, state: int, token: int) -> int | None:
        """The state after `token`; None where it may not follow."""
        row_W = self.rows_SW[state]
        if not self.vocabulary.allows(row_W, token):
            return None
        word, below = token >> 5, (1 << (token & 31)) - 1
        rank = int(np.bitwise_count(row_W[:word].view(np.uint32)).sum())
        rank += (int(row_W[word]) & below).bit_count()
        return int(self.nexts[self.firsts_S[state] + rank])


class AutomatonMatcher:
    """A `Matcher` over an `Automaton`: the state that the text so far leads to."""

    __slots__ = ("_automaton", "_state")

    def __init__(self, automaton: Automaton, state: int = 0) -> None:
        self._automaton = automaton
        self._state = state

    def fill(self, words_W: NDArray[np.int32], address: int) -> bool:
        """See `Matcher.fill`."""
        words_W[:] = self._automaton.rows_SW[self._state]
        return bool(self._automaton.ends_S[self._state])

    def consume(self, tokens: Seq[int]) -> None:
        """See `Matcher.consume`."""
        for token in tokens:
            state = self._automaton.next(self._state, token)
            if state is None:
                raise MatcherFailed(f"token {token} cannot follow")
            self._state = state

    def copy(self) -> AutomatonMatcher:
        """See `Matcher.copy`."""
        return AutomatonMatcher(self._automaton, self._state)

    def forced(self) -> Seq[int]:
        """See `Matcher.forced`: none. A row tells which tokens may follow, not which the tokenizer would write."""
        return ()
