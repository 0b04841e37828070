"""Where the rows of a batch lie and what they see of the paged cache, for all layers of a forward. It knows no keys.

R rows, S sequences, N slots of a sequence, B blocks of all tables, W items of work, J joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.work_list import GRAIN, WorkList, cut, seen_ends


def visible(
    prefix_R: Tensor, ancestors_R: Tensor, num_slots: int, *, first: int = 0, window: int | None = None
) -> Tensor:
    """Booleans `[R, N]`: which of a sequence's first `num_slots` slots each row sees.

    `prefix_R` and `ancestors_R` are int64. Bit i of `ancestors` stands for slot prefix + i at position
    prefix + (number of set bits below i); a window w, in positions, leaves those above the row's own position - w.
    """
    slot_N = torch.arange(num_slots, device=prefix_R.device)
    offset_RN = slot_N - prefix_R[:, None]
    bit_RN = (ancestors_R[:, None] >> offset_RN.clamp(0, 62)) & 1
    in_tree_RN = (offset_RN >= 0) & (offset_RN <= 62) & bit_RN.bool()
    seen_RN = ((offset_RN < 0) & (slot_N >= first)) | in_tree_RN
    if window is None:
        return seen_RN
    bits_R63 = (ancestors_R[:, None] >> torch.arange(63, device=prefix_R.device)) & 1
    depth_R63 = bits_R63.cumsum(1) - bits_R63
    position_R = prefix_R + bits_R63.sum(1) - 1
    depth_RN = depth_R63.gather(1, offset_RN.clamp(0, 62))
    position_RN = torch.where(offset_RN < 0, slot_N, prefix_R[:, None] + depth_RN)
    return seen_RN & (position_RN > position_R[:, None] - window)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A sequence's rows `first_row .. end_row - 1`, the first block of its table, and how many slots they may see."""

    first_row: int
    end_row: int
    first_block: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The same rows as the host knows them, one stretch a sequence, end to end: a CPU works by it, a GPU's work is cut
    from it. `first_blocks_R` (int64) is for each row the first block of its sequence's table; no row may see more than
    `longest` slots."""

    stretches: tuple[Stretch, ...]
    tables: tuple[Sequence[int], ...]
    prefix_R: Tensor
    ancestors_R: Tensor
    first_blocks_R: Tensor
    longest: int

    @staticmethod
    def of(
        stretches: tuple[Stretch, ...], tables: tuple[Sequence[int], ...], prefix_R: Tensor, ancestors_R: Tensor
    ) -> Layout:
        """All that every layer of a forward asks for, found once."""
        counts = [stretch.end_row - stretch.first_row for stretch in stretches]
        first_blocks_R = torch.from_numpy(np.repeat([stretch.first_block for stretch in stretches], counts))
        longest = max(stretch.num_slots for stretch in stretches)
        return Layout(stretches, tables, prefix_R, ancestors_R, first_blocks_R, longest)

    def work_list(self, *, tile_rows: int, pieces: int, grain: int = GRAIN, fewer: int = 0, more: int = 0) -> WorkList:
        """See `cut`. Of sequences with more than `fewer` rows, and at most `more` where that is given."""
        kept = [
            stretch
            for stretch in self.stretches
            if fewer < stretch.end_row - stretch.first_row and (not more or stretch.end_row - stretch.first_row <= more)
        ]
        bounds = np.array([(stretch.first_row, stretch.end_row, stretch.first_block) for stretch in kept], np.int64)
        ends_R = seen_ends(self.prefix_R.numpy(), self.ancestors_R.numpy())
        first_S, end_S, start_S = bounds.reshape(-1, 3).T
        return cut(first_S, end_S, start_S, ends_R, tile_rows=tile_rows, pieces=pieces, grain=grain)


@dataclass(frozen=True, slots=True)
class Work:
    """A `WorkList` as int32 tensors on the device, for tiles of at most `tile_rows` rows. Their lengths, and
    `num_partials`, are what a launch is made for; the numbers in them are data that a captured graph reads anew."""

    items: Tensor
    joins: Tensor
    num_partials: int
    tile_rows: int

    @staticmethod
    def of(found: WorkList, tile_rows: int, device: torch.device | str) -> Work:
        """Exactly what is found, on the device."""
        items, joins = (torch.from_numpy(ints).to(device, non_blocking=True) for ints in (found.items, found.joins))
        return Work(items, joins, found.num_partials, tile_rows)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a batch: `blocks_B` are the block tables of all sequences end to end (int32), `prefix_R` and
    `ancestors_R` (int64) say what each row sees; these on the device. No row sees a slot below `first`.

    A runner of captured graphs gives tensors that stay, and `work` cut for them, by the head size and the number of
    queries a key head of the layers it serves; a launch then reads nothing else. Otherwise `work` is cut from `layout`
    by the first layer that needs it, and kept for the others, as are what the torch reference wants: `places` of each
    sequence's slots, and what is `hidden`, by sequence and window.
    """

    blocks_B: Tensor
    block_size: int
    prefix_R: Tensor
    ancestors_R: Tensor
    first: int = 0
    layout: Layout | None = None
    work: dict[tuple[int, int], tuple[Work, ...]] = field(default_factory=dict)
    places: dict[int, slice | Tensor] = field(default_factory=dict)
    hidden: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)

    @staticmethod
    def of(
        tables_S: Sequence[Sequence[int]],
        rows_S: Sequence[tuple[int, int]],
        lengths_S: Sequence[int],
        prefix_R: Tensor,
        ancestors_R: Tensor,
        block_size: int,
        *,
        first: int = 0,
        device: str = "cpu",
    ) -> PagedRows:
        """Of sequences with block tables, (first row, past the last row) and how many slots their rows may see; the
        tensors are on the CPU. Sequences lie end to end."""
        starts = accumulate((len(table) for table in tables_S), initial=0)
        stretches = tuple(
            Stretch(first_row, end_row, start, num_slots)
            for (first_row, end_row), start, num_slots in zip(rows_S, starts, lengths_S, strict=False)
        )
        count = sum(map(len, tables_S))  # many, and each step: what PyTorch makes of a list takes four times as long
        blocks_B = torch.from_numpy(np.fromiter(chain.from_iterable(tables_S), np.int32, count))
        return PagedRows(
            blocks_B.to(device),
            block_size,
            prefix_R.to(device).contiguous(),
            ancestors_R.to(device).contiguous(),
            first,
            Layout.of(stretches, tuple(tables_S), prefix_R, ancestors_R),
        )

    def slots(self, index: int) -> slice | Tensor:
        """The cache's slots of sequence `index`, in order: of a run of blocks a view, of any other table a gather."""
        assert self.layout is not None
        if index not in self.places:
            stretch, table = self.layout.stretches[index], self.layout.tables[index]
            if list(table) == list(range(table[0], table[0] + len(table))):
                start = table[0] * self.block_size
                self.places[index] = slice(start, start + stretch.num_slots)
            else:
                blocks_B1 = self.blocks_B[stretch.first_block : stretch.first_block + len(table), None].long()
                offsets = torch.arange(self.block_size, device=self.blocks_B.device)
                self.places[index] = (blocks_B1 * self.block_size + offsets).flatten()[: stretch.num_slots]
        return self.places[index]

    def hidden_from(self, index: int, window: int | None) -> Tensor | None:
        """Booleans `[R, N]`: what the rows of sequence `index` do not see; None where each sees all."""
        assert self.layout is not None
        if (index, window) not in self.hidden:
            stretch = self.layout.stretches[index]
            rows = slice(stretch.first_row, stretch.end_row)
            seen_RN = visible(
                self.prefix_R[rows], self.ancestors_R[rows], stretch.num_slots, first=self.first, window=window
            )
            self.hidden[index, window] = None if bool(seen_RN.all()) else ~seen_RN
        return self.hidden[index, window]
