"""How many guesses are worth verifying: nodes are taken while expected tokens a unit of cost grow. Knows scores, counts
and a table of costs; no tensors, no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from specdec.sequence import Grant, Sequence, Span
from specdec.tree import DraftTree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.protocols import Constraint

PRIOR = 4.0  # trials that a drafter's own estimate counts for
MEMORY = 0.995  # what a trial weighs after the next one of its kind
SEQUENCE_PRIOR = 1.0  # hits that a sequence is granted before it has shown anything
SEQUENCE_MEMORY = 0.9
RECOVERY = 0.97  # what a sequence's record weighs after a draw in which nothing of the source was tried
CERTAIN = 0.999
MAX_DEPTH_BITS = 4  # depths of 8 and more are one kind
STRING_SHARE = 8  # a place where more than an eighth of the vocabulary may follow is inside a string
TRUST = 0.5  # tokens a draw that a drafter is thought to give before it was asked
GAIN_MEMORY = 0.9
WASTE = 0.01  # of a root-only forward: what a drafter may cost in a draw without being switched off
FIRST_PAUSE, PAUSES = 8, 8  # draws, and how many times as long a pause may become


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


Kind = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True)
class Outlook:
    """For each node of a tree: its kind, the drafter's own estimate that it is right once its parent is, and the
    estimated probability that the walk reaches it."""

    kinds: tuple[Kind, ...]
    estimates: tuple[float, ...]
    survival: tuple[float, ...]

    def keep(self, nodes: Iterable[int]) -> Outlook:
        """That of some nodes only, the root among them."""
        nodes = list(nodes)
        return Outlook(
            tuple(self.kinds[node] for node in nodes),
            tuple(self.estimates[node] for node in nodes),
            tuple(self.survival[node] for node in nodes),
        )


@dataclass(slots=True)
class Calibration:
    """How often guesses of a kind are right once their parent is: by source, by place in a grammar, by depth, and by
    the drafter's own estimate in tenths; then corrected by how the sequence at hand has done.

    It is a function of the draws it has seen. It shapes trees, so it may change speed, and text never.
    """

    _kinds: dict[Kind, _Record] = field(default_factory=dict)
    _sequences: dict[Sequence, dict[str, _Record]] = field(default_factory=dict)

    def outlook(self, seq: Sequence, tree: DraftTree) -> Outlook:
        """What may be hoped of a tree. Siblings share 1."""
        kinds, estimates = _kinds(seq.constraint, tree)
        chances = [1.0] * len(tree)
        shared = [0.0] * len(tree)
        records = self._sequences.get(seq, {})
        for node in range(1, len(tree)):
            record = records.get(tree.sources[node], _Record())
            ratio = (record.hits + SEQUENCE_PRIOR) / (record.expected + SEQUENCE_PRIOR)
            chances[node] = min(CERTAIN, self._general(kinds[node], estimates[node]) * ratio)
            shared[tree.parents[node]] += chances[node]
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            chances[node] *= chances[parent] / max(1.0, shared[parent])
        return Outlook(kinds, estimates, tuple(chances))

    def learn(self, span: Span, outlook: Outlook, path: Seq[int]) -> None:
        """Count the nodes whose parent was reached: `path` are the accepted ones, `outlook` is that of the tree."""
        tree = span.tree
        reached, hits = {0, *path}, set(path)
        records = self._sequences.setdefault(span.seq, {})
        tried = set()
        for node in range(1, len(tree)):
            if tree.parents[node] in reached:
                source, kind = tree.sources[node], outlook.kinds[node]
                tried.add(source)
                general = self._general(kind, outlook.estimates[node])
                self._kinds.setdefault(kind, _Record()).add(node in hits, 1.0, MEMORY)
                records.setdefault(source, _Record()).add(node in hits, general, SEQUENCE_MEMORY)
        for source, record in records.items():
            if source not in tried:
                record.hits *= RECOVERY
                record.expected *= RECOVERY

    def forget(self, seq: Sequence) -> None:
        """Release a sequence's record."""
        self._sequences.pop(seq, None)

    @property
    def sequences(self) -> Set[Sequence]:
        """Sequences with a record."""
        return self._sequences.keys()

    def _general(self, kind: Kind, estimate: float) -> float:
        record = self._kinds.get(kind, _Record())
        return (record.hits + PRIOR * estimate) / (record.expected + PRIOR)


