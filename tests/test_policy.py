"""Which guesses are verified: the likeliest over all sequences, within the rows and every grant's own limits."""

from __future__ import annotations

import random

import pytest

from specdec.free import FREE_TEXT
from specdec.policy import Policy
from specdec.request import Request
from specdec.sequence import Grant, Sequence
from specdec.text import Detokenizer
from specdec.tree import EMPTY, DraftTree, chain, root


def grant(known: int, drafts: int, depth: int) -> Grant:
    text = Detokenizer(lambda token: b"")
    seq = Sequence("r", 0, Request((7,) * known), 0, [7] * known, FREE_TEXT, text, 10, frozenset())
    return Grant(seq, known, drafts, depth)


def random_tree(rng: random.Random) -> DraftTree:
    tokens, parents, scores = [7], [-1], [1.0]
    for token in range(rng.randrange(12)):
        parent = rng.randrange(len(tokens))
        tokens.append(token)
        parents.append(parent)
        scores.append(scores[parent] * rng.choice([1.0, 0.5, 0.25]))
    return DraftTree(tuple(tokens), tuple(parents), tuple(scores), ("",) * len(tokens))


def test_the_likeliest_nodes_are_kept_within_the_rows() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        grants = [grant(rng.randint(1, 5), rng.randrange(10), rng.randrange(6)) for _ in range(rng.randint(1, 5))]
        trees = [random_tree(rng) for _ in grants]
        known = sum(each.known for each in grants)
        max_rows = known + rng.randrange(15)
        kept = Policy(max_rows).trim(trees, grants)
        fitting = [tree.within(each.drafts, each.depth) for tree, each in zip(trees, grants, strict=True)]
        for tree, each in zip(kept, grants, strict=True):
            assert tree.problem(100) is None
            assert tree.num_drafts <= each.drafts
            assert max(tree.depths()) <= each.depth
        offered = sorted((score for tree in fitting for score in tree.scores[1:]), reverse=True)
        got = sorted((score for tree in kept for score in tree.scores[1:]), reverse=True)
        assert got == offered[: max_rows - known]


def test_trees_that_fit_are_left_alone() -> None:
    trees = [chain(7, [1, 2], "a"), root(7), EMPTY]
    grants = [grant(1, 2, 2), grant(1, 0, 0), grant(3, 0, 0)]
    assert all(a is b for a, b in zip(Policy(7).trim(trees, grants), trees, strict=True))


@pytest.mark.parametrize("max_rows", [1, 3, 4])
def test_known_rows_come_first(max_rows: int) -> None:
    """Whatever room is left, known tokens are computed and the root stays."""
    kept = Policy(max_rows).trim([chain(7, [1, 2], "a"), EMPTY], [grant(1, 2, 2), grant(3, 0, 0)])
    assert kept == [root(7), EMPTY]


def test_a_grant_without_drafts_gets_none() -> None:
    """Speculation switched off for one request costs no rows, whatever the drafter returns."""
    kept = Policy(100).trim([chain(7, [1, 2], "a"), chain(7, [1, 2], "a")], [grant(1, 0, 0), grant(1, 2, 1)])
    assert [tree.num_drafts for tree in kept] == [0, 1]
