"""Growing trees and what limits them, many at once: values for `specdec.kernels.front`.

S trees, W rows of a tree on a level, H rows of a tree in all (the root's first), C guesses behind a row, N = H C nodes
(node n is guess n mod C behind row n // C), G tempers, E ids that end a text, M rows with a slot, K numbers of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NONE = -1  # as a node, and as the survival of one: there is none
LAST_BIT = 62  # of ancestors


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tree is held to; int64 but for `floor`, fp64 `[1]`, the least survival of what is grown on. `root_S` is
    the position of the root, `depth_S` how many levels grow, `room_S` how many nodes count, `rows_S` how many are
    grown; `ending_SE` are tokens behind which nothing is, or `NONE`; `slots_SM` are where rows lie, from the root's on.
    """

    root_S: Tensor
    depth_S: Tensor
    room_S: Tensor
    rows_S: Tensor
    ending_SE: Tensor
    slots_SM: Tensor
    floor: Tensor


@dataclass(frozen=True, slots=True)
class Trees:
    """Trees in the making, written in place: int64, but `survival_SN` fp64 and `open_SN` bool, which says what may be
    grown on. `answer_SHK` (int32) holds for each row its node, the tokens guessed behind it and the bits of their
    chances."""

    tokens_SN: Tensor
    survival_SN: Tensor
    open_SN: Tensor
    depths_SH: Tensor
    ancestors_SH: Tensor
    num_grown_S: Tensor
    answer_SHK: Tensor

    @staticmethod
    def planted(num_trees: int, num_rows: int, branch: int, num_tempers: int, device: torch.device) -> Trees:
        """With nothing behind their roots."""

        def filled(count: int, value: float, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((num_trees, count), value, dtype=dtype, device=device)

        width = 1 + branch * (1 + num_tempers)
        return Trees(
            filled(num_rows * branch, 0),
            filled(num_rows * branch, NONE, torch.float64),
            filled(num_rows * branch, False, torch.bool),
            filled(num_rows, 0),
            filled(num_rows, 1),
            filled(1, 1)[:, 0],
            filled(num_rows * width, NONE, torch.int32).view(num_trees, num_rows, width),
        )


@dataclass(frozen=True, slots=True)
class Level:
    """What is grown on one level, `[S, W]` each, int64: `nodes`, `NONE` where there are fewer, with their `survival` in
    fp64. As rows of a forward those without a node lie in slot 0, hold token 0 and see their text up to the root.
    `above` is where the row of a node's parent stands among the H of its tree."""

    nodes: Tensor
    survival: Tensor
    depths: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    ancestors: Tensor
    above: Tensor
