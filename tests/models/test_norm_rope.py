"""Norm and rotation against their definitions, row by row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels.norm_rope import rms_norm, rotary_table, rotate


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


def test_rotation_turns_pairs_by_their_angle() -> None:
    positions, frequencies = torch.tensor([0, 1, 7, 8191]), torch.tensor([1.0, 0.1, 0.001])
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    angles = (positions[:, None].double() * frequencies.double())[:, None]
    turned = torch.complex(x[..., :3].double(), x[..., 3:].double()) * torch.polar(torch.ones_like(angles), angles)
    got = rotate(x, *rotary_table(positions, frequencies, torch.float32))
    torch.testing.assert_close(got.double(), torch.cat((turned.real, turned.imag), -1), atol=1e-3, rtol=0)
    assert torch.equal(got[0], x[0])
