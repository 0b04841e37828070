"""Free text: the constraint that allows everything and costs nothing."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.mask import TokenMask
from specdec.tree import DraftTree


class FreeText:
    """Stateless; it claims no mask row. Satisfies `Constraint` and, by returning itself, `Grammar`."""

    def start(self) -> FreeText:
        """Itself: there is no state to begin."""
        return self

    def prune(self, tree: DraftTree) -> DraftTree:
        """All of it."""
        return tree

    def mask(self, tree: DraftTree, first_row: int, mask: TokenMask) -> None:
        """Claims nothing."""

    def row(self, path: tuple[int, ...]) -> None:
        """Everything may follow."""

    def forced(self, path: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Nothing is forced."""
        return ()

    def advance(self, tokens: Sequence[int]) -> None:
        """Nothing to move."""

    def finish(self) -> None:
        """Any text will do."""


FREE_TEXT = FreeText()
