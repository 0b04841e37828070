"""Linears for CPUs: a row's bits never depend on its company, sums are exact, and models keep their meaning."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from specdec import quant
from specdec.errors import ConfigError
from specdec.loader import load, open_checkpoint
from specdec.models.llama import Llama
from tests.models.dense import dense_logits
from tests.models.tiny import tiny_llama

KERNELS = {"onednn_8_bits": quant.onednn_8_bits, "fbgemm_7_bits": quant.fbgemm_7_bits}
# What decoding meets (SmolLM2, Gemma 3), and sizes that fit no register.
SIZES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (640, 1536), (2048, 640), (576, 49152), (50, 37), (1, 1)]


def linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(inputs * outputs)
    return nn.Linear(inputs, outputs, bias=bias)


def made(kind: str, source: nn.Linear) -> nn.Module:
    if kind in KERNELS:
        return quant.Int8Linear(source, KERNELS[kind], sizes_of(source.in_features))
    return quant.PackedLinear(source, torch.float32 if kind == "fp32" else torch.bfloat16)


def sizes_of(width: int) -> torch.Tensor:
    """Inputs whose channels differ in size."""
    return torch.logspace(-1, 1, width)


def rows_of(count: int, width: int) -> torch.Tensor:
    """Rows of very different sizes: one scale for all would show."""
    x_RD = torch.randn(count, width, generator=torch.Generator().manual_seed(width)) * sizes_of(width)
    return (
        x_RD * torch.logspace(-3, 3, count)[torch.randperm(count, generator=torch.Generator().manual_seed(1))][:, None]
    )


needs_bf16 = pytest.mark.skipif(not quant.has_bf16(), reason="this CPU has no bf16 instructions")
KINDS = ["fp32", pytest.param("bf16", marks=needs_bf16), *KERNELS]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_company(kind: str, size: tuple[int, int], bias: bool) -> None:
    module = made(kind, linear(*size, bias=bias))
    x_RD = rows_of(100, size[0])
    count = 100 if size[1] < 40000 else 16
    with torch.inference_mode():
        alone = torch.cat([module(x_RD[row : row + 1].clone()) for row in range(count)])
        for rows in (1, 2, 3, 8, 16, 33, 100):
            together = module(x_RD[:rows].clone())
            assert torch.equal(together[:count], alone[:rows]), rows
        reverse = module(x_RD.flip(0).contiguous())
        assert torch.equal(reverse.flip(0)[:count], alone)


@pytest.mark.parametrize("kind", KERNELS)
def test_a_row_that_is_not_a_number_harms_no_other(kind: str) -> None:
    source = linear(576, 960, bias=True)
    module = made(kind, source)
    x_RD = rows_of(6, 576)
    x_RD[1, 5], x_RD[2, 7], x_RD[3] = torch.nan, torch.inf, 0.0
    good = torch.tensor([0, 3, 4, 5])
    with torch.inference_mode():
        out = module(x_RD)
        assert torch.equal(out[good], module(x_RD[good].contiguous()))
        assert not out[1].isfinite().any()
        assert not out[2].isfinite().any()
        assert torch.equal(out[3], source.bias)


def test_the_chosen_kernel_is_exact_here() -> None:
    kernel = quant.int8_kernel()
    print("int8 kernel on this CPU:", kernel.__name__)
    assert quant.is_exact(kernel)
    assert quant.is_exact(quant.fbgemm_7_bits)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KERNELS)
def test_integers_are_summed_exactly(kind: str, size: tuple[int, int]) -> None:
    """Against the same integers in float64. Weights and activations random, then all at their largest.
    Where a kernel saturates (and is not chosen) the largest weight is one at which it does not yet."""
    levels = 127 if kind == "onednn_8_bits" else 63
    heaviest = 127 if quant.is_exact(KERNELS[kind]) else 60
    inputs, outputs = size
    generator = torch.Generator().manual_seed(inputs)
    for largest in (False, True):
        weight = torch.randint(-heaviest, heaviest + 1, (outputs, inputs), generator=generator)
        x = torch.randint(-levels, levels + 1, (9, inputs), generator=generator)
        if largest:
            weight, x = weight.sign() * heaviest, x.sign() * levels
        x[:, 0] = levels  # so that a row's largest value is what it is divided by
        product = KERNELS[kind](weight.to(torch.int8), torch.ones(outputs))
        got = product(x.float() / levels, torch.ones(9, 1))
        expected = x.double() @ weight.double().T / levels
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_close_to_the_plain_linear(kind: str) -> None:
    if kind in KERNELS and not quant.is_exact(KERNELS[kind]):
        pytest.skip(f"{kind} saturates on this CPU and is not chosen")
    source = linear(576, 960, bias=True)
    x_RD = rows_of(20, 576)
    with torch.inference_mode():
        expected, got = source(x_RD), made(kind, source)(x_RD)
    relative = (got - expected).norm(dim=1) / expected.norm(dim=1)
    print(kind, "relative error", float(relative.max()))
    assert relative.max() < {"fp32": 1e-5, "bf16": 1e-2, "onednn_8_bits": 2e-2, "fbgemm_7_bits": 3e-2}[kind]


@pytest.mark.parametrize(
    ("walk", "kind"), [(quant.pack_fp32, quant.PackedLinear), (quant.quantize_int8, quant.Int8Linear)]
)
def test_a_walk_replaces_every_linear_and_leaves_the_embedding(walk: object, kind: type, tmp_path: Path) -> None:
    tiny_llama(tmp_path, tied=True)
    plain = load(open_checkpoint(tmp_path))
    assert isinstance(plain, Llama)
    model = copy.deepcopy(plain)
    assert callable(walk)
    walk(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert sum(type(module) is kind for module in model.modules()) == 2 * 4 + 1
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    tokens = list(range(1, 30))
    expected, got = dense_logits(plain, tokens), dense_logits(model, tokens)
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.skipif(quant.has_bf16(), reason="this CPU has bf16 instructions")
def test_bf16_without_instructions_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    model = load(open_checkpoint(tmp_path))
    assert isinstance(model, Llama)
    with pytest.raises(ConfigError, match="dtype bfloat16: this CPU has neither"):
        quant.pack_bf16(model)


def test_large_channels_do_not_drown_the_others() -> None:
    """Three channels a hundred times larger, as in real models: moving half of that into the weights saves the rest."""
    source, kernel = linear(576, 960), quant.int8_kernel()
    sizes = torch.ones(576)
    sizes[[3, 70, 500]] = 100.0
    x_RD = torch.randn(20, 576, generator=torch.Generator().manual_seed(0)) * sizes
    source.weight.data[:, [3, 70, 500]] *= 0.01
    errors = []
    with torch.inference_mode():
        expected = source(x_RD)
        for known in (torch.ones(576), sizes):
            errors.append(float((quant.Int8Linear(source, kernel, known)(x_RD) - expected).norm() / expected.norm()))
    print("relative error without and with:", errors)
    assert errors[1] < errors[0] / 3


@pytest.mark.weights
def test_int8_keeps_the_meaning_of_a_real_model() -> None:
    model = load(open_checkpoint("smollm2-135m"))
    tokens = [504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 4857, 314, 260, 7042, 12165, 282, 260, 905, 30]
    expected = dense_logits(model, tokens).log_softmax(-1)
    quant.quantize_int8(model)
    got = dense_logits(model, tokens).log_softmax(-1)
    divergence = (expected.exp() * (expected - got)).sum(-1)
    print(f"KL divergence: mean {divergence.mean():.3f}, largest {divergence.max():.3f}")
    assert divergence.mean() < 0.15
