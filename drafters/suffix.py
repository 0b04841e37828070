"""Suffix decoding: what followed the longest suffixes of the text, here and in earlier texts, weighed by how often.
Knows no model.

After Oliaro, Jia, Campos, Qiao, "SuffixDecoding" (arXiv 2411.04975): counts along the continuations of matching
suffixes estimate how likely each is; the suffix length that promises most accepted tokens wins. Instead of a suffix
tree, an index of short runs finds the occurrences and the most recent are compared: a few words of memory a token.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.drafters.ngram import NgramIndex, continuation
from specdec.drafters.salts import pool_of
from specdec.tree import EMPTY, MAX_DRAFTS, DraftTree, root

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.batch import Batch
    from specdec.sequence import Grant, Sequence, Span

MIN_MATCH = 2
MAX_MATCH = 24
MAX_OCCURRENCES = 32
MIN_PROBABILITY = 0.1
POOL_TOKENS = 200_000  # of a salt's past texts, in two generations
BREAK = -1  # between texts of a pool: no token, so nothing matches across it


@dataclass(slots=True)
class _Node:
    """A place in the trie of continuations: how many pass through it."""

    count: int
    children: dict[int, _Node]


class SuffixDrafter:
    """Trees of what followed before: in the prompt and output of the request, and in those of finished requests with
    the same cache salt.

    A continuation is guessed no further than the suffix that found it is long.
    """

    names: tuple[str, ...] = ("suffix",)
    taps: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._texts: dict[Sequence, NgramIndex] = {}
        self._pools: OrderedDict[str, _Pool] = OrderedDict()

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """See `Drafter.draft`. Costs time in the tokens that are new since the last call."""
        return [self._draft(grant) for grant in grants]

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """See `Drafter.observe`: new tokens are read when the next draft is made."""

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`. A text that came to its end joins the pool of its salt."""
        self._texts.pop(seq, None)
        pool = pool_of(seq, self._pools, _Pool)
        if pool is not None:
            pool.add(seq.tokens)

    @property
    def num_kept(self) -> int:
        """Sequences for which something is kept."""
        return len(self._texts)

    def _draft(self, grant: Grant) -> DraftTree:
        seq = grant.seq
        if not grant.at_frontier:
            return EMPTY
        last = seq.tokens[-1]
        room, depth = min(grant.drafts, MAX_DRAFTS), grant.depth
        if min(room, depth) <= 0:
            return root(last)
        text = self._texts.setdefault(seq, NgramIndex(MIN_MATCH))
        text.read(seq.tokens)
        drafts = [likeliest_tree(last, occurrences(text, seq.tokens, seq.tokens), room, depth, "suffix")]
        pool = self._pools.get(seq.request.cache_salt)
        if pool is not None:
            drafts += [
                likeliest_tree(last, occurrences(index, tokens, seq.tokens), room, depth, "suffix")
                for index, tokens in pool.generations()
            ]
        # The first of equal promise: this text knows its own habits better than the pool.
        return max(drafts, key=lambda tree: sum(tree.scores))


class _Pool:
    """Past texts of one salt. When the young generation is full the old one is dropped and the young becomes old."""

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young: tuple[NgramIndex, list[int]] = (NgramIndex(MIN_MATCH), [])
        self._old: tuple[NgramIndex, list[int]] | None = None

    def add(self, tokens: Seq[int]) -> None:
        if len(self._young[1]) + len(tokens) > POOL_TOKENS // 2:
            self._old, self._young = self._young, (NgramIndex(MIN_MATCH), [])
        index, texts = self._young
        texts += [*tokens[-POOL_TOKENS // 2 :], BREAK]
        index.read(texts)

    def generations(self) -> Iterator[tuple[NgramIndex, list[int]]]:
        yield self._young
        if self._old is not None:
            yield self._old


def occurrences(index: NgramIndex, tokens: Seq[int], text: Seq[int]) -> list[tuple[list[int], int]]:
    """(what follows, how many tokens before it agree with the end of `text`) for the most recent occurrences."""
    found = []
    for place in index.places(text, MAX_OCCURRENCES):
        length = index.size
        while length < min(MAX_MATCH, place, len(text)) and tokens[place - 1 - length] == text[-1 - length]:
            length += 1
        if tokens is text:  # a text that repeats every n tokens is guessed to repeat on
            follows = continuation(tokens, place, length)
        else:
            follows = list(tokens[place : place + length])
            if BREAK in follows:
                follows = follows[: follows.index(BREAK)]
        found.append((follows, length))
    return found


def likeliest_tree(last: int, found: Seq[tuple[Seq[int], int]], room: int, depth: int, source: str) -> DraftTree:
    """The tree of the suffix length that promises most accepted tokens: its likeliest nodes, best first."""
    best, promise = root(last), 1.0
    for shortest in sorted({length for _, length in found}, reverse=True):
        trie = _Node(0, {})
        for follows, length in found:
            if length >= shortest:
                _count(trie, follows[: min(shortest, depth)])
        tree = _likeliest(last, trie, room, source, _trust(shortest))
        if sum(tree.scores) > promise:
            best, promise = tree, sum(tree.scores)
    return best


def _count(trie: _Node, tokens: Seq[int]) -> None:
    trie.count += 1
    for token in tokens:
        trie = trie.children.setdefault(token, _Node(0, {}))
        trie.count += 1


def _likeliest(last: int, trie: _Node, room: int, source: str, trust: float) -> DraftTree:
    tokens, parents, scores = [last], [-1], [1.0]
    order = 0  # makes entries of the heap comparable, and equal scores first come, first served
    heap: list[tuple[float, int, int, int, _Node]] = []

    def offer(node: _Node, place: int) -> None:
        nonlocal order
        for token, child in node.children.items():
            score = scores[place] * trust * child.count / node.count
            if score >= MIN_PROBABILITY * trust:
                order += 1
                heapq.heappush(heap, (-score, order, place, token, child))

    offer(trie, 0)
    while heap and len(tokens) <= room:
        score, _, parent, token, node = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        scores.append(-score)
        offer(node, len(tokens) - 1)
    return DraftTree(tuple(tokens), tuple(parents), tuple(scores), ("", *[source] * (len(tokens) - 1)))


def _trust(length: int) -> float:
    """How far one more token of a match of `length` is believed, before anything was measured."""
    return min(0.98, 0.6 + 0.05 * length)
