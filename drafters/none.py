"""No drafter: every tree is its root, which is plain autoregressive decoding."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from specdec.batch import Batch
from specdec.sequence import Grant, Sequence, Span
from specdec.tree import EMPTY, DraftTree, root


class NoDrafter:
    """Guesses nothing."""

    names: tuple[str, ...] = ()
    taps: tuple[int, ...] = ()

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """Roots only."""
        return [root(grant.seq.tokens[-1]) if grant.at_frontier else EMPTY for grant in grants]

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """Learns nothing."""

    def forget(self, seq: Sequence) -> None:
        """Keeps nothing."""
