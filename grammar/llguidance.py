"""The llguidance backend: JSON Schema, JSON objects, regular expressions and choices. Knows no EBNF.

Strict: a schema is enforced as a whole or refused. W words of 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from specdec.errors import ConfigError, InvalidRequest
from specdec.grammar.lark import structure
from specdec.grammar.refusal import refusal
from specdec.grammar.schema import NO_REMOTES, prepare
from specdec.grammar.spec import Choice, JsonObject, JsonSchema, Regex, Whitespace
from specdec.grammar.walk import MatcherFailed, TreeConstraint, Vocabulary

SILENT = 0
MAX_ITEMS_IN_ROW = 10_000  # four an optional property: room for all that a spec may have
MAX_LEXER_STATES = 50_000  # one to two kB each, shared by all texts under one grammar
# One or two spaces, or a line break with up to 32 spaces or 16 tabs. llguidance takes it once between two tokens.
BOUNDED_WHITESPACE = r" {1,2}|\r?\n( {0,32}|\t{1,16})"


@dataclass(frozen=True, slots=True, eq=False)
class LlguidanceTokens:
    """A model's tokenizer as llguidance sees it, and which of its tokens are text."""

    tokenizer: LLTokenizer
    vocabulary: Vocabulary

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
        return cls(tokenizer, Vocabulary.of(vocab_size, text_ids, end_ids))

    def token_bytes(self) -> list[bytes]:
        """The bytes of every token of the logits, in order; empty for those that are no text."""
        decode = self.tokenizer.decode_bytes
        return [decode([t]) if self.vocabulary.is_text(t) else b"" for t in range(self.vocabulary.size)]


@dataclass(frozen=True, slots=True, eq=False)
class LlguidanceGrammar:
    """A compiled grammar. Its matcher is never moved: constraints start from copies of it.

    Copies share one lexer, with what it has learnt and with its errors: a lexer that has hit a limit in one text fails
    at once in all. So what a failed matcher is replaced by is compiled anew.
    """

    source: str
    matcher: LLMatcher
    tokens: LlguidanceTokens

    def start(self) -> TreeConstraint:
        """See `Grammar.start`."""
        return TreeConstraint(
            lambda: LlguidanceMatcher(self.matcher.deep_copy()),
            lambda: LlguidanceMatcher(_compiled(self.source, self.tokens)),
            self.tokens.vocabulary,
        )


class LlguidanceMatcher:
    """A `Matcher` over LLMatcher, whose error state looks like the end of the text unless it is asked for."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fill(self, words_W: NDArray[np.int32]) -> bool:
        """See `Matcher.fill`."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.get_error().startswith("NoExtension"):  # a dead end: an error there, an empty row here
            return False
        self._check()
        count = min(len(bits), len(words_W))
        words_W[:count] = bits[:count]
        return self._matcher.is_accepting()

    def consume(self, tokens: Seq[int]) -> None:
        """See `Matcher.consume`."""
        count = self._matcher.try_consume_tokens(list(tokens))
        self._check()
        if count < len(tokens):
            raise MatcherFailed(f"token {tokens[count]} cannot follow")

    def rollback(self, count: int) -> None:
        """See `Matcher.rollback`."""
        if not self._matcher.rollback(count):
            raise MatcherFailed(self._matcher.get_error() or f"cannot roll back {count} tokens")

    def forced(self) -> Seq[int]:
        """See `Matcher.forced`: canonical tokens, the last one held back where it may merge with what follows."""
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        return tokens

    def _check(self) -> None:
        if self._matcher.is_error():
            raise MatcherFailed(" ".join(self._matcher.get_error().replace("<non-verbose/>", "").split())[:300])


def compile_llguidance(
    spec: JsonSchema | JsonObject | Regex | Choice,
    tokens: LlguidanceTokens,
    param: str,
    remotes: Mapping[str, object] = NO_REMOTES,
) -> LlguidanceGrammar:
    """The grammar of `spec`; `remotes` are the documents that a schema may refer to. Raises `InvalidRequest` for
    `param` when it is invalid, unsupported or unsatisfiable."""
    source = _source(spec, param, remotes)
    matcher = _compiled(source, tokens)
    if matcher.is_error():
        raise _refusal(spec, param, matcher.get_error())
    try:
        row_W = tokens.vocabulary.row(LlguidanceMatcher(matcher))
    except MatcherFailed as failure:
        raise refusal(param, f"is too complex: {failure}", "too_large") from failure
    if not row_W.any():
        raise refusal(param, "no text that this model can write satisfies it", "unsatisfiable")
    return LlguidanceGrammar(source, matcher, tokens)


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


def _compiled(source: str, tokens: LlguidanceTokens) -> LLMatcher:
    limits = LLParserLimits(max_items_in_row=MAX_ITEMS_IN_ROW, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    return LLMatcher(tokens.tokenizer, source, log_level=SILENT, limits=limits)


def _source(spec: JsonSchema | JsonObject | Regex | Choice, param: str, remotes: Mapping[str, object]) -> str:
    """The grammar in llguidance's own notation."""
    match spec:
        case JsonSchema():
            try:
                prepared = prepare(spec.text, formats=spec.formats, remotes=remotes)
            except InvalidRequest as error:
                raise InvalidRequest(param, error.message, code=error.code) from error
            return _lark(prepared.text, spec.whitespace)
        case JsonObject():
            return _lark(prepare('{"type":"object"}').text, spec.whitespace)
        case Regex():
            return _regex(spec.pattern, param)
        case Choice():
            return _regex("|".join(map(_literal, spec.options)), param)


def _lark(text: str, whitespace: Whitespace) -> str:
    return LLMatcher.grammar_from_lark(text + structure(BOUNDED_WHITESPACE if whitespace == "flexible" else None))


def _regex(pattern: str, param: str) -> str:
    try:
        return LLMatcher.grammar_from_regex(pattern)
    except ValueError as error:
        raise refusal(param, str(error), "invalid_regex") from error


def _literal(text: str) -> str:
    """A regular expression for exactly `text`."""
    return re.sub(r"[^A-Za-z0-9]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)


def _refusal(spec: JsonSchema | JsonObject | Regex | Choice, param: str, message: str) -> InvalidRequest:
    if isinstance(spec, Regex | Choice):
        # The reason follows the last "error:", after a drawing of the pattern and before one of our own notation.
        return refusal(param, message.rsplit("error:", 1)[-1].split("\n")[0], "invalid_regex")
    return refusal(param, f"is too complex: {message}", "too_large")
