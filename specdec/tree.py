"""A tree of guessed tokens: what a drafter proposes and the target verifies. A value: no model, no sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_DRAFTS = 62  # bit 0 of a row's ancestors is the root and bit 63 the sign of an int64


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Node 0 is the root, the last known token; the others are guesses. Parents precede their children.

    `tokens[i]` is the token of node i, `parents[i]` its parent (-1 for the root), `scores[i]` the estimated probability
    that the walk reaches node i (1.0 for the root, never above the parent's), `sources[i]` the drafter that proposed it
    ("" for the root). A tree without nodes belongs to a span that stops short of the frontier.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    sources: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_drafts(self) -> int:
        """Nodes under the root."""
        return max(0, len(self.tokens) - 1)

    def ancestors(self) -> list[int]:
        """For each node the bitset of its path: itself, its ancestors and the root (bit 0). See docs/design.md, 2."""
        bits: list[int] = []
        for node, parent in enumerate(self.parents):
            bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
        return bits

    def depths(self) -> list[int]:
        """For each node its distance from the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def children(self) -> list[list[int]]:
        """For each node the list of its children, in node order."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        return children

    def path(self, node: int) -> list[int]:
        """The nodes from just below the root down to `node`; empty for the root."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def keep(self, nodes: Iterable[int]) -> DraftTree:
        """The tree of the given nodes only, in their order here. A node whose parent is not kept goes too."""
        wanted = set(nodes)
        place: dict[int, int] = {}
        for node, parent in enumerate(self.parents):
            if node == 0 or (node in wanted and parent in place):
                place[node] = len(place)
        if len(place) == len(self.tokens):
            return self
        return DraftTree(
            tuple(self.tokens[node] for node in place),
            tuple(place.get(self.parents[node], -1) for node in place),
            tuple(self.scores[node] for node in place),
            tuple(self.sources[node] for node in place),
        )

    def within(self, max_nodes: int, max_depth: int) -> DraftTree:
        """At most `max_nodes` drafts (the best by score) and none deeper than `max_depth`."""
        depths = self.depths()
        fitting = [node for node in range(1, len(self.tokens)) if depths[node] <= max_depth]
        fitting.sort(key=lambda node: (-self.scores[node], node))
        return self.keep(fitting[: max(0, max_nodes)])

    def problem(self, vocab_size: int) -> str | None:
        """What makes this tree unusable, in words, or None. Drafters are not trusted: every tree passes here."""
        if not all(isinstance(field, tuple) for field in (self.tokens, self.parents, self.scores, self.sources)):
            return "tokens, parents, scores and sources are not all tuples"
        if not {*map(type, self.tokens), *map(type, self.parents)} <= {int}:
            return "tokens and parents are not all integers"
        if not all(isinstance(score, float | int) for score in self.scores):
            return "scores are not all numbers"
        if not set(map(type, self.sources)) <= {str}:
            return "sources are not all strings"
        count = len(self.tokens)
        if count > MAX_DRAFTS + 1:
            return f"{count - 1} drafts, at most {MAX_DRAFTS} fit"
        if not len(self.parents) == len(self.scores) == len(self.sources) == count:
            return "tokens, parents, scores and sources differ in length"
        if count and self.parents[0] != -1:
            return "node 0 is not a root"
        if count and not 0.0 <= self.scores[0] <= 1.0:
            return "the root's score is no probability"
        seen = set()
        for node in range(1, count):
            token, parent = self.tokens[node], self.parents[node]
            if not 0 <= parent < node:
                return f"node {node} does not follow its parent {parent}"
            if not 0 <= token < vocab_size:
                return f"token {token} is not in the vocabulary of {vocab_size}"
            if (parent, token) in seen:
                return f"two children of node {parent} are token {token}"
            if not 0.0 <= self.scores[node] <= self.scores[parent]:
                return f"node {node} scores below 0 or above its parent"
            seen.add((parent, token))
        return None


EMPTY = DraftTree()


def root(token: int) -> DraftTree:
    """The tree with nothing guessed: plain autoregressive decoding."""
    return DraftTree((token,), (-1,), (1.0,), ("",))


def chain(token: int, drafts: Sequence[int], source: str, decay: float = 0.8) -> DraftTree:
    """A tree without branches under `token`; the score of depth d is decay**d."""
    count = min(len(drafts), MAX_DRAFTS)
    return DraftTree(
        (token, *drafts[:count]),
        tuple(range(-1, count)),
        tuple(decay**depth for depth in range(count + 1)),
        ("", *[source] * count),
    )


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """The trie union of trees with one root token. A node proposed twice keeps its best score and its first source.

    Nodes stand in order of score, best first, so a cut to the first 62 loses the worst.
    """
    trees = [tree for tree in trees if len(tree)]
    grown = [tree for tree in trees if tree.num_drafts]
    if len(grown) < 2:
        return (grown or trees or [EMPTY])[0]
    trees = grown
    best: dict[tuple[int, ...], tuple[float, str]] = {}
    for tree in trees:
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(tree)):
            path = (*paths[tree.parents[node]], tree.tokens[node])
            paths.append(path)
            score, source = best.get(path, (-1.0, tree.sources[node]))
            best[path] = (max(score, tree.scores[node]), source)
    order = sorted(best, key=lambda path: (-best[path][0], len(path), path))[:MAX_DRAFTS]
    place = {(): 0} | {path: index + 1 for index, path in enumerate(order)}
    return DraftTree(
        (trees[0].tokens[0], *(path[-1] for path in order)),
        (-1, *(place[path[:-1]] for path in order)),
        (1.0, *(best[path][0] for path in order)),
        ("", *(best[path][1] for path in order)),
    )
