"""The attention of a batch cut into items of work for a GPU: ints on the host. It knows no tensor and no device.

R rows, S sequences, T tiles (consecutive rows of one sequence), W items (a chunk of a tile's context), J joins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ITEM_FIELDS = 6  # first row, number of rows, first block of the table, first slot, end slot, place of partial results
JOIN_FIELDS = 4  # row, place of its first partial result, places between two of them, number of them
WHOLE = -1  # as a place: the item covers all that its rows may see, and writes their output itself
GRAIN = 64  # slots: what a chunk is a multiple of, and at least

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many items, joins and rows of partial results a launch is made for. A captured graph has one, for good."""

    items: int
    joins: int
    partials: int

    @staticmethod
    def of(num_rows: int, tile_rows: int, pieces: int) -> Capacity:
        """Enough for `cut` of any batch of at most `num_rows` rows, whatever its sequences and contexts."""
        return Capacity(num_rows + pieces, num_rows, tile_rows * pieces + num_rows)


@dataclass(frozen=True, slots=True)
class WorkList:
    """What the items do, `[W, ITEM_FIELDS]`, the joins of what they leave, `[J, JOIN_FIELDS]`, and how many rows of
    partial results they leave. A tile's chunk c has row i's result at its place + i; an item or join of zeroes does
    nothing."""

    items: Ints
    joins: Ints
    num_partials: int

    def fill(self, items: Ints, joins: Ints, capacity: Capacity) -> None:
        """Write it over two arrays of `capacity`, unused ends zeroed. Raises ValueError where it does not fit."""
        needs = Capacity(len(self.items), len(self.joins), self.num_partials)
        if needs.items > capacity.items or needs.joins > capacity.joins or needs.partials > capacity.partials:
            raise ValueError(f"work of {needs} does not fit a launch made for {capacity}")
        items[: needs.items], joins[: needs.joins] = self.items, self.joins
        items[needs.items :], joins[needs.joins :] = 0, 0


def seen_ends(prefix_R: NDArray[np.int64], ancestors_R: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row the end of the slots that it may see: `prefix` and the highest bit of `ancestors`."""
    high_R, low_R = ancestors_R >> 32, ancestors_R & 0xFFFFFFFF
    # fp64 holds 32 bits exactly, so its exponent is their number.
    bits_R = np.where(high_R > 0, 32 + np.frexp(high_R.astype(np.float64))[1], np.frexp(low_R.astype(np.float64))[1])
    return prefix_R + bits_R


def cut(
    first_S: NDArray[np.int64],
    end_S: NDArray[np.int64],
    start_S: NDArray[np.int64],
    ends_R: NDArray[np.int64],
    *,
    tile_rows: int,
    pieces: int,
    grain: int = GRAIN,
) -> WorkList:
    """Cut sequences, with rows `first .. end - 1` and block tables from `start` on, into tiles of at most `tile_rows`
    rows, and what each tile sees (`ends_R` as from `seen_ends`) into chunks of about equal length.

    A tile gets as many chunks as its share of `pieces`, rounded, and at least one: so few tiles are cut into many, and
    many are left whole. Chunks are multiples of `grain` slots. The longest items come first.
    """
    tiles_S = -(-(end_S - first_S) // tile_rows)
    sequence_T = np.repeat(np.arange(len(first_S)), tiles_S)
    first_T = first_S[sequence_T] + tile_rows * _places(tiles_S)
    rows_T = np.minimum(end_S[sequence_T] - first_T, tile_rows)
    # Every other stretch of [first, end, next first, ...] is a tile's.
    edges = np.stack([first_T, first_T + rows_T], 1).ravel()
    length_T = np.maximum.reduceat(np.append(ends_R, 0), edges)[::2]
    share = max(grain, -(-int(length_T.sum()) // pieces))
    wanted_T = np.maximum(1, (2 * length_T + share) // (2 * share))
    size_T = np.maximum(1, -(-length_T // (wanted_T * grain))) * grain
    chunks_T = np.maximum(1, -(-length_T // size_T))

    tile_W, begin_W = np.repeat(np.arange(len(first_T)), chunks_T), _places(chunks_T)
    partials_T = np.where(chunks_T > 1, chunks_T * rows_T, 0)
    place_T = np.cumsum(partials_T) - partials_T
    place_W = np.where(chunks_T[tile_W] > 1, place_T[tile_W] + begin_W * rows_T[tile_W], WHOLE)
    begin_W = begin_W * size_T[tile_W]
    end_W = np.minimum(begin_W + size_T[tile_W], length_T[tile_W])
    items = np.stack([first_T[tile_W], rows_T[tile_W], start_S[sequence_T[tile_W]], begin_W, end_W, place_W], 1)
    items = items[np.argsort(begin_W - end_W, kind="stable")]

    joined_T = np.flatnonzero(chunks_T > 1)
    tile_J, index_J = np.repeat(joined_T, rows_T[joined_T]), _places(rows_T[joined_T])
    joins = np.stack([first_T[tile_J] + index_J, place_T[tile_J] + index_J, rows_T[tile_J], chunks_T[tile_J]], 1)
    return WorkList(items.astype(np.int32), joins.astype(np.int32), int(partials_T.sum()))


def _places(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 .. count - 1 for each count, end to end."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
