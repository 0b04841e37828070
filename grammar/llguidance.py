"""The llguidance backend: JSON Schema, JSON objects, regular expressions, choices, Lark and structural tags. Knows no
EBNF.

Strict: a schema is enforced as a whole or refused. W words of 32 bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from specdec.errors import ConfigError, ConstraintError
from specdec.grammar.checker import Judge
from specdec.grammar.ending import can_end
from specdec.grammar.lark import structure
from specdec.grammar.narrowing import Narrowing
from specdec.grammar.refusal import refusal
from specdec.grammar.schema import PreparedSchema
from specdec.grammar.spec import Choice, Lark, Regex, Whitespace
from specdec.grammar.spelling import Spelling
from specdec.grammar.structural import StructuralGrammar
from specdec.grammar.token_table import TokenTable
from specdec.grammar.validated import Complaint, Validated, Validator, problem
from specdec.grammar.walk import MatcherFailed, TreeConstraint, Vocabulary

SILENT = 0
# What may take too many states, where a message has to name something.
STATEFUL = frozenset(["minLength", "maxLength", "pattern", "patternProperties", "propertyNames"])
MAX_ITEMS_IN_ROW = 10_000  # four an optional property: room for all that a spec may have
MAX_ITEMS_IN_STEP = 50_000  # some 0.1 s of CPU: keys begin among 1,700 optional ones within it
STEP_FUEL = 200_000  # of the lexer: some 0.01 s of CPU, once where a text is the first to come to a state
SCHEMA_STEP_FUEL = 2_000_000  # where the states of strings have been gone through (`lark.can_be_explored`)
MAX_LEXER_STATES = 50_000  # one to two kB each, shared by all texts under one grammar
# A row where one of n terminals comes next, as the keys of a large object do, takes up to n**2 / 50,000 ms of CPU, and
# all rows of a step should not take much more than 100 ms.
SQUARES_A_STEP = 5_000_000
_TERMINAL = re.compile(r"(?:\n|\\n)[A-Z]\w*:")  # a grammar of tags is JSON
BYTES_A_CHARACTER = 64  # measured: 25 to 63, more for longer ones
# A space, or a line break with up to 40 spaces and tabs. It is taken once between two tokens.
FLEXIBLE_WHITESPACE = r"[ ]?|\r?\n[ \t]{0,40}"


@dataclass(frozen=True, slots=True, eq=False)
class LlguidanceTokens:
    """A model's tokenizer as llguidance sees it, which of its tokens are text, and how JSON is spelled with them."""

    tokenizer: LLTokenizer
    vocabulary: Vocabulary
    table: TokenTable
    spelling: Spelling

    @classmethod
    def load(
        cls, tokenizer_json: str, vocab_size: int, end_ids: tuple[int, ...], special_ids: frozenset[int]
    ) -> LlguidanceTokens:
        """From the text of a tokenizer.json; `vocab_size` is the width of the logits, which may be more or less than
        the tokenizer's. Raises `ConfigError` when the text is no tokenizer."""
        try:
            tokenizer = _tokenizer(tokenizer_json, vocab_size, end_ids)
        except ValueError as error:
            raise ConfigError(f"the tokenizer cannot be used for grammars: {error}") from error
        # Ids past the tokenizer's own count as special there, so padding of the logits is never text.
        text_ids = (
            token
            for token in range(min(vocab_size, tokenizer.vocab_size))
            if token not in special_ids and not tokenizer.is_special_token(token)
        )
        vocabulary = Vocabulary.of(vocab_size, text_ids, end_ids)
        spelled = tuple(
            tokenizer.decode_bytes([token]) if vocabulary.is_text(token) else b"" for token in range(vocabulary.size)
        )
        table = TokenTable.of(spelled, vocabulary.end_words_W)
        return cls(tokenizer, vocabulary, table, Spelling.of(filter(None, spelled)))

    def matcher(self, matcher: LLMatcher) -> LlguidanceMatcher:
        """A `Matcher` over one of llguidance's for this tokenizer."""
        return LlguidanceMatcher(matcher, (self.tokenizer.vocab_size + 31) // 32)

    def spell(self, token: int) -> bytes:
        """The bytes of one token."""
        return self.tokenizer.decode_bytes([token])

    def token_bytes(self) -> list[bytes]:
        """The bytes of every token of the logits, in order; empty for those that are no text."""
        return list(self.table.spelled)


@dataclass(frozen=True, slots=True, eq=False)
class LlguidanceGrammar:
    """A compiled grammar. Its matcher is never moved: constraints start from copies of it.

    Copies share one lexer, with what it has learnt and with its errors: a lexer that has hit a limit in one text fails
    at once in all. So what a failed matcher is replaced by is compiled anew.
    """

    source: str
    matcher: LLMatcher
    tokens: LlguidanceTokens
    narrowing: Narrowing | None = None
    step_fuel: int = STEP_FUEL

    @property
    def num_bytes(self) -> int:
        """About what it holds in memory before a text is written under it."""
        return 200_000 + BYTES_A_CHARACTER * len(self.source)

    @property
    def num_terminals(self) -> int:
        """How many lines of it define one, at least 1."""
        return max(1, len(_TERMINAL.findall(self.source)))

    def start(self) -> TreeConstraint:
        """See `Grammar.start`."""
        return TreeConstraint(
            lambda: self.tokens.matcher(self.matcher.deep_copy()),
            lambda: self.tokens.matcher(_compiled(self.source, self.tokens, self.step_fuel)),
            self.tokens.vocabulary,
            self.narrowing,
            max(1, SQUARES_A_STEP // self.num_terminals**2),
        )


@dataclass(frozen=True, slots=True, eq=False)
class TaggedGrammar:
    """A grammar of texts with JSON in them: what it captures under a number is judged by the validator with it."""

    grammar: LlguidanceGrammar
    validators: tuple[Validator, ...]

    def start(self) -> Validated:
        """See `Grammar.start`."""
        return Validated(self.grammar.start(), self.judge)

    def judge(self, tokens: Seq[int]) -> Complaint | None:
        """What the schemas say of the JSON in a whole text."""
        matcher = self.grammar.matcher.deep_copy()
        if matcher.try_consume_tokens(list(tokens)) < len(tokens):
            raise ConstraintError("the grammar failed: it does not take the whole text again")
        for name, data in matcher.get_captures():
            wrong = problem(data, self.validators[int(name)])
            if wrong is not None:
                return Complaint(wrong, data)
        return None


class LlguidanceMatcher:
    """A `Matcher` over LLMatcher, whose error state looks like the end of the text unless it is asked for."""

    __slots__ = ("_matcher", "_num_words")

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        """`num_words` are those that llguidance writes: its own vocabulary's, not the logits'."""
        self._matcher = matcher
        self._num_words = num_words

    def fill(self, words_W: NDArray[np.int32], address: int) -> bool:
        """See `Matcher.fill`."""
        if self._num_words > len(words_W):
            wide_W = np.empty(self._num_words, np.int32)
            may_end = self.fill(wide_W, wide_W.ctypes.data)
            words_W[:] = wide_W[: len(words_W)]
            return may_end
        self._matcher.unsafe_compute_mask_ptr(address, self._num_words * 4)
        if self._matcher.is_error():
            words_W[:] = 0
            # A dead end is an error there, and an empty row here.
            if not self._matcher.get_error().startswith("NoExtension"):
                self._check()
            return False
        return self._matcher.is_accepting()

    def consume(self, tokens: Seq[int]) -> None:
        """See `Matcher.consume`."""
        count = self._matcher.try_consume_tokens(list(tokens))
        if count < len(tokens):
            self._check()
            raise MatcherFailed(f"token {tokens[count]} cannot follow")

    def copy(self) -> LlguidanceMatcher:
        """See `Matcher.copy`. Takes time in the length of the text: 40 us for 1,000 tokens."""
        self._check()
        return LlguidanceMatcher(self._matcher.deep_copy(), self._num_words)

    def forced(self) -> Seq[int]:
        """See `Matcher.forced`: canonical tokens, the last one held back where it may merge with what follows."""
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        return tokens

    def _check(self) -> None:
        if self._matcher.is_error():
            raise MatcherFailed(" ".join(self._matcher.get_error().replace("<non-verbose/>", "").split())[:300])


def compile_llguidance(spec: Regex | Choice | Lark, tokens: LlguidanceTokens, param: str) -> LlguidanceGrammar:
    """The grammar of `spec`. Raises `InvalidRequest` for `param` when it is invalid, too large or unsatisfiable."""
    code = "invalid_grammar" if isinstance(spec, Lark) else "invalid_regex"
    try:
        source = _source(spec)
    except ValueError as error:
        raise refusal(param, str(error), code) from error
    matcher = _compiled(source, tokens)
    if matcher.is_error():
        message = matcher.get_error()
        if not isinstance(spec, Lark):
            # The reason follows the last "error:", after a drawing of the pattern and before one of our own notation.
            message = message.rsplit("error:", 1)[-1]
        raise refusal(param, message.split("\n")[0], code)
    return _started(source, matcher, tokens, param)


def compile_json(
    prepared: PreparedSchema, whitespace: Whitespace, tokens: LlguidanceTokens, param: str
) -> LlguidanceGrammar:
    """The grammar of a schema. Raises `InvalidRequest` for `param` when it is too large or unsatisfiable."""
    source = LLMatcher.grammar_from_lark(prepared.text + structure(_whitespace(whitespace)))
    matcher = _compiled(source, tokens, SCHEMA_STEP_FUEL)
    where = prepared.pointers(STATEFUL)
    needs_blanks = whitespace not in ("compact", "flexible")
    if matcher.is_error():
        raise refusal(param, f"is too complex: {matcher.get_error()}{where}", "too_large")
    narrowing = None
    if prepared.freedom.open_keys or prepared.residue is not None:
        judge = Judge(prepared.residue)
        narrowing = Narrowing(tokens.table, judge.start(), prepared.freedom, needs_blanks=needs_blanks)
    grammar = replace(_started(source, matcher, tokens, param, narrowing), step_fuel=SCHEMA_STEP_FUEL)
    if prepared.residue is None:
        return grammar
    # Blanks change nothing about it, so where they must stand the search does without them.
    searched = compile_json(prepared, "compact", tokens, param) if needs_blanks else grammar
    if not can_end(searched.start(), tokens.table):
        checked = prepared.pointers(verdict="checked")
        raise refusal(param, f"no value satisfies it, with all that is checked{checked}", "unsatisfiable")
    return grammar


def compile_structural(
    structural: StructuralGrammar, whitespace: Whitespace, tokens: LlguidanceTokens, param: str
) -> TaggedGrammar:
    """The grammar of tagged text. Raises `InvalidRequest` for `param` when it is too large or unsatisfiable."""
    grammars = [{"name": "text", "lark_grammar": structural.lark}]
    for number, (prepared, own) in enumerate(structural.schemas):
        text = prepared.text + structure(_whitespace(own or whitespace))
        grammars.append({"name": f"schema{number}", "lark_grammar": text})
    source = json.dumps({"grammars": grammars})
    matcher = _compiled(source, tokens, SCHEMA_STEP_FUEL)
    if matcher.is_error():
        raise refusal(param, f"is too complex: {matcher.get_error()}", "too_large")
    validators = tuple(prepared.validator for prepared, _ in structural.schemas)
    grammar = replace(_started(source, matcher, tokens, param), step_fuel=SCHEMA_STEP_FUEL)
    return TaggedGrammar(grammar, validators)


def _started(
    source: str, matcher: LLMatcher, tokens: LlguidanceTokens, param: str, narrowing: Narrowing | None = None
) -> LlguidanceGrammar:
    """The grammar, if a text can begin under it."""
    try:
        row_W = tokens.vocabulary.row(tokens.matcher(matcher))
    except MatcherFailed as failure:
        raise refusal(param, f"is too complex: {failure}", "too_large") from failure
    if not row_W.any():
        raise refusal(param, "no text that this model can write satisfies it", "unsatisfiable")
    return LlguidanceGrammar(source, matcher, tokens, narrowing)


def _tokenizer(tokenizer_json: str, vocab_size: int, end_ids: tuple[int, ...]) -> LLTokenizer:
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(end_ids))
    except ValueError:
        # The tokenizer may be larger than the logits, or an end token lie beyond it; then it says which it has. That
        # costs a second reading, and it must know one end token: without any it would call token 0 the end.
        size = LLTokenizer(tokenizer_json).vocab_size
        known = [token for token in end_ids if token < size]
        if not known:
            raise ValueError(f"none of the end tokens {list(end_ids)} is among its {size} tokens") from None
        return LLTokenizer(tokenizer_json, n_vocab=max(vocab_size, size), eos_token=known)


def _compiled(source: str, tokens: LlguidanceTokens, step_fuel: int = STEP_FUEL) -> LLMatcher:
    limits = LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        step_max_items=MAX_ITEMS_IN_STEP,
        step_lexer_fuel=step_fuel,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    return LLMatcher(tokens.tokenizer, source, log_level=SILENT, limits=limits)


def _source(spec: Regex | Choice | Lark) -> str:
    """The grammar in llguidance's own notation."""
    match spec:
        case Regex():
            return LLMatcher.grammar_from_regex(spec.pattern)
        case Choice():
            return LLMatcher.grammar_from_regex("|".join(map(_literal, spec.options)))
        case Lark():
            return LLMatcher.grammar_from_lark(spec.text)


def _whitespace(whitespace: Whitespace) -> str | None:
    """The regular expression of what may stand between two tokens of JSON; None for nothing."""
    return {"compact": None, "flexible": FLEXIBLE_WHITESPACE}.get(whitespace, whitespace)


def _literal(text: str) -> str:
    """A regular expression for exactly `text`."""
    return re.sub(r"[^A-Za-z0-9]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)
