"""Faster linears for CPUs, put in the place of every nn.Linear of a finished model. Knows no model family.

Each gives a row the same bits alone and in company: nothing is shared by rows, and no sum depends on how many there
are. (Plain `F.linear` does not promise that: it takes another kernel for one row.)
R rows, D inputs, N outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import ConfigError
from specdec.kernels.norm_rope import Rotary, rotated
from specdec.protocols import Model

# (rows [R, D], their largest absolute values [R, 1]) -> products [R, N]
Product = Callable[[Tensor, Tensor], Tensor]
Kernel = Callable[[Tensor, Tensor], Product]

_SMALL = 1e-6
_PROBE_ROWS = 128
_TINY = torch.finfo(torch.float32).tiny
_ROWS_HINT = 8  # oneDNN lays weights out for about this many rows; 1 to 16 are what decoding uses


def has_bf16() -> bool:
    """Whether this CPU multiplies bf16 (AVX512_BF16 or AMX); without that bf16 is slower than fp32."""
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))


def pack_fp32(model: Model) -> None:
    """Reorder fp32 weights once into the layout that oneDNN multiplies fastest."""
    _need_onednn()
    _replace(model, lambda linear: PackedLinear(linear, torch.float32))


def pack_bf16(model: Model) -> None:
    """The same with weights in bf16. Activations are rounded to bf16 inside the linear and fp32 outside.

    Raises `ConfigError` on a CPU without the instructions (see `has_bf16`).
    """
    _need_onednn()
    if not has_bf16():
        raise ConfigError("dtype bfloat16: this CPU has neither AVX512_BF16 nor AMX; use float32, or quantize to int8")
    _replace(model, lambda linear: PackedLinear(linear, torch.bfloat16))


def quantize_int8(model: Model) -> None:
    """Weights int8 with one scale an output row, activations quantised per row, integers summed exactly.

    The model runs once over a few fixed tokens, to see which inputs of its linears are always large. Raises
    `ConfigError` on a CPU where no kernel is exact.
    """
    kernel, sizes = int8_kernel(), _input_sizes(model)
    _replace(model, lambda linear: Int8Linear(linear, kernel, sizes[linear]))


def _modules(model: Model) -> list[nn.Module]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"linears can be replaced in an nn.Module only, got {type(model).__name__}")
    return list(model.modules())


def _replace(model: Model, make: Callable[[nn.Linear], nn.Module]) -> None:
    for module in _modules(model):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, make(child))


def _input_sizes(model: Model) -> dict[nn.Module, Tensor]:
    """For each linear the root mean square `[D]` of its inputs. The tokens are arbitrary: which channels are large is a
    property of the weights more than of the text."""
    sizes: dict[nn.Module, Tensor] = {}

    def observe(linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sizes[linear] = inputs[0].float().square().mean(0).sqrt()

    hooks = [module.register_forward_pre_hook(observe) for module in _modules(model) if type(module) is nn.Linear]
    try:
        with torch.no_grad():
            positions_R = torch.arange(_PROBE_ROWS)
            hidden_RD, _ = model.forward(positions_R * 7919 % model.vocab_size, positions_R, _Causal())
            model.logits(hidden_RD[::8])
    finally:
        for hook in hooks:
            hook.remove()
    return sizes


class _Causal:
    """`protocols.Attend` without a cache: every row sees itself and the rows before it, as far as sizes need it."""

    def __call__(
        self,
        layer: int,
        qk_RJK: Tensor,
        v_RGK: Tensor,
        rotary: Rotary | None,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        heads = (*rotated(qk_RJK, v_RGK.shape[1], rotary), v_RGK)
        q, k, v = (x.transpose(0, 1)[None] for x in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return mixed[0].transpose(0, 1)


def has_onednn() -> bool:
    """Whether this torch can pack weights."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _need_onednn() -> None:
    if not has_onednn():
        raise ConfigError("packed weights: this torch was built without oneDNN; use plain float32")


