"""Several drafters as one: the union of their trees. Knows none of them but by name."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specdec.tree import EMPTY, DraftTree, merge, root

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.batch import Batch
    from specdec.protocols import Drafter
    from specdec.sequence import Grant, Sequence, Span


class Combined:
    """Merges what `drafters` propose. A guess that several make keeps its best score and the first one's name.

    A request that names drafters (`Speculative.method`) hears of no other.
    """

    def __init__(self, drafters: Seq[Drafter]) -> None:
        self.drafters = tuple(drafters)

    @property
    def names(self) -> tuple[str, ...]:
        """See `Drafter.names`: all of theirs."""
        return tuple(name for drafter in self.drafters for name in drafter.names)

    @property
    def taps(self) -> tuple[int, ...]:
        """See `Drafter.taps`: every layer that one of them wants, once."""
        return tuple(sorted({tap for drafter in self.drafters for tap in drafter.taps}))

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """See `Drafter.draft`. The best nodes by score are kept where the union is larger than the grant."""
        nothing = [root(grant.seq.tokens[-1]) if grant.at_frontier else EMPTY for grant in grants]
        proposals = zip(nothing, *(_asked(drafter, grants) for drafter in self.drafters), strict=True)
        return [merge(trees).within(grant.drafts, grant.depth) for grant, trees in zip(grants, proposals, strict=True)]

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """See `Drafter.observe`: each drafter sees the layers it asked for, in its own order."""
        tapped = dict(zip(self.taps, taps, strict=True))
        _each(lambda one: one.observe(spans, batch, [tapped[tap] for tap in one.taps], paths), self.drafters)

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`."""
        _each(lambda one: one.forget(seq), self.drafters)


def _each(tell: Callable[[Drafter], None], drafters: Seq[Drafter]) -> None:
    """Tell every drafter, also after one that fails. Raises an `ExceptionGroup` of the failures in the end."""
    failures = []
    for drafter in drafters:
        try:
            tell(drafter)
        except Exception as error:
            failures.append(error)
    if failures:
        raise ExceptionGroup("some drafters failed", failures)


def _asked(drafter: Drafter, grants: Seq[Grant]) -> list[DraftTree]:
    """One tree a grant: empty where the request names others, or the policy would not hear it."""
    trees = [EMPTY] * len(grants)
    wanted = [index for index, grant in enumerate(grants) if _wants(grant, drafter)]
    if wanted:
        drafted = drafter.draft([grants[index] for index in wanted])
        for index, tree in zip(wanted, drafted, strict=True):
            trees[index] = tree
    return trees


def _wants(grant: Grant, drafter: Drafter) -> bool:
    methods = grant.seq.request.sampling.guesses.methods
    wanted = not methods or not set(methods).isdisjoint(drafter.names)
    return wanted and not (drafter.names and grant.muted.issuperset(drafter.names))
