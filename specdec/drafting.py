"""The drafters of an engine as one: the union of their trees. Trusts none of them: what one gets wrong costs its own
nodes, and is counted. Knows them by name only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import islice
from typing import TYPE_CHECKING

from specdec.tree import EMPTY, DraftTree, merge, root

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.batch import Batch
    from specdec.metrics import Metrics
    from specdec.protocols import Drafter
    from specdec.sequence import Grant, Sequence, Span

logger = logging.getLogger(__name__)


class Drafting:
    """Merges what `drafters` propose. A guess that several make keeps its best score and the first one's name.

    A request that names drafters (`Speculative.method`) hears of no other. `vocab_size` is the target's; faults are
    counted in `metrics.drafter_errors`.
    """

    def __init__(self, drafters: Seq[Drafter], vocab_size: int, metrics: Metrics) -> None:
        self.drafters = tuple(drafters)
        self._vocab_size = vocab_size
        self._metrics = metrics

    @property
    def names(self) -> tuple[str, ...]:
        """See `Drafter.names`: all of theirs."""
        return tuple(name for drafter in self.drafters for name in drafter.names)

    @property
    def taps(self) -> tuple[int, ...]:
        """See `Drafter.taps`."""
        return all_taps(self.drafters)

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """One sound tree a grant. The best nodes by score are kept where the union is larger than the grant."""
        nothing = [root(grant.seq.tokens[-1]) if grant.at_frontier else EMPTY for grant in grants]
        proposals = zip(nothing, *(self._asked(drafter, grants, nothing) for drafter in self.drafters), strict=True)
        return [merge(trees).within(grant.drafts, grant.depth) for grant, trees in zip(grants, proposals, strict=True)]

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """See `Drafter.observe`: each drafter sees the layers it asked for, in its own order."""
        tapped = dict(zip(self.taps, taps, strict=True))
        self._tell("observe", lambda one: one.observe(spans, batch, [tapped[tap] for tap in one.taps], paths))

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`."""
        self._tell("forget", lambda one: one.forget(seq))

    def _tell(self, what: str, tell: Callable[[Drafter], None]) -> None:
        """Tell every drafter, also after one that fails."""
        for drafter in self.drafters:
            try:
                tell(drafter)
            except Exception:
                logger.exception("a drafter failed to %s", what)
                self._metrics.drafter_errors += 1

    def _asked(self, drafter: Drafter, grants: Seq[Grant], nothing: Seq[DraftTree]) -> list[DraftTree]:
        """One tree a grant: `nothing` where the request names others, the policy would not hear it, or it fails."""
        trees = list(nothing)
        wanted = [index for index, grant in enumerate(grants) if _wants(grant, drafter)]
        if not wanted:
            return trees
        try:
            # One too many is enough to see that they do not fit.
            drafted: list[object] = list(islice(drafter.draft([grants[i] for i in wanted]), len(wanted) + 1))
        except Exception:
            logger.exception("a drafter failed; this step goes on without its nodes")
            self._metrics.drafter_errors += 1
            return trees
        if len(drafted) != len(wanted):
            self._distrust(f"{'more' if len(drafted) > len(wanted) else 'fewer'} trees than the {len(wanted)} grants")
            return trees
        for index, tree in zip(wanted, drafted, strict=True):
            trees[index] = self._usable(tree, nothing[index])
        return trees

    def _usable(self, tree: object, plain: DraftTree) -> DraftTree:
        """The tree, or `plain` in its place where it is malformed."""
        if not isinstance(tree, DraftTree):
            self._distrust(f"it is a {type(tree).__name__}")
            return plain
        problem = tree.problem(self._vocab_size)
        if problem is None and tree.tokens[:1] != plain.tokens:
            problem = "its root is not the last known token"
        if problem is not None:
            self._distrust(problem)
            return plain
        return tree

    def _distrust(self, problem: str) -> None:
        logger.warning("a drafter's tree is dropped: %s", problem)
        self._metrics.drafter_errors += 1


def all_taps(drafters: Seq[Drafter]) -> tuple[int, ...]:
    """Every layer of the target that one of the drafters wants, once, in order."""
    return tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))


def _wants(grant: Grant, drafter: Drafter) -> bool:
    methods = grant.seq.request.sampling.guesses.methods
    wanted = not methods or not set(methods).isdisjoint(drafter.names)
    return wanted and not (drafter.names and grant.muted.issuperset(drafter.names))