class PackedLinear(nn.Module):
    """A linear whose weight is in oneDNN's own layout."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype), _ROWS_HINT)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)
        self.product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x_RD: Tensor) -> Tensor:
        out: Tensor = self.product(x_RD.to(self.dtype), self.packed, self.bias, "none", [], "")
        return out.to(x_RD.dtype)


class Int8Linear(nn.Module):
    """`x W^T` as integers: each row of x divided by its largest value, each row of W by its own.

    Inputs that are always large would leave few levels to the others, so a part of their size moves into the weights
    first (SmoothQuant, Xiao et al., arXiv 2211.10438, with strength 1/2), in powers of two, which round nothing.
    `sizes_D` says how large inputs are.
    """

    def __init__(self, linear: nn.Linear, kernel: Kernel, sizes_D: Tensor) -> None:
        super().__init__()
        weight_ND = linear.weight.detach().float()
        ratio_D = sizes_D.clamp_min(_SMALL) / weight_ND.square().mean(0).sqrt().clamp_min(_SMALL)
        factors_D = torch.exp2(torch.log2(ratio_D.sqrt()).round())
        self.inverse_D = 1 / factors_D
        weight_ND = weight_ND * factors_D
        scales_N = weight_ND.abs().amax(1).clamp_min(_TINY) / 127
        self.product = kernel((weight_ND / scales_N[:, None]).round().to(torch.int8), scales_N)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x_RD: Tensor) -> Tensor:
        x_RD = x_RD * self.inverse_D
        largest_R1 = torch.linalg.vector_norm(x_RD, torch.inf, -1, True).clamp_min_(_TINY)
        out_RN = self.product(x_RD, largest_R1)
        return out_RN if self.bias is None else out_RN.add_(self.bias)


def onednn_8_bits(weight_ND: Tensor, scales_N: Tensor) -> Product:
    """Activations as 1..255 around 128. Exact only with VNNI or AMX: older CPUs add two products in 16 bits."""
    packed, zeros_N = torch.ops.onednn.qlinear_prepack(weight_ND, None), torch.zeros(len(scales_N), dtype=torch.int64)
    middle, product = torch.tensor(128.5), torch.ops.onednn.qlinear_pointwise.default

    def multiply(x_RD: Tensor, largest_R1: Tensor) -> Tensor:
        # Truncation of x + 128.5 is rounding: everything is positive.
        x_RD = torch.addcmul(middle, x_RD, 127 / largest_R1).to(torch.uint8)
        out: Tensor = product(
            x_RD, 1 / 127, 128, packed, scales_N, zeros_N, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return out.mul_(largest_R1)

    return multiply


def fbgemm_7_bits(weight_ND: Tensor, scales_N: Tensor) -> Product:
    """Activations as 1..127 around 64, so that two products fit 16 bits: exact on AVX2."""
    with warnings.catch_warnings():
        # torch means to remove tensors that carry their scale; this one lives for two lines, to be packed.
        warnings.filterwarnings("ignore", message=r"torch\.quantize_per_tensor")
        zeros_N = torch.zeros(len(scales_N), dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(weight_ND, scales_N.double(), zeros_N, 0)
        packed = torch.ops.quantized.linear_prepack(weight, None)
    product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

    def multiply(x_RD: Tensor, largest_R1: Tensor) -> Tensor:
        out: Tensor = product(x_RD / largest_R1, 1 / 63, 64, packed)
        return out.mul_(largest_R1)

    return multiply


@cache
def int8_kernel() -> Kernel:
    """The first kernel that is exact on this CPU where sums are largest. Raises `ConfigError` if there is none."""
    kernels = [onednn_8_bits] if has_onednn() else []
    if "fbgemm" in torch.backends.quantized.supported_engines:
        kernels.append(fbgemm_7_bits)
    for kernel in kernels:
        if is_exact(kernel):
            return kernel
    raise ConfigError("quantize int8: torch has no exact int8 product for this CPU; use float32 or bfloat16")


def is_exact(kernel: Kernel) -> bool:
    """Whether no sum saturates: every weight and every activation at its largest, in each combination of signs."""
    signs = torch.tensor([1.0, -1.0])
    product = kernel((127 * signs[:, None]).expand(2, 64).repeat(16, 1).to(torch.int8), torch.full((32,), 1 / 127))
    for rows in (1, 2, 8, 16, 64):
        x_RD = signs[:, None].repeat(rows, 64)[:rows].contiguous()
        expected_RN = 64 * x_RD[:, :1] * signs.repeat(16)
        if not torch.allclose(product(x_RD, torch.ones(rows, 1)), expected_RN, rtol=1e-5):
            return False
    return True
