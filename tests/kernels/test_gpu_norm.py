"""Norms in Triton's interpreter against their reference. The interpreter cuts bf16 off instead of rounding it, so what
is stored as bf16 is compared to a unit in the last place, and a norm of a sum with that of the sum that was stored."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.kernels import norm_rope
from specdec.kernels.gpu import norm
from tests.kernels.cover import pairwise
from tests.kernels.near import apart, assert_near

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BOUND = 1e-6  # of fp32; the largest seen was 5e-7
EPS = torch.tensor(1e-5)


@pytest.fixture
def generator() -> torch.Generator:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "rows": [1, 3, 17],
            "width": [1, 33, 576, 4096, 5000],
            "dtype": DTYPES,
            "spread": [1e-4, 1.0, 1e3],
            "padding": [0, 16, 5],
            "tuning": norm.TUNINGS,
        }
    ),
)
def test_norms_are_those_of_the_reference(case: dict[str, Any], generator: torch.Generator) -> None:
    rows, width, dtype, tuning = case["rows"], case["width"], case["dtype"], case["tuning"]
    x_RD = normal(generator, rows, width, dtype=dtype, spread=case["spread"])
    delta_RD = normal(generator, rows, width, dtype=dtype, spread=case["spread"])
    weight_D, delta_weight_D = normal(generator, width), normal(generator, width)
    wide_x_RD, wide_delta_RD = apart(x_RD, case["padding"]), apart(delta_RD, case["padding"])
    assert_near(norm.rms_norm(wide_x_RD, weight_D, EPS, tuning), norm_rope.rms_norm(x_RD, weight_D, EPS), BOUND)

    total_RD, normed_RD = norm.add_rms_norm(wide_x_RD, wide_delta_RD, weight_D, EPS, tuning)
    assert_near(total_RD, x_RD + delta_RD, 0.0)
    assert_near(normed_RD, norm_rope.rms_norm(total_RD, weight_D, EPS), BOUND)
    expected = norm_rope.add_rms_norm(x_RD, delta_RD, weight_D, EPS)
    assert torch.equal(expected[0], x_RD + delta_RD)
    assert torch.equal(expected[1], norm_rope.rms_norm(x_RD + delta_RD, weight_D, EPS))

    other = torch.tensor(0.5)
    weights = (delta_weight_D, other, weight_D, EPS)
    total_RD, normed_RD = norm.add_normed_rms_norm(wide_x_RD, wide_delta_RD, *weights, tuning)
    assert_near(normed_RD, norm_rope.rms_norm(total_RD, weight_D, EPS), BOUND)
    inner_RD = norm_rope.rms_norm(delta_RD, delta_weight_D, other)
    expected = norm_rope.add_normed_rms_norm(x_RD, delta_RD, *weights)
    assert torch.equal(expected[0], x_RD + inner_RD)
    if dtype == torch.float32:
        assert_near(total_RD, x_RD + inner_RD, BOUND, x_RD.abs() + inner_RD.abs())
    else:  # the norm may be a neighbour of the reference's, and the sum one of that
        ulp = torch.finfo(dtype).eps
        off_RD = (total_RD.float() - (x_RD + inner_RD).float()).abs()
        assert bool((off_RD <= ulp * (inner_RD.float().abs() + (x_RD + inner_RD).float().abs()) + 1e-7).all())


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "rows": [1, 3, 17],
            "heads": [1, 3, 9],
            "more": [0, 1, 8],  # heads behind them that belong to somebody else
            "size": [16, 64, 80, 128, 256],
            "dtype": DTYPES,
            "tuning": norm.TUNINGS,
        }
    ),
)
def test_every_head_has_a_weight_of_its_own(case: dict[str, Any], generator: torch.Generator) -> None:
    rows, heads, size, dtype = case["rows"], case["heads"], case["size"], case["dtype"]
    wide = torch.full((rows, heads + case["more"], size), torch.nan, dtype=dtype)
    wide[:, :heads] = normal(generator, rows, heads, size, dtype=dtype)
    weight_JK = normal(generator, heads, size)
    found = norm.rms_norm(wide[:, :heads], weight_JK, EPS, case["tuning"])
    expected = [norm_rope.rms_norm(wide[:, head], weight_JK[head], EPS) for head in range(heads)]
    assert_near(found, torch.stack(expected, 1), BOUND)
    assert_near(norm_rope.rms_norm(wide[:, :heads], weight_JK, EPS), torch.stack(expected, 1), BOUND)
    assert found.is_contiguous()


@pytest.mark.parametrize("shape", [(7,), (2, 3, 4, 7), (0, 7), (2, 0, 7)])
def test_any_leading_shape_is_normed(shape: tuple[int, ...], generator: torch.Generator) -> None:
    x, weight = normal(generator, *shape), normal(generator, shape[-1])
    assert_near(norm.rms_norm(x, weight, EPS), norm_rope.rms_norm(x, weight, EPS), BOUND)
    turned = x.transpose(0, -1).contiguous().transpose(0, -1)
    assert_near(norm.rms_norm(turned, weight, EPS), norm_rope.rms_norm(x, weight, EPS), BOUND)


@pytest.mark.parametrize("rows, width", [(40, 24), (4, 1500)])
def test_a_row_has_the_same_bits_alone_and_in_company(rows: int, width: int, generator: torch.Generator) -> None:
    x_RD, delta_RD, weight_D = normal(generator, rows, width), normal(generator, rows, width), normal(generator, width)
    together = (norm.rms_norm(x_RD, weight_D, EPS), *norm.add_rms_norm(x_RD, delta_RD, weight_D, EPS))
    for row in (0, 1, rows - 2, rows - 1):
        one = slice(row, row + 1)
        alone = norm.rms_norm(x_RD[one], weight_D, EPS), *norm.add_rms_norm(x_RD[one], delta_RD[one], weight_D, EPS)
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, together, strict=True))


def test_a_row_of_zeros_stays_zero_and_one_of_nan_spoils_no_other() -> None:
    x_RD, weight_D = torch.ones(4, 33), torch.ones(33)
    x_RD[1], x_RD[2, 5] = 0.0, torch.nan
    for normed_RD in (norm.rms_norm(x_RD, weight_D, EPS), norm.add_rms_norm(x_RD, 0 * x_RD, weight_D, EPS)[1]):
        assert bool(normed_RD[2].isnan().all())
        assert_near(normed_RD[[0, 1, 3]], torch.tensor([1.0, 0.0, 1.0])[:, None].expand(3, 33), 1e-5)


def test_rows_that_registers_do_not_hold_are_read_twice(generator: torch.Generator) -> None:
    width = norm.WIDEST + 33
    x, delta, weight = normal(generator, 2, width), normal(generator, 2, width), normal(generator, width)
    assert_near(norm.rms_norm(apart(x, 7), weight, EPS), norm_rope.rms_norm(x, weight, EPS), BOUND)
    inner = norm_rope.rms_norm(delta, weight, EPS)
    for (total, normed), term in (
        (norm.add_rms_norm(x, delta, weight, EPS), delta),
        (norm.add_normed_rms_norm(x, delta, weight, EPS, weight, EPS), inner),
    ):
        assert_near(total, x + term, BOUND, x.abs() + term.abs())
        assert_near(normed, norm_rope.rms_norm(total, weight, EPS), BOUND)
    heads, weight = normal(generator, 2, 3, width), normal(generator, 3, width)
    assert_near(norm.rms_norm(heads[:, :2], weight[:2], EPS), norm_rope.rms_norm(heads, weight, EPS)[:, :2], BOUND)


def test_wide_rows_have_more_warps_and_no_program_more_than_a_gpu_has() -> None:
    cuts = {width: norm.cut(width, norm.TUNINGS[0]) for width in (1, 64, 4096, 5000, 12288, norm.WIDEST)}
    assert {width: (rows, whole, options["num_warps"]) for width, (rows, whole, options) in cuts.items()} == {
        1: (1024, 1, 4),
        64: (16, 64, 4),
        4096: (1, 4096, 4),
        5000: (1, 8192, 8),
        12288: (1, 16384, 16),
        norm.WIDEST: (1, 16384, 16),
    }