@dataclass(slots=True)
class _Hearing:
    """Whether a drafter is worth asking for one sequence: what asking it gave, in units of cost, fading; whether it was
    asked in this step; for how many draws it will not be; and how long the next such pause will be."""

    gain: float
    asked: bool = False
    left: int = 0
    pause: int = FIRST_PAUSE


@dataclass(slots=True)
class Ledger:
    """The cost, by the table, of all forwards, and of those that the same tokens would have taken without drafts."""

    cost: float = 0.0
    plain_cost: float = 0.0


class Policy:
    """Takes the likeliest nodes over all sequences, as many as give most expected tokens for the cost of the forward.

    Taking none is always a candidate, so that drafts are never expected to cost more than they give. `max_rows` bounds
    the forward. A drafter whose guesses do not pay for its own cost (`drafters`, by name, in the unit of `costs`) is
    not asked for a while, the longer the more often that happens, and then probed.
    """

    def __init__(
        self, max_rows: int, costs: CostTable | None = None, drafters: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self.max_rows = max_rows
        self.costs = costs or CostTable()
        self.drafters = drafters
        self.calibration = Calibration()
        self.ledger = Ledger()
        self._outlooks: dict[Sequence, Outlook] = {}  # of the trees in flight
        self._hearings: dict[Sequence, dict[str, _Hearing]] = {}
        self._general: dict[str, _Hearing] = {}  # of all texts together: with what a new text begins

    def ask(self, grants: Seq[Grant]) -> list[Grant]:
        """The grants with the drafters that are not to be asked."""
        return [self._muted(grant) if grant.drafts else grant for grant in grants]

    def trim(self, trees: Seq[DraftTree], grants: Seq[Grant]) -> list[DraftTree]:
        """The trees without the nodes that are not worth their rows; each grant's own limits hold."""
        trees = [tree.within(grant.drafts, grant.depth) for tree, grant in zip(trees, grants, strict=True)]
        num_known = sum(grant.known for grant in grants)
        nodes: list[tuple[float, int, int]] = []
        for index, (tree, grant) in enumerate(zip(trees, grants, strict=True)):
            if tree.num_drafts:
                outlook = self._outlooks[grant.seq] = self.calibration.outlook(grant.seq, tree)
                nodes += [(-outlook.survival[node], index, node) for node in range(1, len(tree))]
        nodes.sort()
        taken = self._worth(nodes[: max(0, self.max_rows - num_known)], num_known, sum(map(bool, map(len, trees))))
        if taken == len(nodes):
            return trees
        kept: list[list[int]] = [[] for _ in trees]
        for _, index, node in nodes[:taken]:
            kept[index].append(node)
        for tree, grant, chosen in zip(trees, grants, kept, strict=True):
            if tree.num_drafts:
                self._outlooks[grant.seq] = self._outlooks[grant.seq].keep([0, *sorted(chosen)])
        return [tree.keep(chosen) for tree, chosen in zip(trees, kept, strict=True)]

    def learn(self, spans: Seq[Span], paths: Seq[Seq[int]], emitted: Seq[int]) -> None:
        """Take in which nodes of a step were accepted, and how many tokens each span `emitted`."""
        num_rows, num_known = sum(span.num_rows for span in spans), sum(span.known for span in spans)
        self.ledger.cost += self.costs.at(num_rows)
        self.ledger.plain_cost += self.costs.at(num_known)
        for more in range(1, max(emitted, default=0)):
            self.ledger.plain_cost += self.costs.at(sum(count > more for count in emitted))
        row_cost = (self.costs.at(num_rows) - self.costs.at(num_known)) / max(1, num_rows - num_known)
        for span, path in zip(spans, paths, strict=True):
            outlook = self._outlooks.pop(span.seq, None)
            if outlook is not None:
                self.calibration.learn(span, outlook, path)
            if len(span.tree):
                self._weigh(span, path, row_cost)

    def forget(self, seq: Sequence) -> None:
        """Release what is kept for a sequence."""
        self.calibration.forget(seq)
        self._outlooks.pop(seq, None)
        self._hearings.pop(seq, None)

    @property
    def num_kept(self) -> int:
        """Sequences for which something is kept."""
        return len(self._outlooks.keys() | self._hearings.keys() | self.calibration.sequences)

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

    def _muted(self, grant: Grant) -> Grant:
        hearings = self._hearings.get(grant.seq)
        if hearings is None:
            hearings = self._hearings[grant.seq] = {
                name: replace(self._hearing(cost), left=self._pause_left(name, cost))
                for name, cost in self.drafters.items()
            }
        muted = frozenset(name for name, hearing in hearings.items() if hearing.left)
        methods = grant.seq.request.sampling.guesses.methods
        for name, hearing in hearings.items():
            hearing.asked = not hearing.left and (not methods or name in methods)
        for hearing in (*hearings.values(), *self._general.values()):
            hearing.left = max(0, hearing.left - 1)
        return replace(grant, muted=muted) if muted else grant

    def _weigh(self, span: Span, path: Seq[int], row_cost: float) -> None:
        """What each drafter that was asked gave: tokens that needed no forward of their own, less its rows and its own
        cost. What ends a prompt is no measure: drafters that are models do not guess there."""
        token_cost = self.costs.at(1)
        hearings = self._hearings.get(span.seq, {})
        rows = Counter(map(drafter_of, span.tree.sources[1:]))
        accepted = Counter(drafter_of(span.tree.sources[node]) for node in path)
        for name, hearing in hearings.items():
            was_asked, hearing.asked = hearing.asked, False
            if not was_asked or span.known > 1:
                continue
            cost = self.drafters[name]
            gain = accepted[name] * token_cost - rows[name] * row_cost - cost
            for one in (hearing, self._general.setdefault(name, self._hearing(cost))):
                self._hear(one, gain, cost)

    def _hearing(self, cost: float) -> _Hearing:
        return _Hearing(TRUST * self.costs.at(1), pause=self._first_pause(cost))

    def _pause_left(self, name: str, cost: float) -> int:
        """Where a dear drafter has not paid lately, a new text does not pay to find that out again."""
        is_dear = self._first_pause(cost) > FIRST_PAUSE
        return self._general[name].left if is_dear and name in self._general else 0

    def _first_pause(self, cost: float) -> int:
        """Draws over which asking once is no waste."""
        return max(FIRST_PAUSE, math.ceil(cost / (WASTE * self.costs.at(1))))

    def _hear(self, hearing: _Hearing, gain: float, cost: float) -> None:
        hearing.gain = hearing.gain * GAIN_MEMORY + gain * (1 - GAIN_MEMORY)
        first = self._first_pause(cost)
        if gain > 0:
            hearing.pause, hearing.left = first, 0
            hearing.gain = max(hearing.gain, 0.0)
        elif hearing.gain < -WASTE * self.costs.at(1):
            hearing.left, hearing.pause = hearing.pause, min(PAUSES * first, 2 * hearing.pause)


def drafter_of(source: str) -> str:
    """The drafter behind the source of a node: sources are a drafter's name, or that and a kind of its guesses
    ("forced/branch")."""
    return source.partition("/")[0]


def _kinds(constraint: Constraint, tree: DraftTree) -> tuple[tuple[Kind, ...], tuple[float, ...]]:
    kinds: list[Kind] = [("", "", 0, 0)]
    estimates = [1.0]
    paths: list[tuple[int, ...]] = [()]
    places: dict[int, str] = {}
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent not in places:
            places[parent] = where(constraint.row(paths[parent]))
        paths.append((*paths[parent], tree.tokens[node]))
        estimate = tree.scores[node] / tree.scores[parent] if tree.scores[node] else 0.0
        depth = min(MAX_DEPTH_BITS, len(paths[node]).bit_length())
        kinds.append((tree.sources[node], places[parent], depth, int(estimate * 10)))
        estimates.append(estimate)
    return tuple(kinds), tuple(estimates)


def where(row_W: NDArray[np.int32] | None) -> str:
    """Where in a grammar a token is drawn, told from how many are allowed: inside a string most are."""
    if row_W is None:
        return "free"
    count = int(np.bitwise_count(row_W.view(np.uint32)).sum())
    if count <= 1:
        return "forced"
    return "string" if count * STRING_SHARE > 32 * len(row_W) else "structure"
