"""A constraint over draft trees, for any backend that can fill a row, step forward and step back.

The walk is depth first and lazy: a matcher moves only when a row is wanted that nobody has asked for since the last
`advance`, and each branch goes along a copy of the one that stands after the committed tokens. It knows no grammar and
no model. V vocabulary, W words of 32 bits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from specdec.errors import ConstraintError
from specdec.grammar.json_text import JsonText
from specdec.grammar.narrowing import MANY, Narrowing
from specdec.mask import TokenMask
from specdec.tree import DraftTree

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
ROWS_AT_ONCE = 16
MAX_ROWS = 10_000
MAX_ROWS_AHEAD = 64  # for all tokens of a row that are suspected to lead nowhere
ROWS_KEPT = 2  # of them, for each


class MatcherFailed(Exception):
    """A backend failed or refused a token; the matcher that raised it must not be used again."""


class Matcher(Protocol):
    """A place in a text, as a backend keeps it. Every method raises `MatcherFailed` when the backend fails."""

    def fill(self, words_W: NDArray[np.int32], address: int) -> bool:
        """Write the bits of the tokens that may follow as text into a row of zeros that lies at `address`; whether the
        text may end here."""
        ...

    def consume(self, tokens: Seq[int]) -> None:
        """Move past `tokens`, none of them an end token."""
        ...

    def copy(self) -> Matcher:
        """Another one at the same place. Nothing ever steps back: llguidance 1.9.1 fills a row for the wrong place now
        and then once it has."""
        ...

    def forced(self) -> Seq[int]:
        """Tokens that must come next, as the real tokenizer writes them."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Which tokens are text, and which end it. `size` is the width of the logits."""

    size: int
    end_ids: frozenset[int]
    text_words_W: NDArray[np.int32]
    end_words_W: NDArray[np.int32]

    @classmethod
    def of(cls, size: int, text_ids: Iterable[int], end_ids: Iterable[int]) -> Vocabulary:
        """A vocabulary of `size` tokens: those of `text_ids` may be text unless they are end tokens too."""
        ends = frozenset(end_ids)
        allowed = np.zeros((2, (size + 31) // 32 * 32), np.bool_)
        allowed[0, list(text_ids)] = True
        allowed[0, list(ends)] = False
        allowed[1, list(ends)] = True
        text_words_W, end_words_W = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
        return cls(size, ends, text_words_W, end_words_W)

    def allows(self, row_W: NDArray[np.int32], token: int) -> bool:
        """Whether `row_W` has the bit of `token`; a token may be any integer."""
        return 0 <= token < self.size and has(row_W, token)

    def is_text(self, token: int) -> bool:
        """Whether a grammar may ever allow `token` as text."""
        return 0 <= token < self.size and has(self.text_words_W, token)

    def row(self, matcher: Matcher, blank: BlankRows | None = None) -> NDArray[np.int32]:
        """`[W]`: what the matcher allows as text, and every end token where the text may end."""
        words_W, address = (blank or BlankRows(len(self.text_words_W))).next()
        may_end = matcher.fill(words_W, address)
        words_W &= self.text_words_W
        if may_end:
            words_W |= self.end_words_W
        return words_W


class BlankRows:
    """Rows of zeros, a few made at once: asking NumPy for an address takes as long as filling a row."""

    __slots__ = ("_address", "_left", "_num_words", "_rows_NW")

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._left = 0

    def next(self) -> tuple[NDArray[np.int32], int]:
        """A row that nobody else has, and where it lies."""
        if not self._left:
            self._rows_NW = np.zeros((ROWS_AT_ONCE, self._num_words), np.int32)
            self._address = self._rows_NW.ctypes.data
            self._left = ROWS_AT_ONCE
        self._left -= 1
        return self._rows_NW[self._left], self._address + self._left * self._num_words * 4


class TreeConstraint:
    """A `Constraint` (specdec/protocols.py) over one matcher.

    `start` makes a matcher at the beginning of the text; `restart` makes one that shares nothing with any that failed.
    So whether a row can be had at all depends on the tokens before it, not on the drafts that were looked at.
    `narrowing` takes from every row what the grammar cannot say is wrong; without one nothing is followed. Between two
    calls of `advance` at most `max_rows` rows are worked out for drafts, so that slow ones do not hold up a step.
    """

    __slots__ = (
        "_blank",
        "_branch",
        "_committed",
        "_failure",
        "_forced",
        "_grammar_rows",
        "_matcher",
        "_max_rows",
        "_narrowing",
        "_path",
        "_restart",
        "_rows",
        "_texts",
        "_vocabulary",
    )

    def __init__(
        self,
        start: Callable[[], Matcher],
        restart: Callable[[], Matcher],
        vocabulary: Vocabulary,
        narrowing: Narrowing | None = None,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self._narrowing = narrowing
        self._max_rows = max_rows
        self._texts: dict[tuple[int, ...], JsonText] = {} if narrowing is None else {(): narrowing.start()}
        self._restart = restart
        self._vocabulary = vocabulary
        self._committed: list[int] = []
        self._matcher: Matcher | None = start()
        self._branch: Matcher | None = None  # a copy of the matcher that went along `_path`
        self._path: tuple[int, ...] = ()
        self._blank = BlankRows(len(vocabulary.text_words_W))
        # None where the backend fails: what the grammar says, and what is left of that.
        self._grammar_rows: dict[tuple[int, ...], NDArray[np.int32] | None] = {}
        self._rows: dict[tuple[int, ...], NDArray[np.int32] | None] = {}
        self._forced: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._failure: ConstraintError | None = None  # on the committed tokens: final

    def prune(self, tree: DraftTree) -> DraftTree:
        """See `Constraint.prune`. Only nodes that have children need a row of their own. Where it fails, or would be
        one too many, the node goes, with all below it; nothing follows an end token. Drafts are looked at one by one:
        one that only looking ahead takes from a row may stay, and is never picked there."""
        if tree.num_drafts == 0:
            return tree
        children = tree.children()
        paths: dict[int, tuple[int, ...]] = {0: ()}
        pending = [0]
        while pending:
            node = pending.pop()
            path = paths[node]
            row_W = self._grammar_row(path)
            if row_W is None:
                del paths[node]
                continue
            for child in reversed(children[node]):
                token = tree.tokens[child]
                if self._vocabulary.allows(row_W, token) and self._may_follow(path, token):
                    paths[child] = (*path, token)
                    if children[child] and token not in self._vocabulary.end_ids:
                        pending.append(child)
        return tree.keep(paths)

    def mask(self, tree: DraftTree, first_row: int, mask: TokenMask) -> None:
        """See `Constraint.mask`. Rows of end tokens, and of nodes that `prune` would cut, stay empty. The root's row is
        worked out at once, every other when it is looked at: a walk looks at few of a tree's."""
        assert mask.vocab_size == self._vocabulary.size, (mask.vocab_size, self._vocabulary.size)
        paths: list[tuple[int, ...]] = [()]
        if len(tree):
            mask.put(first_row, self._looked_at(()))
        for node in range(1, len(tree)):
            paths.append((*paths[tree.parents[node]], tree.tokens[node]))
            mask.fill_later(first_row + node, functools.partial(self._looked_at, paths[node]))

    def row(self, path: tuple[int, ...]) -> NDArray[np.int32]:
        """See `Constraint.row`."""
        row_W = self._row(path) if self._allowed(path) else None
        return self._blank.next()[0] if row_W is None else row_W

    def forced(self, path: tuple[int, ...] = ()) -> tuple[int, ...]:
        """See `Constraint.forced`. Stops before a token that is no text or that the narrowing forbids; nothing is
        forced where the backend fails on a draft."""
        if path not in self._forced and path and not self._allowed(path):
            self._forced[path] = ()
        if path not in self._forced:
            try:
                forced = self._ask(path, lambda matcher: list(matcher.copy().forced()))
            except ConstraintError:
                if not path:
                    raise
                forced = []
            count = next((i for i, token in enumerate(forced) if not self._vocabulary.is_text(token)), len(forced))
            if self._narrowing is not None:
                count = self._narrowing.reach(self._text(path), forced[:count])
            self._forced[path] = tuple(forced[:count])
        return self._forced[path]

    def advance(self, tokens: Seq[int]) -> None:
        """See `Constraint.advance`."""
        if not tokens:
            return
        path = tuple(tokens)
        if len(path) == 1 and self._branch is None and () in self._rows and self._allowed(path):
            # No draft went on, and the token is known to be taken: a copy would cost time in the length of the text.
            self._ask((), lambda matcher: matcher.consume(path))
            matcher = self._matcher
        else:
            # A copy that went on takes the place of the matcher of the committed tokens, once all tokens are taken.
            matcher = self._ask(path, lambda matcher: matcher)
        if self._narrowing is not None:
            self._texts = {(): self._text(path)}
        self._matcher = matcher
        self._committed.extend(path)
        self._branch = None
        self._rows.clear()
        self._grammar_rows.clear()
        self._forced.clear()

    def finish(self) -> None:
        """See `Constraint.finish`: the row before the end token allowed the end."""

    def _row(self, path: tuple[int, ...]) -> NDArray[np.int32] | None:
        """What may follow `path`; None where the backend fails on a draft. Kept until the next `advance`, except where
        it is None because of the rows that there are."""
        if path not in self._rows:
            if self._grammar_row(path) is None:
                return None
            try:
                self._rows[path] = self._made(path)
            except ConstraintError as error:
                if not path:
                    raise
                logger.debug("a draft branch is cut: %s", error)
                self._rows[path] = None
        return self._rows[path]

    def _grammar_row(self, path: tuple[int, ...]) -> NDArray[np.int32] | None:
        """What the grammar alone lets follow `path`; None and kept as in `_row`."""
        if path not in self._grammar_rows:
            if path and len(self._grammar_rows) >= self._max_rows:
                return None
            try:
                self._grammar_rows[path] = self._ask(path, self._fill)
            except ConstraintError as error:
                if not path:
                    raise
                logger.debug("a draft branch is cut: %s", error)
                self._grammar_rows[path] = None
        return self._grammar_rows[path]

    def _may_follow(self, path: tuple[int, ...], token: int) -> bool:
        """Whether a token that the grammar lets follow `path` may, as far as is seen without looking ahead."""
        if self._narrowing is None:
            return True
        known = self._rows.get(path)
        if known is not None:
            return self._vocabulary.allows(known, token)
        return self._narrowing.may_follow(self._text(path), token)

    def _looked_at(self, path: tuple[int, ...]) -> NDArray[np.int32]:
        """The row of a node that a walk has come to, however many there are. Raises `ConstraintError` where the backend
        fails: it would without drafts, too."""
        if not self._allowed(path):
            return self._blank.next()[0]
        row_W = self._rows.get(path)
        if row_W is None:
            row_W = self._rows[path] = self._made(path)
        return row_W

    def _made(self, path: tuple[int, ...]) -> NDArray[np.int32]:
        row_W = self._grammar_rows.get(path)
        if row_W is None:
            row_W = self._grammar_rows[path] = self._ask(path, self._fill)
        if self._narrowing is not None:
            row_W, text = row_W.copy(), self._text(path)
            self._narrowing.narrow(row_W, text)
            self._look_ahead(path, row_W, text, self._narrowing)
        return row_W

    def _look_ahead(
        self, path: tuple[int, ...], row_W: NDArray[np.int32], text: JsonText, narrowing: Narrowing
    ) -> None:
        """Clear the bits of tokens after which nothing more would be allowed, as far as that is suspected and seen."""
        suspects = narrowing.suspects(row_W, text)
        left = MAX_ROWS_AHEAD
        for index, token in enumerate(suspects):
            if narrowing.is_known_to_lead_on(text, token):
                continue
            # One that goes on and on leaves enough to see which of the others end at once.
            share = max(left - ROWS_KEPT * (len(suspects) - index - 1), min(left, ROWS_KEPT))
            rows_left = [share]
            leads_on = self._leads_on((*path, token), narrowing, rows_left)
            left -= share - rows_left[0]
            if leads_on:
                narrowing.leads_on(text, token)
            else:
                row_W.view(np.uint32)[token >> 5] &= 0xFFFFFFFF ^ 1 << (token & 31)

    def _leads_on(self, path: tuple[int, ...], narrowing: Narrowing, rows_left: list[int]) -> bool:
        """Whether something is allowed after `path` that does not lead to where nothing is. True where the rows to look
        at run out, or the backend fails."""
        if not rows_left[0]:
            return True
        rows_left[0] -= 1
        try:
            row_W = self._ask(path, self._fill)
            if _count(row_W) > MANY:
                return True
            text = self._text(path)
            if narrowing.goes_on(row_W, text):
                return True
            narrowing.narrow(row_W, text)
        except ConstraintError:
            return True
        suspects = narrowing.suspects(row_W, text)
        if narrowing.num_leading_on(row_W, text) > len(suspects):
            return True
        return any(self._leads_on((*path, token), narrowing, rows_left) for token in suspects)

    def _allowed(self, path: tuple[int, ...]) -> bool:
        """Whether every token of `path` has its bit in the row before it, and none is an end token."""
        for index, token in enumerate(path):
            row_W = self._row(path[:index])
            if row_W is None or token in self._vocabulary.end_ids or not self._vocabulary.allows(row_W, token):
                return False
        return True

    def _fill(self, matcher: Matcher) -> NDArray[np.int32]:
        return self._vocabulary.row(matcher, self._blank)

    def _text(self, path: tuple[int, ...]) -> JsonText:
        """The text after `path`. Raises `ConstraintError` where the narrowing forbids it."""
        assert self._narrowing is not None
        known = len(path)
        while path[:known] not in self._texts:
            known -= 1
        text = self._texts[path[:known]]
        for token in path[known:]:
            following = self._narrowing.after(text, token)
            if following is None:
                raise ConstraintError(f"token {token} cannot follow: what it completes is not allowed there")
            text = following
        self._texts[path] = text
        return text

    def _ask(self, path: tuple[int, ...], question: Callable[[Matcher], Answer]) -> Answer:
        """The answer of a matcher that stands after `path`. A matcher that fails is rebuilt from the committed tokens
        and asked once more, so what an earlier draft did to it does not matter; then `ConstraintError`. Rebuilding may
        take seconds, so a failure on the committed tokens alone is remembered and never tried again."""
        if self._failure is not None:
            raise self._failure
        for attempt in range(2):
            try:
                return question(self._move(path))
            except MatcherFailed as failure:
                self._matcher = None
                if attempt:
                    error = ConstraintError(f"the grammar failed: {failure}")
                    if not path:
                        self._failure = error
                    raise error from failure
        raise AssertionError("not reached")

    def _move(self, path: tuple[int, ...]) -> Matcher:
        """A matcher that stands after `path`: the one of the committed tokens, or a copy that went on."""
        if self._matcher is None:
            matcher = self._restart()
            if self._committed:
                matcher.consume(self._committed)
            self._matcher, self._branch = matcher, None
        if not path:
            return self._matcher
        if self._branch is None or path[: len(self._path)] != self._path:
            self._branch, self._path = self._matcher.copy(), ()
        if len(path) > len(self._path):
            self._branch.consume(path[len(self._path) :])
        self._path = path
        return self._branch


def _count(words_W: NDArray[np.int32]) -> int:
    """How many bits are set."""
    return int(np.bitwise_count(words_W.view(np.uint32)).sum())


def has(words_W: NDArray[np.int32], token: int) -> bool:
    """Whether the bit of `token` is set in one row of words."""
    return bool(words_W.item(token >> 5) >> (token & 31) & 1)
