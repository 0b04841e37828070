"""Trees grown level by level from a drafter's logits, the likeliest guesses first. Knows no model: whoever calls says
how a node's logits come about.

After Li et al., EAGLE-2 (arXiv 2406.16858): a node is worth what its path's chances multiply to; the best are grown on.
L rows of logits, V vocabulary of the drafter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from specdec.drafters.guessing import Guessing
from specdec.drafters.survival import Draws, Guesses, Survival
from specdec.errors import ConfigError
from specdec.sequence import Sequence
from specdec.tree import MAX_DRAFTS, DraftTree, root

MAX_ROWS = MAX_DRAFTS + 1


@dataclass(frozen=True, slots=True)
class Growth:
    """How trees grow: `depth` levels at most, `width` nodes of one text grown on a level, `branch` guesses behind each.
    A node less likely than `floor` is not grown on. `ranks[d][c]`, where given, is how likely the guess of rank c is at
    depth d, in place of what the drafter's logits say (Medusa's trees, arXiv 2401.10774)."""

    depth: int = 6
    width: int = 8
    branch: int = 8
    floor: float = 0.03
    ranks: tuple[tuple[float, ...], ...] | None = None


def read_ranks(path: str) -> tuple[tuple[float, ...], ...]:
    """`Growth.ranks` from a file of `specdec eval rank-accuracy`. Raises `ConfigError` for one that holds none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        ranks = tuple(tuple(0.0 + share for share in shares) for shares in found["rank_accuracy"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"draft_ranks {path}: no file of `specdec eval rank-accuracy`: {error}") from error
    if not ranks or not ranks[0] or not all(0.0 <= share <= 1.0 for shares in ranks for share in shares):
        raise ConfigError(f"draft_ranks {path}: rank_accuracy must hold shares from 0 to 1 by depth")
    return ranks


class Growing:
    """One tree in the making, of at most `room` drafts and `depth` levels, grown in as many; at most `rows` nodes, the
    root included, are grown on.

    Node 0 is the root; `paths` are the tokens from below the root down to each node, `survival` the estimated
    probability that the walk comes to it.
    """

    def __init__(self, seq: Sequence, room: int, depth: int, rows: int, draws: Draws) -> None:
        self.seq = seq
        self.tokens = [seq.tokens[-1]]
        self.parents = [-1]
        self.survival = [1.0]
        self.paths: list[tuple[int, ...]] = [()]
        self.children: list[dict[int, int]] = [{}]
        self.guesses: list[Guesses | None] = [None]
        self.num_grown = 0
        self.by_depth: list[Guesses | None] = []  # what is guessed behind every node of a depth, where that is one
        self.room = min(room, MAX_DRAFTS)
        self.depth = depth
        self.rows = min(rows, MAX_ROWS)
        self.draws = draws
        self._grown: set[int] = set()

    def front(self, growth: Growth) -> list[int]:
        """The nodes to grow on next: open ones among those that the tree would keep, the likeliest first."""
        if self.num_grown == 0:
            return [0]
        places = min(growth.width, self.rows - self.num_grown)
        front = [
            node
            for node in self._kept()
            if node not in self._grown
            and len(self.paths[node]) < self.depth
            and self.survival[node] >= growth.floor
            and self.tokens[node] not in self.seq.ending
        ]
        return front[: max(0, places)]

    @property
    def num_levels(self) -> int:
        """How many levels can be grown."""
        return min(self.depth, self.rows)

    def grow(self, node: int, guesses: Guesses | None, growth: Growth) -> None:
        """Hang guesses behind a node; there may be none."""
        self._grown.add(node)
        self.num_grown += 1
        self.guesses[node] = guesses
        if guesses is None:
            return
        chances = guesses.survival if growth.ranks is None else _by_rank(growth.ranks, len(self.paths[node]))
        for token, chance in zip(guesses.tokens, chances, strict=False):
            self.children[node][token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
            self.survival.append(self.survival[node] * chance)
            self.paths.append((*self.paths[node], token))
            self.children.append({})
            self.guesses.append(None)

    def tree(self, source: str) -> DraftTree:
        """The nodes that there is room for, the likeliest first."""
        kept = self._kept()
        if not kept:
            return root(self.tokens[0])
        place = {0: 0} | {node: index for index, node in enumerate(kept, 1)}
        return DraftTree(
            (self.tokens[0], *(self.tokens[node] for node in kept)),
            (-1, *(place[self.parents[node]] for node in kept)),
            (1.0, *(self.survival[node] for node in kept)),
            ("", *[source] * len(kept)),
        )

    def learn(self, tokens: Seq[int], survival: Survival, count: Callable[[int, int | None], None]) -> None:
        """Teach `survival` from the tokens that were emitted behind the root; `count` is told the depth, from 0,
        and the rank of each among the guesses, None where it was not guessed."""
        node: int | None = 0
        for depth, token in enumerate(tokens):
            guesses = None if node is None else self.guesses[node]
            if node is None or guesses is None:
                return
            survival.learn(guesses, token)
            count(depth, guesses.tokens.index(token) if token in guesses.tokens else None)
            node = self.children[node].get(token)

    def _kept(self) -> list[int]:
        # A child is never likelier than its parent and comes after it, so the best nodes hang together.
        order = sorted(range(1, len(self.tokens)), key=lambda node: (-self.survival[node], node))
        return order[: self.room]


def _by_rank(ranks: tuple[tuple[float, ...], ...], depth: int) -> tuple[float, ...]:
    return ranks[depth] if depth < len(ranks) else ()


Expand = Callable[[Seq[tuple[Growing, int]]], Tensor]
Ahead = Callable[[Seq[tuple[Sequence, int]]], Tensor]


def look_ahead(growing: Seq[Growing], ahead: Ahead, growth: Growth, guessing: Guessing) -> None:
    """Guess all levels of trees at once, where the logits `[L, V]` that `ahead` gives for depths of texts are those of
    every node there, and nothing else of a path matters to its guesses either."""
    rows = [(one, depth) for one in growing if one.draws.ignores_path for depth in range(one.num_levels)]
    if not rows:
        return
    logits_LV = ahead([(one.seq, depth) for one, depth in rows])
    places = [(one.draws, (0,) * depth) for one, depth in rows]  # any tokens will do
    for (one, _), guesses in zip(rows, guessing.guesses(logits_LV, places, growth.branch), strict=True):
        one.by_depth.append(guesses)


def grow(growing: Seq[Growing], expand: Expand, growth: Growth, guessing: Guessing) -> None:
    """Grow all trees together, a level at a time: `expand` gives the logits `[L, V]` behind nodes of some of them, the
    nodes of a tree in the order in which they are grown. Roots come first. It is not asked for trees whose guesses are
    known by depth."""
    for level in range(max((one.num_levels for one in growing), default=0)):
        front = [(one, node) for one in growing if level < one.num_levels for node in one.front(growth)]
        asked = [(one, node) for one, node in front if not one.by_depth]
        found: list[Guesses | None] = []
        if asked:
            places = [(one.draws, one.paths[node]) for one, node in asked]
            found = guessing.guesses(expand(asked), places, growth.branch)
        for (one, node), guesses in zip(asked, found, strict=True):
            one.grow(node, guesses, growth)
        for one, node in front:
            if one.by_depth:
                one.grow(node, one.by_depth[len(one.paths[node])], growth)
