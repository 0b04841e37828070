"""Which guesses are verified: the likeliest over all sequences, within the rows and every grant's own limits."""

from __future__ import annotations

import random

import pytest

from specdec.free import FREE_TEXT
from specdec.policy import Calibration, CostTable, Policy
from specdec.request import Request
from specdec.sequence import Grant, Sequence, Span
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


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[step] for step in tree.path(node)) for node in range(len(tree))]


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
        # Nothing was learned, so the drafter's own scores count, siblings sharing at most 1. Keys of nodes tell trees
        # apart: a kept node is the same token below the same path.
        chances = [
            dict(zip(paths(tree), Calibration().survival(each.seq, tree), strict=True))
            for tree, each in zip(fitting, grants, strict=True)
        ]
        offered = sorted((chance for tree in chances for path, chance in tree.items() if path), reverse=True)
        got = sorted((chances[i][path] for i, tree in enumerate(kept) for path in paths(tree)[1:]), reverse=True)
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


def test_a_guess_is_taken_while_expected_tokens_a_cost_grow() -> None:
    """Rows cost 1, and from the fourth on 3 each: the fourth must be nearly certain to be worth it."""
    costs = CostTable.measured([(1, 10.0), (4, 13.0), (8, 25.0)])
    assert [costs.at(count) for count in (1, 2, 4, 5, 8, 10)] == [10.0, 11.0, 13.0, 16.0, 25.0, 31.0]
    tree = chain(7, [1, 2, 3, 4, 5, 6], "a", decay=0.9)
    (kept,) = Policy(100, costs).trim([tree], [grant(1, 62, 62)])
    assert kept.num_drafts == 3
    (kept,) = Policy(100).trim([tree], [grant(1, 62, 62)])
    assert kept.num_drafts == 6


def test_costs_never_fall_with_rows() -> None:
    costs = CostTable.measured([(8, 9.0), (1, 10.0), (4, 12.0)])
    assert costs.costs == (10.0, 12.0, 12.0)
    with pytest.raises(ValueError, match="4 rows have two costs"):
        CostTable.measured([(4, 1.0), (4, 2.0)])


def test_a_source_that_is_wrong_is_switched_off_for_its_sequence_and_probed_again() -> None:
    costs = CostTable.measured([(1, 10.0), (63, 72.0)])
    policy = Policy(100, costs)
    bad, good = grant(1, 62, 62), grant(1, 62, 62)
    tree = chain(7, [1, 2, 3], "a", decay=0.7)
    tried = []
    for _ in range(60):
        (kept,) = policy.trim([tree], [bad])
        tried.append(kept.num_drafts)
        policy.learn([Span(bad.seq, 1, kept, 0, 0, 0)], [()])
    assert tried[0] > 0
    assert 1 <= sum(map(bool, tried[20:])) <= 10  # now and then, not always and not never
    for _ in range(20):
        (kept,) = policy.trim([tree], [good])
        policy.learn([Span(good.seq, 1, kept, 0, 0, 0)], [range(1, len(kept))])
    assert policy.trim([tree], [good])[0].num_drafts == 3
    assert policy.calibration.num_kept == 2
    policy.forget(bad.seq)
    policy.forget(good.seq)
    assert policy.calibration.num_kept == 0


def test_siblings_share_one() -> None:
    tree = DraftTree((7, 1, 2, 3), (-1, 0, 0, 1), (1.0, 0.9, 0.9, 0.9), ("", "a", "a", "a"))
    survival = Calibration().survival(grant(1, 9, 9).seq, tree)
    assert survival == pytest.approx([1.0, 0.5, 0.5, 0.4995])
