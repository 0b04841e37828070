"""How many guesses are worth verifying. Knows scores and a budget of rows; no tensors, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.sequence import Grant
from specdec.tree import DraftTree


class RowBudget:
    """Takes the likeliest nodes over all sequences while the forward stays within `max_rows` rows."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows

    def trim(self, trees: Sequence[DraftTree], grants: Sequence[Grant]) -> list[DraftTree]:
        """The trees without the nodes that do not fit; known rows come first, each grant's own limits hold."""
        trees = [tree.within(grant.drafts, grant.depth) for tree, grant in zip(trees, grants, strict=True)]
        room = self.max_rows - sum(grant.known for grant in grants)
        if sum(tree.num_drafts for tree in trees) <= room:
            return trees
        nodes = [(-tree.scores[node], index, node) for index, tree in enumerate(trees) for node in range(1, len(tree))]
        kept: list[list[int]] = [[] for _ in trees]
        for _, index, node in sorted(nodes)[: max(0, room)]:
            kept[index].append(node)
        return [tree.keep(nodes) for tree, nodes in zip(trees, kept, strict=True)]
