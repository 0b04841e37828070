"""Prompt lookup: where the last few tokens stood before, what followed them then is the guess. Knows no model.

After Saxena, "Prompt Lookup Decoding" (2023); the index is the hash chain of LZ77 compressors.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specdec.errors import ConfigError
from specdec.tree import EMPTY, MAX_DRAFTS, DraftTree, chain, root

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.batch import Batch
    from specdec.sequence import Grant, Sequence, Span

MAX_CANDIDATES = 64


class NgramDrafter:
    """A chain copied from the place in prompt and output that agrees longest with the end of the text.

    At least `min_match` tokens must agree, and more than `max_match` count no further; of equally long matches the
    most recent wins, among the 64 most recent places. At most `num_drafts` tokens are proposed.

    Raises `ConfigError` for numbers that make no sense.
    """

    names: tuple[str, ...] = ("ngram",)
    taps: tuple[int, ...] = ()

    def __init__(self, min_match: int = 2, max_match: int = 8, num_drafts: int = 16) -> None:
        if not 1 <= min_match <= max_match:
            raise ConfigError(f"min_match must be from 1 to max_match ({max_match}), got {min_match}")
        if not 1 <= num_drafts <= MAX_DRAFTS:
            raise ConfigError(f"num_drafts must be from 1 to {MAX_DRAFTS}, got {num_drafts}")
        self.min_match = min_match
        self.max_match = max_match
        self.num_drafts = num_drafts
        self._indexes: dict[Sequence, NgramIndex] = {}

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """See `Drafter.draft`. Costs time in the tokens that are new since the last call."""
        return [self._draft(grant) for grant in grants]

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """See `Drafter.observe`: new tokens are read when the next draft is made."""

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`: the index goes; it is a function of the tokens and comes back when it is needed."""
        self._indexes.pop(seq, None)

    def _draft(self, grant: Grant) -> DraftTree:
        seq = grant.seq
        if not grant.at_frontier:
            return EMPTY
        room = min(grant.drafts, grant.depth, self.num_drafts)
        if room <= 0:
            return root(seq.tokens[-1])
        index = self._indexes.get(seq)
        if index is None:
            index = self._indexes[seq] = NgramIndex(self.min_match)
        index.read(seq.tokens)
        place, length = index.longest_match(seq.tokens, self.max_match)
        if place is None:
            return root(seq.tokens[-1])
        return chain(seq.tokens[-1], continuation(seq.tokens, place, room), "ngram", trust(length))


class NgramIndex:
    """For each run of `size` tokens the places just behind it, most recent first, as chains through one list.

    It holds the runs that something follows: the last `size` tokens of the text enter when the next token comes.
    """

    __slots__ = ("_latest", "_num_read", "_previous", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._num_read = 0
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous: list[int] = []  # for each place the one before it behind the same run, -1 for none

    def read(self, tokens: Seq[int]) -> None:
        """Take in what is new. Tokens only ever grow."""
        for place in range(self._num_read, len(tokens)):
            earlier = -1
            if place >= self.size:
                run = tuple(tokens[place - self.size : place])
                earlier = self._latest.get(run, -1)
                self._latest[run] = place
            self._previous.append(earlier)
        self._num_read = len(tokens)

    def longest_match(self, tokens: Seq[int], max_length: int) -> tuple[int | None, int]:
        """The place whose preceding tokens agree longest with the end of `tokens`, and how many agree (up to
        `max_length`); None and 0 where not even `size` do."""
        best: tuple[int | None, int] = (None, 0)
        for place in self.places(tokens, MAX_CANDIDATES):
            length = self.size
            while length < min(max_length, place) and tokens[place - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best[1]:
                best = (place, length)
            if length == max_length:
                break
        return best

    def places(self, tokens: Seq[int], count: int) -> Iterator[int]:
        """The places behind the last `size` tokens of `tokens`, the `count` most recent, most recent first."""
        place = self._latest.get(tuple(tokens[-self.size :]), -1)
        while place >= 0 and count > 0:
            yield place
            place = self._previous[place]
            count -= 1


def continuation(tokens: Seq[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on. Where the copy reaches the end of the text it goes on with itself: a text that
    repeats every n tokens is guessed to repeat on."""
    copied = list(tokens[place : place + count])
    period = len(tokens) - place
    while len(copied) < count:
        copied.append(copied[-period])
    return copied


def trust(length: int) -> float:
    """Estimated probability that one more copied token is right, after a match of `length`."""
    return min(0.9, 0.4 + 0.1 * length)
