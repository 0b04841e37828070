"""Growing trees in Triton's interpreter: every number is the reference's, level after level."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.kernels import front
from specdec.kernels.device import interpreted
from specdec.kernels.guess import TEMPERS
from specdec.kernels.trees import NONE, Level, Limits, Trees
from tests.kernels.cover import pairwise
from tests.no_sync import no_sync

NUM_LEVELS, NUM_SLOTS = 4, 7


def limits(num_trees: int, ending: int, floor: float) -> Limits:
    """Of trees that end by each of their limits."""

    def drawn(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (num_trees,))

    return Limits(
        torch.randint(0, 2**40, (num_trees,)),
        drawn(1, NUM_LEVELS),
        drawn(1, 20),
        drawn(1, NUM_SLOTS),
        torch.randint(NONE, 20, (num_trees, ending)),
        torch.randint(1, 2**40, (num_trees, NUM_SLOTS)),
        torch.tensor([floor], dtype=torch.float64),
    )


def guesses(num_rows: int, branch: int) -> tuple[Tensor, Tensor]:
    """As `guess_rows` gives them: of some rows fewer, of some none; chances are few, so that many are equal."""
    tokens_LC = torch.randint(0, 20, (num_rows, branch), dtype=torch.int32)
    chances_LCG = (torch.randint(0, 4, (num_rows, branch, len(TEMPERS))) / 3).sort(1, descending=True).values
    ends_L1 = torch.randint(0, 2 * branch, (num_rows, 1))
    none_LC = torch.arange(branch) >= ends_L1
    return tokens_LC.masked_fill_(none_LC, -2), chances_LCG.masked_fill_(none_LC[..., None], 0.0)


def check_equal(found: Any, expected: Any) -> None:
    for field in fields(expected):
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name)), field.name


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "trees": [1, 3],
            "width": [1, 3, 8],
            "branch": [1, 3, 8],
            "ending": [1, 3],
            "floor": [0.0, 1 / 3],
            "ranked": [False, True],
        }
    ),
)
def test_every_level_is_that_of_the_reference(case: dict[str, Any]) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    num_trees, width, branch = case["trees"], case["width"], case["branch"]
    held = limits(num_trees, case["ending"], case["floor"])
    by_depth = torch.randint(0, len(TEMPERS), (NUM_LEVELS,))
    if case["ranked"]:
        by_depth = (torch.randint(-1, 4, (NUM_LEVELS, branch)) / 3).double()
    num_rows = 1 + width * (NUM_LEVELS - 1)
    device = torch.device("cpu")
    expected, found = (Trees.planted(num_trees, num_rows, branch, len(TEMPERS), device) for _ in range(2))
    level = other = front.roots(held)
    for number in range(NUM_LEVELS):
        if number:
            level = front.front(expected, held, number, width)
            with interpreted(), no_sync():
                other = front.front(found, held, number, width)
            check_equal(other, level)
            check_order(level, expected, held)
        first_row = 1 + (number - 1) * width if number else 0
        guessed = guesses(num_trees * (width if number else 1), branch)
        front.hang(expected, held, level, first_row, *guessed, by_depth)
        with interpreted(), no_sync():
            front.hang(found, held, other, first_row, *guessed, by_depth)
        check_equal(found, expected)


def check_order(level: Level, trees: Trees, held: Limits) -> None:
    """What is taken is likelier than what comes after it, and no more than there is room for."""
    for nodes, survival, grown, rows in zip(
        level.nodes.tolist(), level.survival.tolist(), trees.num_grown_S.tolist(), held.rows_S.tolist(), strict=True
    ):
        taken = [(-one, node) for node, one in zip(nodes, survival, strict=True) if node != NONE]
        assert taken == sorted(taken)
        assert nodes[len(taken) :] == [NONE] * (len(nodes) - len(taken))
        assert grown <= rows
