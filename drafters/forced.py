"""Drafts what the grammar leaves no choice about: keys, quotes, brackets, constants. Knows no grammar backend."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specdec.errors import SpecdecError
from specdec.tree import EMPTY, DraftTree, chain, root

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.batch import Batch
    from specdec.sequence import Grant, Sequence, Span

# Just below 1: the mask leaves the target no choice, but a longer chain still costs a row a token.
DECAY = 0.995


class ForcedDrafter:
    """A chain of the tokens that `Constraint.forced` names; only the root where there are none."""

    names: tuple[str, ...] = ("forced",)
    taps: tuple[int, ...] = ()

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """See `Drafter.draft`."""
        return [_draft(grant) for grant in grants]

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """See `Drafter.observe`: there is nothing to learn."""

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`: nothing is kept."""


def _draft(grant: Grant) -> DraftTree:
    if not grant.at_frontier:
        return EMPTY
    last = grant.seq.tokens[-1]
    room = min(grant.drafts, grant.depth)
    if room <= 0:
        return root(last)
    try:
        forced = grant.seq.constraint.forced()
    except SpecdecError:  # its own request ends when its mask is asked for; the others keep their drafts
        return root(last)
    return chain(last, forced[:room], "forced", DECAY)
