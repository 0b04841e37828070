"""Rotary positions in Triton's interpreter: tables against fp64, and the rotation that writes against its reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.kernels import norm_rope
from specdec.kernels.gpu import rotary
from tests.kernels.cover import pairwise
from tests.kernels.near import assert_near

BOUND = 5e-7  # of fp32; the largest seen was 2.5e-7
NUM_SLOTS = 40


@pytest.fixture
def generator() -> torch.Generator:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("tuning", rotary.TABLE_TUNINGS)
@pytest.mark.parametrize("size, theta", [(2, 1e4), (16, 1e4), (80, 1e5), (128, 5e5), (256, 1e6)])
def test_tables_are_right_to_a_millionth_for_positions_of_millions(
    size: int, theta: float, tuning: Any, generator: torch.Generator
) -> None:
    """Both tables take the angle in fp32, as models were trained; of that angle they are exact."""
    frequencies_F = 1.0 / theta ** (torch.arange(0, size, 2) / size)
    edges = torch.tensor([0, 1, 2, 3, 131_071, 999_999, 1_000_000, 2**24])
    positions_R = torch.cat((edges, torch.randint(0, 10**6, (50,), generator=generator)))
    angles_RF = (positions_R[:, None] * frequencies_F).double()
    found = rotary.rotary_table(positions_R, frequencies_F, tuning)
    for cos_R1K, sin_R1K in (found, norm_rope.rotary_table(positions_R, frequencies_F)):
        assert cos_R1K.dtype == sin_R1K.dtype == torch.float32
        assert cos_R1K.shape == sin_R1K.shape == (len(positions_R), 1, size)
        for half, sign in ((slice(0, size // 2), -1), (slice(size // 2, size), 1)):
            assert float((cos_R1K[:, 0, half] - angles_RF.cos()).abs().max()) <= 1.5e-7
            assert float((sin_R1K[:, 0, half] - sign * angles_RF.sin()).abs().max()) <= 1.5e-7


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "rows": [1, 3, 17],
            "heads": [1, 3, 9],
            "groups": [1, 3, 8],  # query heads a head of keys has
            "size": [16, 64, 80, 128, 256],
            "rotated": [1.0, 0.5, 0.0],  # the share of a head
            "dtype": [torch.float32, torch.float16, torch.bfloat16],
            "place": ["alone", "in a merged output", "apart"],
            "tuning": rotary.WRITE_TUNINGS,
        }
    ),
)
def test_rotation_and_what_it_writes_are_those_of_the_reference(
    case: dict[str, Any], generator: torch.Generator
) -> None:
    rows, kv_heads, size, dtype = case["rows"], case["heads"], case["size"], case["dtype"]
    queries = kv_heads * case["groups"] if kv_heads < 9 else kv_heads
    wide = torch.randn(rows, queries + 2 * kv_heads, size + 3, generator=generator).to(dtype)[..., :size]
    if case["place"] != "apart":
        wide = wide.contiguous()
    qk_RJK, v_RGK = wide.split_with_sizes((queries + kv_heads, kv_heads), 1)
    if case["place"] == "alone":
        qk_RJK, v_RGK = qk_RJK.contiguous(), v_RGK.contiguous()
    tables = None
    if case["rotated"]:
        frequencies_F = 1.0 / 1e4 ** (torch.arange(0, 1, 2 / (size * case["rotated"])))
        assert 2 * len(frequencies_F) == size * case["rotated"]
        tables = norm_rope.rotary_table(torch.randint(0, 10**5, (rows,), generator=generator), frequencies_F)
    slots_R = torch.randperm(NUM_SLOTS, generator=generator)[:rows]
    caches = [torch.full((kv_heads, NUM_SLOTS, size), torch.nan, dtype=dtype) for _ in range(4)]
    found_RHK = rotary.rotate_and_write(qk_RJK, v_RGK, tables, caches[0], caches[1], slots_R, case["tuning"])
    expected_RHK = norm_rope.rotate_and_write(qk_RJK, v_RGK, tables, caches[2], caches[3], slots_R)
    assert_near(found_RHK, expected_RHK, BOUND if dtype == torch.float32 else 4e-6)
    assert torch.equal(caches[1].nan_to_num(9.0), caches[3].nan_to_num(9.0))
    assert_near(caches[0], caches[2], BOUND if dtype == torch.float32 else 4e-6)
    untouched_N = torch.ones(NUM_SLOTS, dtype=torch.bool)
    untouched_N[slots_R] = False
    for cache in caches:
        assert bool(cache[:, untouched_N].isnan().all())
        assert bool(cache[:, slots_R].isfinite().all())


def test_a_row_is_rotated_alike_alone_and_in_company(generator: torch.Generator) -> None:
    qk_RJK, v_RGK = torch.randn(9, 6, 16, generator=generator), torch.randn(9, 2, 16, generator=generator)
    tables = rotary.rotary_table(torch.arange(9) * 7919, 1.0 / 1e4 ** (torch.arange(8) / 8))
    keys, values = torch.zeros(2, 9, 16), torch.zeros(2, 9, 16)
    together_RHK = rotary.rotate_and_write(qk_RJK, v_RGK, tables, keys, values, torch.arange(9))
    for row in range(9):
        one = slice(row, row + 1)
        alone = torch.zeros(2, 9, 16)
        table = (tables[0][one], tables[1][one])
        slots = torch.tensor([row])
        found_RHK = rotary.rotate_and_write(qk_RJK[one], v_RGK[one], table, alone, torch.zeros(2, 9, 16), slots)
        assert torch.equal(found_RHK, together_RHK[one])
        assert torch.equal(alone[:, row], keys[:, row])


def test_no_rows_write_nothing() -> None:
    keys, values = torch.full((2, 4, 16), torch.nan), torch.full((2, 4, 16), torch.nan)
    empty = torch.zeros(0, dtype=torch.int64)
    tables = rotary.rotary_table(empty, torch.ones(8))
    found_RHK = rotary.rotate_and_write(torch.zeros(0, 6, 16), torch.zeros(0, 2, 16), tables, keys, values, empty)
    assert found_RHK.shape == (0, 4, 16)
    assert bool(keys.isnan().all() and values.isnan().all())
