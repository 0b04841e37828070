"""Logits of a model's head: fp32, and on a GPU never rounded to 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specdec.kernels.head import wide_logits


def test_on_a_cpu_logits_are_those_of_the_linear() -> None:
    head, hidden_LD = nn.Linear(24, 50, bias=False), torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(wide_logits(head, hidden_LD), head(hidden_LD))
    low = head.to(torch.bfloat16)
    logits_LV = wide_logits(low, hidden_LD.bfloat16())
    assert logits_LV.dtype == torch.float32
    assert torch.equal(logits_LV, low(hidden_LD.bfloat16()).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_product_that_a_gpu_takes_has_fp32_sums(dtype: torch.dtype) -> None:
    """Without a GPU torch tells the shape and dtype of it, and refuses it for a CPU's numbers."""
    hidden_LD, weight_VD = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((3, 24), (50, 24)))
    logits_LV = torch.mm(hidden_LD, weight_VD.T, out_dtype=torch.float32)
    assert (logits_LV.shape, logits_LV.dtype) == ((3, 50), torch.float32)
    with pytest.raises(NotImplementedError, match="CPU"):
        torch.mm(torch.zeros(3, 24, dtype=dtype), torch.zeros(24, 50, dtype=dtype), out_dtype=torch.float32)
