"""The grammar's part of a row of scores."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.sampling import forbid


@pytest.mark.parametrize("num_allowed", [0, 1, 20, 499, 500, 501, 999, 1000])
def test_what_is_forbidden_is_minus_infinity_and_the_rest_keeps_its_bits(num_allowed: int) -> None:
    print("seed 3")
    rng = np.random.default_rng(3)
    scores_V = rng.standard_normal(1000, dtype=np.float32)
    scores_V[rng.integers(1000)] = np.nan
    allowed_V = np.zeros(1000, np.bool_)
    allowed_V[rng.permutation(1000)[:num_allowed]] = True
    masked_V = scores_V.copy()
    forbid(masked_V, allowed_V)
    np.testing.assert_array_equal(masked_V, np.where(allowed_V, scores_V, np.float32(-np.inf)))
    assert masked_V.dtype == np.float32
