"""Norm and rotation against their definitions, row by row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels.norm_rope import add_normed_rms_norm, add_rms_norm, rms_norm, rotary_table, rotate


@pytest.mark.parametrize("width", [1, 7, 64, 576, 640])
def test_rms_norm_is_its_definition_and_rows_do_not_depend_on_company(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(100, width, generator=generator) * torch.logspace(-6, 4, 100)[:, None]
    weight, eps = torch.randn(width, generator=generator), torch.tensor(1e-5)
    got = rms_norm(x, weight, eps)
    torch.testing.assert_close(got, F.rms_norm(x, (width,), weight, 1e-5), atol=1e-5, rtol=1e-5)
    alone = torch.cat([rms_norm(row[None].clone(), weight, eps) for row in x])
    for rows in (1, 2, 8, 16, 100):
        assert torch.equal(rms_norm(x[:rows].clone(), weight, eps), alone[:rows])
    half = rms_norm(x.bfloat16(), weight, eps)
    assert torch.equal(half, rms_norm(x.bfloat16().float(), weight, eps).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_sums_and_of_heads_are_norms_of_each(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x, delta = (torch.randn(7, 5, generator=generator).to(dtype) for _ in range(2))
    weight, inner = torch.randn(2, 5, generator=generator)
    eps, other = torch.tensor(1e-5), torch.tensor(0.3)
    for found, total in (
        (add_rms_norm(x, delta, weight, eps), x + delta),
        (add_normed_rms_norm(x, delta, inner, other, weight, eps), x + rms_norm(delta, inner, other)),
    ):
        assert torch.equal(found[0], total)
        assert torch.equal(found[1], rms_norm(total, weight, eps))
    heads, weights = torch.randn(6, 3, 5, generator=generator).to(dtype), torch.randn(3, 5, generator=generator)
    alone = [rms_norm(heads[:, head], weights[head], eps) for head in range(3)]
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(rms_norm(heads, weights, eps), torch.stack(alone, 1), atol=1e-6, rtol=2 * ulp)


def test_rotation_turns_pairs_by_their_angle() -> None:
    positions, frequencies = torch.tensor([0, 1, 7, 8191]), torch.tensor([1.0, 0.1, 0.001])
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    angles = (positions[:, None].double() * frequencies.double())[:, None]
    turned = torch.complex(x[..., :3].double(), x[..., 3:].double()) * torch.polar(torch.ones_like(angles), angles)
    got = rotate(x, *rotary_table(positions, frequencies))
    torch.testing.assert_close(got.double(), torch.cat((turned.real, turned.imag), -1), atol=1e-3, rtol=0)
    assert torch.equal(got[0], x[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotation_in_16_bits_is_rounded_once(dtype: torch.dtype) -> None:
    """Twice - the product, then the sum - would give another number somewhere."""
    x = torch.randn(200, 4, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    tables = rotary_table(torch.arange(200), 1.0 / 1e4 ** (torch.arange(32) / 32))
    once = rotate(x.float(), *tables).to(dtype)
    cos, sin = (table.to(dtype) for table in tables)
    assert torch.equal(rotate(x, *tables), once)
    assert not torch.equal(torch.addcmul(x * cos, x.roll(32, -1), sin), once)
