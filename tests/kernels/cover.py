"""Pairwise covering arrays: few cases in which every two values of different dimensions still meet."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def pairwise(dimensions: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases, each a value for every dimension, that hold every pair of values of two dimensions at least once.

    Greedy: a case begins with a pair that is still missing and takes, dimension by dimension, the value that meets most
    missing pairs. Places in the lists stand for values, so that values need no hash.
    """
    names = list(dimensions)
    missing = {
        ((first, i), (second, j))
        for first, second in combinations(range(len(names)), 2)
        for i in range(len(dimensions[names[first]]))
        for j in range(len(dimensions[names[second]]))
    }
    cases = []
    while missing:
        chosen = dict(min(missing))
        for place, name in enumerate(names):
            if place not in chosen:
                gains = [
                    sum(tuple(sorted(((place, value), other))) in missing for other in chosen.items())
                    for value in range(len(dimensions[name]))
                ]
                chosen[place] = gains.index(max(gains))
        missing -= set(combinations(sorted(chosen.items()), 2))
        cases.append({name: dimensions[name][chosen[place]] for place, name in enumerate(names)})
    return cases
