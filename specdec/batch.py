"""The flat rows of one forward: what every known token and every guess needs to find its place. A value.

R rows, L logits rows, S sequences. Rows of one sequence are consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.blocks import SCRAP
from specdec.sequence import Span


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one sequence, at least one, by rising slot: see `Batch`, but slots are indices in the sequence, which
    its block table `blocks` places. The last `num_logits` rows ask for logits."""

    blocks: Sequence[int]
    tokens: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    prefix: Sequence[int]
    ancestors: Sequence[int]
    num_logits: int = 0

    @staticmethod
    def known(blocks: Sequence[int], tokens: Sequence[int], start: int) -> Rows:
        """Consecutive tokens of a text from slot `start` on: each sees all before it."""
        places = range(start, start + len(tokens))
        return Rows(blocks, tokens, places, places, places, [1] * len(tokens))


@dataclass(frozen=True, slots=True)
class Batch:
    """`prefix_R` and `ancestors_R` say what a row sees (docs/design.md, 2); positions go by depth, slots by node.

    Of each sequence `tables_S` is the block table, `rows_S` (first row, past the last row), and `lengths_S` how many
    slots its rows may see: as integers, so that planning needs no transfer from a device.
    """

    tokens_R: Tensor
    positions_R: Tensor
    slots_R: Tensor
    prefix_R: Tensor
    ancestors_R: Tensor
    logit_rows_L: Tensor
    rows_S: tuple[tuple[int, int], ...]
    lengths_S: tuple[int, ...]
    tables_S: tuple[tuple[int, ...], ...]

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.tokens_R)

    @property
    def num_logits(self) -> int:
        """L."""
        return len(self.logit_rows_L)

    @staticmethod
    def build(spans: Sequence[Span], block_size: int) -> Batch:
        """Lay out the rows of all spans, in order, as their `first_row` and `first_logit` say."""
        return Batch.of([_rows(span) for span in spans], block_size)

    @staticmethod
    def of(parts: Sequence[Rows], block_size: int) -> Batch:
        """Lay out the rows of some sequences, one after the other."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        prefix: list[int] = []
        ancestors: list[int] = []
        logit_rows: list[int] = []
        rows: list[tuple[int, int]] = []
        lengths: list[int] = []
        tables: list[tuple[int, ...]] = []
        for part in parts:
            first = len(tokens)
            tokens += part.tokens
            positions += part.positions
            prefix += part.prefix
            ancestors += part.ancestors
            end = part.slots[-1] + 1
            table = part.blocks[: -(-end // block_size)]
            slots += placed(table, part.slots, block_size)
            rows.append((first, len(tokens)))
            logit_rows += range(len(tokens) - part.num_logits, len(tokens))
            lengths.append(end)
            tables.append(tuple(table))
        tokens_R, positions_R, slots_R, prefix_R, ancestors_R = torch.tensor(
            [tokens, positions, slots, prefix, ancestors]
        ).unbind(0)
        return Batch(
            tokens_R,
            positions_R,
            slots_R,
            prefix_R,
            ancestors_R,
            logit_rows_L=torch.tensor(logit_rows, dtype=torch.int64),
            rows_S=tuple(rows),
            lengths_S=tuple(lengths),
            tables_S=tuple(tables),
        )

    def padded(self, num_rows: int) -> Batch:
        """The same with rows of nobody behind its own, `num_rows` in all, for forwards that are made for so many: each
        is a sequence of its own, holds token 0 in the scrap block's first slot, sees only itself, and asks for logits
        where all others do. Itself where it has so many already."""
        added = num_rows - self.num_rows
        if added <= 0:
            return self
        nobody, rows = torch.zeros(added, dtype=torch.int64), torch.arange(self.num_rows, num_rows)
        asking = rows if self.num_logits == self.num_rows else rows[:0]
        return Batch(
            tokens_R=torch.cat((self.tokens_R, nobody)),
            positions_R=torch.cat((self.positions_R, nobody)),
            slots_R=torch.cat((self.slots_R, nobody + SCRAP)),
            prefix_R=torch.cat((self.prefix_R, nobody)),
            ancestors_R=torch.cat((self.ancestors_R, nobody + 1)),
            logit_rows_L=torch.cat((self.logit_rows_L, asking)),
            rows_S=(*self.rows_S, *((row, row + 1) for row in range(self.num_rows, num_rows))),
            lengths_S=(*self.lengths_S, *[1] * added),
            tables_S=(*self.tables_S, *[(SCRAP,)] * added),
        )


def placed(blocks: Sequence[int], slots: Sequence[int], block_size: int) -> list[int]:
    """The cache's slots of a sequence's `slots`, by its block table."""
    return [blocks[slot // block_size] * block_size + slot % block_size for slot in slots]


def _rows(span: Span) -> Rows:
    seq, tree, start, root = span.seq, span.tree, span.seq.num_computed, span.root_slot
    known = Rows.known(seq.blocks, seq.tokens[start : root + 1], start)
    if tree.num_drafts == 0:
        return replace(known, num_logits=len(tree))
    return Rows(
        seq.blocks,
        [*known.tokens, *tree.tokens[1:]],
        [*known.positions, *(root + depth for depth in tree.depths()[1:])],
        range(start, root + 1 + tree.num_drafts),
        [*known.prefix, *[root] * tree.num_drafts],
        [*known.ancestors, *tree.ancestors()[1:]],
        len(tree),
    )


NOBODY = Batch.of([Rows((SCRAP,), [0], [0], [0], [0], [1], 1)], 1)  # one row in the scrap block
