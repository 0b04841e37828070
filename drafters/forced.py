"""Drafts what the grammar leaves no choice about - keys, quotes, brackets, constants - and, where it leaves a few
choices - an enum, a boolean, the next key, a bracket, white space -, those that were taken before. Knows no backend.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from specdec.drafters.salts import pool_of
from specdec.errors import SpecdecError
from specdec.tree import EMPTY, MAX_DRAFTS, DraftTree, root

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from specdec.batch import Batch
    from specdec.sequence import Grant, Sequence, Span

# Just below 1: the mask leaves the target no choice, but a longer chain still costs a row a token.
DECAY = 0.995
MAX_CHOICES = 128  # tokens that may follow where branches are still guessed
MAX_ROWS = 24  # rows that one draft may ask the grammar for
MIN_SCORE = 0.15
PREFIX_WEIGHT = 0.25  # of a token that begins another choice, beside the longer one, before anything was counted
OWN_WEIGHT = 2  # of a pick in the text itself, beside one in an earlier text of its salt
MAX_PLACES = 4096  # of a salt; the oldest go first

Path = tuple[int, ...]
Place = tuple[str, int]  # where a choice stands: what may follow there, or the token before it


def unspelled(token: int) -> bytes:
    """For vocabularies whose tokens have no bytes."""
    return b""


class ForcedDrafter:
    """A tree of forced tokens, with branches where few tokens may follow: scored by how often each was picked at places
    where the same tokens may follow, or else after the same token; alike where nothing is known.

    `spell` gives the bytes of a token: of choices that begin alike the longest is likelier.
    """

    names: tuple[str, ...] = ("forced",)
    taps: tuple[int, ...] = ()

    def __init__(self, spell: Callable[[int], bytes] = unspelled) -> None:
        self._spell = spell
        self._texts: dict[Sequence, _Text] = {}
        self._pools: OrderedDict[str, _Counts] = OrderedDict()

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """See `Drafter.draft`. Free text costs nothing."""
        return [self._draft(grant) for grant in grants]

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """See `Drafter.observe`: counts what was picked where there was a choice."""
        for span in spans:
            text = self._texts.get(span.seq)
            if text is not None:
                emitted = span.seq.tokens[span.root_slot + 1 :]
                for index, token in enumerate(emitted):
                    for place in text.choices.get(tuple(emitted[:index]), ()):
                        text.counts.add(place, token)
                text.choices.clear()

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`. The counts of a text that came to its end join those of its salt."""
        text = self._texts.pop(seq, None)
        pool = None if text is None else pool_of(seq, self._pools, _Counts)
        if text is not None and pool is not None:
            pool.take(text.counts)

    @property
    def num_kept(self) -> int:
        """Sequences for which something is kept."""
        return len(self._texts)

    def _draft(self, grant: Grant) -> DraftTree:
        if not grant.at_frontier:
            return EMPTY
        last = grant.seq.tokens[-1]
        room = min(grant.drafts, MAX_DRAFTS)
        try:
            if min(room, grant.depth) <= 0 or grant.seq.constraint.row(()) is None:
                return root(last)
            return self._tree(grant.seq, room, grant.depth)
        except SpecdecError:  # its own request ends when its mask is asked for; the others keep their drafts
            return root(last)

    def _tree(self, seq: Sequence, room: int, depth: int) -> DraftTree:
        """Best first: of all that may come next the likeliest is added, and what may follow it joins."""
        text = self._texts.setdefault(seq, _Text())
        text.choices.clear()
        tokens, parents, scores, sources = [seq.tokens[-1]], [-1], [1.0], [""]
        heap: list[tuple[float, int, int, Path, Path, str]] = []  # (-score, order, parent, path to it, tokens, source)
        order = count()  # equal scores first come, first served
        asked = 0

        def offer(node: int, path: Path) -> None:
            nonlocal asked
            if len(path) >= depth or asked >= MAX_ROWS or tokens[node] in seq.end_tokens:
                return
            asked += 1
            for chain, chance, source in self._next(seq, text, path):
                score = scores[node] * chance
                if score >= MIN_SCORE:
                    heapq.heappush(heap, (-score, next(order), node, path, chain, source))

        offer(0, ())
        while heap and len(tokens) <= room:
            negated, _, parent, path, chain, source = heapq.heappop(heap)
            chain = chain[: min(room + 1 - len(tokens), depth - len(path))]
            for index, token in enumerate(chain):
                parents.append(len(tokens) - 1 if index else parent)
                tokens.append(token)
                scores.append(-negated * DECAY**index)
                sources.append(source)
            offer(len(tokens) - 1, (*path, *chain))
        return DraftTree(tuple(tokens), tuple(parents), tuple(scores), tuple(sources))

    def _next(self, seq: Sequence, text: _Text, path: Path) -> Iterator[tuple[Path, float, str]]:
        """What may follow `path`, with its chances: a chain where it is forced, else tokens; nothing where there are
        too many."""
        chain = seq.constraint.forced(path)
        if chain:
            yield chain, DECAY, "forced"
            return
        choices = _few(seq.constraint.row(path))
        if choices:
            before = path[-1] if path else seq.tokens[-1]
            places = (("may follow", hash(choices)), ("after", before))
            text.choices[path] = places
            for token, chance in self._chances(seq, text, choices, places):
                yield (token,), chance, "forced/branch"

    def _chances(self, seq: Sequence, text: _Text, choices: Path, places: Seq[Place]) -> Iterator[tuple[int, float]]:
        """How likely each choice is: by counts at the same place, which outweigh counts after the same token, which
        outweigh a guess."""
        chances = self._guess(choices)
        pool = self._pools.get(seq.request.cache_salt)
        for place in reversed(places):
            counted = text.counts.at(place, choices, OWN_WEIGHT)
            if pool is not None:
                for token, times in pool.at(place, choices, 1).items():
                    counted[token] = counted.get(token, 0) + times
            total = sum(counted.values())
            if total:
                chances = {token: (counted.get(token, 0) + chance) / (total + 1) for token, chance in chances.items()}
        yield from chances.items()

    def _guess(self, choices: Path) -> dict[int, float]:
        """Alike, but a token that another one begins with counts less: the longer one says the same and more."""
        spelled = sorted((self._spell(token), token) for token in choices)
        longer = [*(text for text, _ in spelled[1:]), None]
        weights = {
            token: PREFIX_WEIGHT if after is not None and after.startswith(text) else 1.0
            for (text, token), after in zip(spelled, longer, strict=True)
        }
        total = sum(weights.values())
        return {token: weight / total for token, weight in weights.items()}


