"""How attention is cut: each row sees each of its slots once, within the capacity stated, in chunks of like size."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from specdec.kernels.work_list import WHOLE, Capacity, cut, seen_ends


def test_a_row_ends_at_its_highest_bit() -> None:
    bits = [1, 2, 3, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 0]
    ends = seen_ends(np.full(len(bits), 7), np.array(bits, dtype=np.int64))
    assert ends.tolist() == [7 + value.bit_length() for value in bits]


@pytest.mark.parametrize("tile_rows", [1, 4, 32])
@pytest.mark.parametrize("pieces", [1, 7, 66])
@pytest.mark.parametrize("grain", [1, 5, 64])
def test_every_row_meets_every_slot_once_and_joins_name_what_is_left(tile_rows: int, pieces: int, grain: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(20):
        counts = [rng.choice([1, 1, 2, 8, 40]) for _ in range(rng.randint(1, 6))]
        end_S = np.cumsum(np.array(counts, np.int64))
        first_S, start_S = end_S - counts, np.array([100 * index for index in range(len(counts))])
        num_rows = int(end_S[-1])
        ends_R = np.array([rng.choice([1, 30, 64, 65, 3000]) + row for row in range(num_rows)])
        found = cut(first_S, end_S, start_S, ends_R, tile_rows=tile_rows, pieces=pieces, grain=grain)
        capacity = Capacity.of(num_rows, tile_rows, pieces)
        items, joins = np.ones((capacity.items, 6), np.int32), np.ones((capacity.joins, 4), np.int32)
        found.fill(items, joins, capacity)
        assert (items[len(found.items) :] == 0).all()
        assert (joins[len(found.joins) :] == 0).all()
        seen: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(num_rows)}
        for first_row, count, start, begin, end, place in found.items.tolist():
            assert 1 <= count <= tile_rows
            assert begin < end
            for row in range(first_row, first_row + count):
                assert start == start_S[np.searchsorted(end_S, row, side="right")]
                seen[row].append((begin, end, place + row - first_row if place != WHOLE else WHOLE))
        joined = {row: [place + step * n for n in range(count)] for row, place, step, count in found.joins.tolist()}
        places = [place for row in joined for place in joined[row]]
        assert sorted(places) == list(range(found.num_partials))
        for row, chunks in seen.items():
            chunks.sort()
            assert chunks[0][0] == 0
            assert chunks[-1][1] >= ends_R[row]
            assert all(before[1] == after[0] for before, after in pairwise(chunks))
            assert [place for _, _, place in chunks] == joined.get(row, [WHOLE])
        lengths = (found.items[:, 4] - found.items[:, 3]).tolist()
        assert lengths == sorted(lengths, reverse=True)


def test_few_sequences_are_cut_into_many_and_many_are_left_whole() -> None:
    def numbers(num_sequences: int, context: int) -> int:
        end_S = np.arange(1, num_sequences + 1)
        ends_R = np.full(num_sequences, context)
        return len(cut(end_S - 1, end_S, end_S * 0, ends_R, tile_rows=1, pieces=66).items)

    assert numbers(1, 32768) == 64  # 512 slots each
    assert numbers(1, 1000) == 16
    assert numbers(1, 1) == 1
    assert numbers(64, 8192) == 64
    assert numbers(8, 8192) == 64
    assert numbers(500, 8192) == 500


def test_work_that_does_not_fit_is_refused() -> None:
    end_S = np.array([5])
    found = cut(end_S - 5, end_S, end_S * 0, np.full(5, 1000), tile_rows=2, pieces=9)
    small = Capacity(3, 5, 100)
    with pytest.raises(ValueError, match="does not fit a launch made for"):
        found.fill(np.zeros((3, 6), np.int32), np.zeros((5, 4), np.int32), small)
