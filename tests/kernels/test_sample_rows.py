"""Drawing for many rows on a CPU: what the definition of one row says, and no Triton."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from specdec.kernels.draws import Counted, Draws
from specdec.kernels.rounding import blur, certain
from specdec.kernels.sample import best, perturbed
from specdec.kernels.sample_rows import draw_rows, log_totals, penalize_rows, top_rows

ROOT = Path(__file__).parent.parent.parent
ON_A_CPU = """
import sys, torch
from specdec.kernels.draws import Draws
from specdec.kernels.mask import mask_rows
from specdec.kernels.sample_rows import draw_rows, gumbel_rows, log_totals, top_rows
rows, ones = torch.zeros(1, 40), torch.ones(1)
mask_rows(rows, torch.ones(1, 2, dtype=torch.int32), ones.bool())
draws = Draws(ones - 1, ones.int(), ones.double(), ones.double() - 1, ones.long(), ones.long())
totals = log_totals(rows)
print(draw_rows(rows, draws, totals).tolist(), top_rows(rows, totals, 1)[0].tolist(), "triton" in sys.modules)
"""


def test_a_cpu_draws_without_triton() -> None:
    result = subprocess.run([sys.executable, "-c", ON_A_CPU], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[0] [[0]] False"


def test_rows_of_a_batch_draw_what_each_draws_alone() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    scores_LV = torch.from_numpy(rng.normal(0, 3, (4, 500)).astype(np.float32))
    settings = [(1.0, 0, 1.0, 0.0), (1e-5, 20, 1.0, 0.0), (1.5, 0, 0.7, 0.1), (0.0, 0, 1.0, 0.0)]
    temperatures, top_ks, top_ps, min_ps = zip(*settings, strict=True)
    draws = Draws(
        torch.tensor(temperatures),
        torch.tensor(top_ks, dtype=torch.int32),
        torch.tensor(top_ps, dtype=torch.float64),
        torch.tensor(min_ps, dtype=torch.float64),
        torch.tensor([-1, 0, 7, 2**63 - 1]),
        torch.tensor([0, 1, 2, 2**40]),
    )
    expected = [
        best(
            *perturbed(
                scores_LV[row].numpy(),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=[2**64 - 1, 0, 7, 2**63 - 1][row],
                position=[0, 1, 2, 2**40][row],
            )
        )
        for row, (temperature, top_k, top_p, min_p) in enumerate(settings)
    ]
    assert draw_rows(scores_LV, draws, log_totals(scores_LV)).tolist() == expected


def test_lists_of_penalties_belong_to_their_rows() -> None:
    scores_LV = torch.ones(3, 4)
    counted = Counted(
        torch.tensor([2, 0, 3], dtype=torch.int32),
        torch.tensor([1, 0, 2], dtype=torch.int32),
        torch.tensor([0, 1, 1, 3], dtype=torch.int32),
    )
    penalize_rows(scores_LV, counted, torch.full((3,), 2.0), torch.full((3,), 0.25), torch.full((3,), 1.0))
    assert scores_LV.tolist() == [[1, 1, 0.5 - 1.25, 1], [1, 1, 1, 1], [0.5, 1, 1, 0.5 - 2.25]]


def test_the_likeliest_come_in_order_with_ties_by_token() -> None:
    logits_LV = torch.tensor([[1.0, 3.0, 3.0, 0.0], [torch.nan, 0.0, 0.0, 0.0]])
    totals_L = log_totals(logits_LV)
    ids_LM, values_LM = top_rows(logits_LV, totals_L, 9)
    assert ids_LM[0].tolist() == [1, 2, 0, 3]
    assert torch.allclose(values_LM[0], logits_LV[0].log_softmax(0)[[1, 2, 0, 3]], rtol=0, atol=1e-6)
    assert totals_L.isnan().tolist() == [False, True]
    assert values_LM[1].isnan().all()


def test_a_draw_is_certain_unless_rounding_may_change_it() -> None:
    scores_V = torch.zeros(2)

    def draws(temperature: float, top_p: float) -> Draws:
        filters = torch.tensor([[top_p], [0.0]], dtype=torch.float64)
        keys = torch.tensor([[5], [5]])
        return Draws(torch.tensor([temperature]), torch.tensor([0], dtype=torch.int32), *filters, *keys)

    _, values = perturbed(scores_V.numpy(), temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, position=5)
    gap = float(values[0] - values[1])
    assert certain(scores_V, draws(1.0, 1.0), 0)
    assert certain(scores_V, draws(0.0, 1.0), 0), "equal scores are equal everywhere"
    tied_V = torch.tensor([0.0, gap], dtype=torch.float32)
    assert not certain(tied_V, draws(1.0, 1.0), 0)
    assert certain(tied_V + torch.tensor([0.0, 1e-5]), draws(1.0, 1.0), 0)
    assert certain(scores_V, draws(1.0, 0.6), 0)
    assert not certain(scores_V, draws(1.0, 0.5), 0), "whether half reaches half is a matter of rounding"
    assert 2e-6 <= blur(0.0) < blur(-16.0) == blur(16.0) < 5e-6
