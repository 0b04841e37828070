"""What the sampler is told of each row, and what it answers where nothing can be drawn. L rows, N entries of lists."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NOT_NUMBERS = -1
NOTHING_ALLOWED = -2


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row is drawn. Temperatures are fp32, top-p and min-p fp64, top-k is int32, seeds and positions int64; a
    seed above 2**63 stands as the negative number with its bits. Neutral values (0, 1.0 and 0.0) turn a filter off."""

    temperature_L: Tensor
    top_k_L: Tensor
    top_p_L: Tensor
    min_p_L: Tensor
    seeds_L: Tensor
    positions_L: Tensor


@dataclass(frozen=True, slots=True)
class Counted:
    """Lists of tokens, end to end: row r has the entries `starts[r] .. starts[r + 1]` of tokens and counts, each token
    once: those of prompt, output and path, and how often each stands in output and path. All int32."""

    tokens_N: Tensor
    counts_N: Tensor
    starts: Tensor


@dataclass(frozen=True, slots=True)
class Listed:
    """Lists of tokens (int32) and what is added to their scores (fp32): row r has the entries `begins[r] .. ends[r]`
    (int32), each token once; rows may share a list. Minus infinity bans a token, whatever its score."""

    tokens_N: Tensor
    values_N: Tensor
    begins_L: Tensor
    ends_L: Tensor
