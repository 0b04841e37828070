"""fp32 numbers as integers in the same order, alone and with a token beside them, so that a maximum breaks ties."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """int32 in the order of fp32 numbers: both zeros alike; NaN lies outside the infinities."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered(key):
    """The fp32 number of an int32 made by `ordered`, which is its own inverse on bits."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed(x, token):
    """int64 whose maximum is the largest number, among equals the lowest token."""
    return (ordered(x).to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))


@triton.jit
def value_of(pack):
    """The number in a `packed` integer."""
    return from_ordered((pack >> 32).to(tl.int32))


@triton.jit
def token_of(pack):
    """The token in a `packed` integer, int64."""
    return 0xFFFFFFFF - (pack & 0xFFFFFFFF)
