"""Gated activations in Triton's interpreter against their reference, and that against its definition."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.kernels import activation as reference
from specdec.kernels.gpu import activation
from tests.kernels.cover import pairwise
from tests.kernels.near import apart, assert_near

BOUND = 1e-6  # of fp32; the largest seen was 5e-7
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": lambda gate: F.gelu(gate, approximate="tanh"),
}


@pytest.fixture
def generator() -> torch.Generator:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "name": list(PLAIN),
            "rows": [1, 3, 17],
            "width": [1, 33, 576, 4096, 5000],
            "dtype": [torch.float32, torch.float16, torch.bfloat16],
            "spread": [0.1, 3.0, 100.0],
            "padding": [0, 16, 5],
            "tuning": activation.TUNINGS,
        }
    ),
)
def test_activations_are_those_of_the_reference(case: dict[str, Any], generator: torch.Generator) -> None:
    shape, dtype, name = (case["rows"], 2 * case["width"]), case["dtype"], case["name"]
    gate_up_R2F = (torch.randn(shape, generator=generator) * case["spread"]).to(dtype)
    if dtype == torch.float16:
        gate_up_R2F[:, case["width"] :].clamp_(-10, 10)  # so that products stay below what fp16 holds
    found_RF = getattr(activation, name)(apart(gate_up_R2F, case["padding"]), case["tuning"])
    gate, up = gate_up_R2F.double().chunk(2, -1)
    # The tanh of the reference cancels where gates are negative; the kernel is held to what is true.
    assert_near(found_RF, (PLAIN[name](gate) * up).to(dtype), BOUND)
    gate, up = gate_up_R2F.float().chunk(2, -1)
    assert torch.equal(getattr(reference, name)(gate_up_R2F), (PLAIN[name](gate) * up).to(dtype))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_beyond_all_measure_neither_overflow_nor_hide_what_is_no_number(name: str, dtype: torch.dtype) -> None:
    sizes = [0.0, 1e-30, 1.0, 9.0, 20.0, 88.0, 89.0, 104.0, 1e4, 1e13, 3e38, torch.inf]
    gates = torch.tensor([*sizes, *(-size for size in sizes), torch.nan], dtype=dtype)
    for up in (1.0, -1.0, 0.0, torch.nan, torch.inf):
        # Times infinity it matters whether a tiny number is 0.
        gate = gates[(gates > -8.0) | gates.isnan()] if up == torch.inf else gates
        gate_up_R2F = torch.cat((gate, torch.full_like(gate, up)))[None]
        with np.errstate(invalid="ignore", over="ignore"):  # infinity times 0, and what bf16 cannot hold
            found_RF = getattr(activation, name)(gate_up_R2F)
        assert_near(found_RF, getattr(reference, name)(gate_up_R2F), BOUND)


def test_no_rows_give_none() -> None:
    for name in PLAIN:
        assert getattr(activation, name)(torch.zeros(0, 8)).shape == (0, 4)