@dataclass(slots=True)
class _Counts:
    """How often each token was picked at a place."""

    picks: OrderedDict[Place, dict[int, int]] = field(default_factory=OrderedDict)

    def add(self, place: Place, token: int, times: int = 1) -> None:
        picked = self.picks.setdefault(place, {})
        picked[token] = picked.get(token, 0) + times

    def at(self, place: Place, choices: Iterable[int], weight: int) -> dict[int, int]:
        picked = self.picks.get(place)
        return {} if picked is None else {token: weight * picked[token] for token in choices if token in picked}

    def take(self, other: _Counts) -> None:
        """Add the counts of a text, and drop what is oldest past `MAX_PLACES`."""
        for place, picked in other.picks.items():
            for token, times in picked.items():
                self.add(place, token, times)
            self.picks.move_to_end(place)
        while len(self.picks) > MAX_PLACES:
            self.picks.popitem(last=False)


@dataclass(slots=True)
class _Text:
    """What is kept for a sequence: its counts, and where the last draft saw a choice."""

    counts: _Counts = field(default_factory=_Counts)
    choices: dict[Path, tuple[Place, ...]] = field(default_factory=dict)


def _few(row_W: NDArray[np.int32] | None) -> Path:
    """The tokens of a row, in order, where they are few; else none."""
    if row_W is None or not 0 < int(np.bitwise_count(row_W.view(np.uint32)).sum()) <= MAX_CHOICES:
        return ()
    words = np.flatnonzero(row_W)
    bits = np.unpackbits(row_W[words].view(np.uint8).reshape(len(words), 4), axis=1, bitorder="little")
    places, offsets = np.nonzero(bits)
    return tuple((words[places] * 32 + offsets).tolist())
