"""The covering arrays that kernel tests draw their shapes from."""

from itertools import combinations

import pytest

from tests.kernels.cover import pairwise


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (3, 3, 3), (4, 1, 5, 2), (3, 4, 3, 4, 3)])
def test_every_pair_of_values_meets_and_the_array_is_far_smaller_than_the_product(sizes: tuple[int, ...]) -> None:
    cases = pairwise({f"d{place}": range(size) for place, size in enumerate(sizes)})
    for first, second in combinations(range(len(sizes)), 2):
        met = {(case[f"d{first}"], case[f"d{second}"]) for case in cases}
        assert met == {(i, j) for i in range(sizes[first]) for j in range(sizes[second])}
    largest = sorted(sizes)[-2:]
    if len(sizes) > 1:
        assert len(cases) <= 2 * largest[0] * largest[1]
