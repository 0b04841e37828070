"""Predicted output: what the caller expects the answer to be is the guess, wherever the answer follows it. Knows no
model.

The guess of OpenAI's predicted outputs: from the beginning while the answer follows the prediction word for word; after
an edit where the end of the answer stands in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specdec.drafters.ngram import NgramIndex
from specdec.drafters.suffix import MAX_MATCH, MIN_MATCH, likeliest_tree, occurrences
from specdec.request import PREDICTION
from specdec.tree import EMPTY, MAX_DRAFTS, DraftTree, merge, root

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.batch import Batch
    from specdec.sequence import Grant, Sequence, Span


class PredictionDrafter:
    """Trees of what the request's prediction holds next; only the root for requests that carry none."""

    names: tuple[str, ...] = (PREDICTION,)
    taps: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._indexes: dict[Sequence, NgramIndex] = {}

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """See `Drafter.draft`. Costs time in what is drafted, and once in the prediction."""
        return [self._draft(grant) for grant in grants]

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """See `Drafter.observe`: the sequence itself knows how far it has followed its prediction."""

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`: the index goes; it comes back when it is needed."""
        self._indexes.pop(seq, None)

    @property
    def num_kept(self) -> int:
        """Sequences for which something is kept."""
        return len(self._indexes)

    def _draft(self, grant: Grant) -> DraftTree:
        seq = grant.seq
        if not grant.at_frontier:
            return EMPTY
        if not seq.request.prediction or min(grant.drafts, grant.depth) <= 0:
            return root(seq.tokens[-1])
        trees = [
            likeliest_tree(seq.tokens[-1], places, grant.drafts, grant.depth, PREDICTION)
            for places in self._places(seq)
        ]
        return merge(trees).within(grant.drafts, grant.depth)

    def _places(self, seq: Sequence) -> Iterator[Seq[tuple[Seq[int], int]]]:
        """What may come next and how many tokens before it agree: at the one place that follows what was written, then
        wherever the end of the text stands in the prediction."""
        prediction, followed = seq.request.prediction, seq.followed
        ahead = prediction[followed.place : followed.place + MAX_DRAFTS]
        if followed.run == followed.num_read:  # word for word from the beginning
            yield [(ahead, MAX_DRAFTS)]
            return
        if followed.run >= MIN_MATCH:
            yield [(ahead, followed.run)]
        index = self._indexes.get(seq)
        if index is None:
            index = self._indexes[seq] = NgramIndex(MIN_MATCH)
            index.read(prediction)
        end = seq.tokens[max(seq.num_prompt, len(seq.tokens) - MAX_MATCH) :]
        yield occurrences(index, prediction, end)
