"""How many guesses are worth verifying: nodes are taken while expected tokens a unit of cost grow. Knows scores, counts
and a table of costs; no tensors, no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specdec.free import FREE_TEXT
from specdec.sequence import Grant, Sequence, Span
from specdec.tree import DraftTree

PRIOR = 4.0  # trials that a drafter's own estimate counts for
MEMORY = 0.995  # what a trial weighs after the next one of its kind
SEQUENCE_PRIOR = 1.0  # hits that a sequence is granted before it has shown anything
SEQUENCE_MEMORY = 0.9
RECOVERY = 0.97  # what a sequence's record weighs after a draw in which nothing of the source was tried
CERTAIN = 0.999


@dataclass(frozen=True, slots=True)
class CostTable:
    """What a forward of so many rows costs, in any unit, measured at some numbers of rows and linear in between.

    Costs are made to never fall with rows. An empty table says that rows are free: every guess is worth its row.
    """

    rows: tuple[int, ...] = ()
    costs: tuple[float, ...] = ()

    @staticmethod
    def measured(points: Iterable[tuple[int, float]]) -> CostTable:
        """The table of (rows, cost) points in any order. Raises ValueError for two costs of one number of rows."""
        rows: list[int] = []
        costs: list[float] = []
        for count, cost in sorted(points):
            if rows and rows[-1] == count:
                raise ValueError(f"{count} rows have two costs")
            rows.append(count)
            costs.append(max(cost, costs[-1] if costs else 0.0))
        return CostTable(tuple(rows), tuple(costs))

    def at(self, count: int) -> float:
        """The cost of a forward of `count` rows; beyond the last point the last slope goes on."""
        rows, costs = self.rows, self.costs
        if not rows:
            return 1.0
        if len(rows) == 1 or count <= rows[0]:
            return costs[0]
        place = min(bisect_left(rows, count), len(rows) - 1)
        slope = (costs[place] - costs[place - 1]) / (rows[place] - rows[place - 1])
        return costs[place] + slope * (count - rows[place])


@dataclass(slots=True)
class _Record:
    """Hits of a kind of guess, and what was expected of it, both fading."""

    hits: float = 0.0
    expected: float = 0.0

    def add(self, hit: bool, expected: float, memory: float) -> None:
        self.hits = self.hits * memory + hit
        self.expected = self.expected * memory + expected


Kind = tuple[str, bool, int]


@dataclass(slots=True)
class Calibration:
    """How often guesses of a kind are right once their parent is: by source, under a grammar or not, and by the
    drafter's own estimate in tenths; then corrected by how the sequence at hand has done.

    It is a function of the draws it has seen. It shapes trees, so it may change speed, and text never.
    """

    _kinds: dict[Kind, _Record] = field(default_factory=dict)
    _sequences: dict[Sequence, dict[str, _Record]] = field(default_factory=dict)

    def survival(self, seq: Sequence, tree: DraftTree) -> list[float]:
        """For each node the estimated probability that the walk reaches it, along its path. Siblings share 1."""
        chances = [1.0] * len(tree)
        shared = [0.0] * len(tree)
        for node in range(1, len(tree)):
            chances[node] = self._chance(seq, tree, node)
            shared[tree.parents[node]] += chances[node]
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            chances[node] *= chances[parent] / max(1.0, shared[parent])
        return chances

    def learn(self, span: Span, path: Seq[int]) -> None:
        """Count the nodes whose parent was reached: `path` are the accepted ones."""
        seq, tree = span.seq, span.tree
        reached, hits = {0, *path}, set(path)
        tried = set()
        for node in range(1, len(tree)):
            if tree.parents[node] in reached:
                source = tree.sources[node]
                tried.add(source)
                kind, estimate = self._kind(seq, tree, node)
                general = self._general(kind, estimate)
                self._kinds.setdefault(kind, _Record()).add(node in hits, 1.0, MEMORY)
                records = self._sequences.setdefault(seq, {})
                records.setdefault(source, _Record()).add(node in hits, general, SEQUENCE_MEMORY)
        for source, record in self._sequences.get(seq, {}).items():
            if source not in tried:
                record.hits *= RECOVERY
                record.expected *= RECOVERY

    def forget(self, seq: Sequence) -> None:
        """Release a sequence's record."""
        self._sequences.pop(seq, None)

    @property
    def num_kept(self) -> int:
        """Sequences with a record."""
        return len(self._sequences)

    def _chance(self, seq: Sequence, tree: DraftTree, node: int) -> float:
        kind, estimate = self._kind(seq, tree, node)
        record = self._sequences.get(seq, {}).get(tree.sources[node], _Record())
        ratio = (record.hits + SEQUENCE_PRIOR) / (record.expected + SEQUENCE_PRIOR)
        return min(CERTAIN, self._general(kind, estimate) * ratio)

    def _general(self, kind: Kind, estimate: float) -> float:
        record = self._kinds.get(kind, _Record())
        return (record.hits + PRIOR * estimate) / (record.expected + PRIOR)

    def _kind(self, seq: Sequence, tree: DraftTree, node: int) -> tuple[Kind, float]:
        estimate = tree.scores[node] / tree.scores[tree.parents[node]] if tree.scores[node] else 0.0
        return (tree.sources[node], seq.constraint is not FREE_TEXT, int(estimate * 10)), estimate


class Policy:
    """Takes the likeliest nodes over all sequences, as many as give most expected tokens for the cost of the forward.

    Taking none is always a candidate, so that drafts are never expected to cost more than they give. `max_rows` bounds
    the forward.
    """

    def __init__(self, max_rows: int, costs: CostTable | None = None) -> None:
        self.max_rows = max_rows
        self.costs = costs or CostTable()
        self.calibration = Calibration()

    def trim(self, trees: Seq[DraftTree], grants: Seq[Grant]) -> list[DraftTree]:
        """The trees without the nodes that are not worth their rows; each grant's own limits hold."""
        trees = [tree.within(grant.drafts, grant.depth) for tree, grant in zip(trees, grants, strict=True)]
        num_known = sum(grant.known for grant in grants)
        nodes: list[tuple[float, int, int]] = []
        for index, (tree, grant) in enumerate(zip(trees, grants, strict=True)):
            if tree.num_drafts:
                survival = self.calibration.survival(grant.seq, tree)
                nodes += [(-survival[node], index, node) for node in range(1, len(tree))]
        nodes.sort()
        taken = self._worth(nodes[: max(0, self.max_rows - num_known)], num_known, sum(map(bool, map(len, trees))))
        if taken == len(nodes):
            return trees
        kept: list[list[int]] = [[] for _ in trees]
        for _, index, node in nodes[:taken]:
            kept[index].append(node)
        return [tree.keep(chosen) for tree, chosen in zip(trees, kept, strict=True)]

    def learn(self, spans: Seq[Span], paths: Seq[Seq[int]]) -> None:
        """Take in which nodes of a step were accepted."""
        for span, path in zip(spans, paths, strict=True):
            if len(span.tree):
                self.calibration.learn(span, path)

    def forget(self, seq: Sequence) -> None:
        """Release what is kept for a sequence."""
        self.calibration.forget(seq)

    def _worth(self, nodes: Seq[tuple[float, int, int]], num_known: int, num_draws: int) -> int:
        """How many of the nodes, likeliest first, give most expected tokens a cost; the fewest of equals."""
        expected = float(num_draws)
        best, most = 0, expected / self.costs.at(num_known)
        for count, (negated, _, _) in enumerate(nodes, 1):
            expected -= negated
            rate = expected / self.costs.at(num_known + count)
            if rate > most:
                best, most = count, rate
        return best
