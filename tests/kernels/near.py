"""How near a kernel comes to its reference: in fp32 a bound, of 16 bits a unit in the last place."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_near(found: Tensor, expected: Tensor, bound: float, terms: Tensor | None = None) -> None:
    """fp32: off by at most `bound`, times the number where that is above 1, or that of its `terms` where it is a sum
    of rounded ones that may cancel. fp16 and bf16: the same number, or a neighbour of it, or, near 0, off by `bound`.
    What is NaN or infinite must be so on both sides."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    finite = expected.isfinite()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[expected.isinf()], expected[expected.isinf()])
    off = (found.double() - expected.double()).abs()[finite]
    sizes = (expected if terms is None else terms).double().abs().clamp_min(1.0)[finite]
    if expected.dtype == torch.float32:
        allowed = bound * sizes
    else:
        _, exponents = torch.frexp(expected.float()[finite])
        half = torch.full(exponents.shape, torch.finfo(expected.dtype).eps / 2, dtype=torch.float64)
        allowed = torch.ldexp(half, exponents).clamp_min(bound)
    if off.numel():
        print(f"off by at most {float((off / sizes).max()):.2e}")
    assert bool((off <= allowed).all())


def apart(x: Tensor, padding: int) -> Tensor:
    """The same numbers, rows `padding` further apart in memory, with NaN between them."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + padding), torch.nan, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]
