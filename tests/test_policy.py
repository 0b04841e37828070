"""Which guesses are verified: the likeliest over all sequences, within the rows and every grant's own limits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.free import FREE_TEXT
from specdec.policy import Calibration, CostTable, Policy
from specdec.protocols import Constraint
from specdec.request import Request, Sampling, Speculative
from specdec.sequence import Grant, Sequence, Span
from specdec.text import Detokenizer
from specdec.tree import EMPTY, DraftTree, chain, root
from tests.drafters.sequences import new_sequence


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
            dict(zip(paths(tree), Calibration().outlook(each.seq, tree).survival, strict=True))
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
        policy.learn([Span(bad.seq, 1, kept, 0, 0, 0)], [()], [1])
    assert tried[0] > 0
    assert 1 <= sum(map(bool, tried[20:])) <= 10  # now and then, not always and not never
    for _ in range(20):
        (kept,) = policy.trim([tree], [good])
        policy.learn([Span(good.seq, 1, kept, 0, 0, 0)], [range(1, len(kept))], [len(kept)])
    assert policy.trim([tree], [good])[0].num_drafts == 3
    assert policy.num_kept == 2
    policy.forget(bad.seq)
    policy.forget(good.seq)
    assert policy.num_kept == 0


def test_siblings_share_one() -> None:
    tree = DraftTree((7, 1, 2, 3), (-1, 0, 0, 1), (1.0, 0.9, 0.9, 0.9), ("", "a", "a", "a"))
    survival = Calibration().outlook(grant(1, 9, 9).seq, tree).survival
    assert survival == pytest.approx([1.0, 0.5, 0.5, 0.4995])


def test_a_drafter_that_costs_more_than_it_gives_is_asked_ever_more_rarely_and_probed() -> None:
    """Root-only costs 10 a token and drafting 2: without hits it soon falls silent; one good probe brings it back."""
    policy = Policy(100, CostTable.measured([(1, 10.0), (63, 72.0)]), {"dear": 2.0, "cheap": 0.05})
    each = grant(1, 62, 62)
    asked = []
    for _ in range(400):
        (granted,) = policy.ask([each])
        assert "cheap" not in granted.muted
        asked.append("dear" not in granted.muted)
        (kept,) = policy.trim([root(7)], [granted])
        policy.learn([Span(each.seq, 1, kept, 0, 0, 0)], [()], [1])
    assert all(asked[:5])
    assert 1 <= sum(asked[200:]) <= 4
    while "dear" in policy.ask([each])[0].muted:
        pass
    tree = chain(7, [1, 2, 3], "dear/kind", decay=0.99)
    policy.learn([Span(each.seq, 1, tree, 0, 0, 0)], [(1, 2, 3)], [4])
    assert [len(policy.ask([each])[0].muted) for _ in range(5)] == [0] * 5
    policy.forget(each.seq)
    assert policy.num_kept == 0


def test_a_drafter_that_is_as_dear_as_forwards_and_gives_nothing_costs_little_over_many_short_texts() -> None:
    policy = Policy(100, CostTable.measured([(1, 10.0), (63, 72.0)]), {"dear": 40.0, "cheap": 0.05})
    spent = tokens = 0.0
    first_draws = []
    for _ in range(60):
        each = grant(1, 62, 62)
        for draw in range(40):
            (granted,) = policy.ask([each])
            if draw == 0:
                first_draws.append("dear" not in granted.muted)
            assert "cheap" not in granted.muted
            spent += 40.0 * ("dear" not in granted.muted)
            tokens += 10.0
            (kept,) = policy.trim([root(7)], [granted])
            policy.learn([Span(each.seq, 1, kept, 0, 0, 0)], [()], [1])
        policy.forget(each.seq)
    assert first_draws[0]
    assert sum(first_draws) < 5  # what one text found out, the next need not
    assert spent / tokens < 0.015
    # One text that it helps, and texts begin with it again.
    each = grant(1, 62, 62)
    tree = chain(7, [1, 2, 3, 4, 5, 6], "dear", decay=0.99)
    while "dear" in policy.ask([each])[0].muted:
        pass
    policy.learn([Span(each.seq, 1, tree, 0, 0, 0)], [(1, 2, 3, 4, 5, 6)], [7])
    assert "dear" not in policy.ask([grant(1, 62, 62)])[0].muted


@pytest.mark.parametrize("case", ["no guesses", "other drafters", "the end of a prompt"])
def test_a_drafter_is_judged_only_by_draws_at_which_it_was_asked(case: str) -> None:
    policy = Policy(100, CostTable.measured([(1, 10.0), (63, 72.0)]), {"dear": 400.0})
    each = grant(1, 0 if case == "no guesses" else 62, 62)
    if case == "other drafters":
        each = replace(each, seq=new_sequence([7], sampling=Sampling(speculative=Speculative("cheap"))))
    known = 5 if case == "the end of a prompt" else 1
    for _ in range(20):
        policy.ask([each])
        policy.learn([Span(each.seq, known, root(7), 0, 0, known - 1)], [()], [1])
    policy.forget(each.seq)
    assert policy.num_kept == 0
    (granted,) = policy.ask([grant(1, 62, 62)])
    assert not granted.muted


def test_the_ledger_holds_what_the_same_tokens_would_have_cost_one_by_one() -> None:
    policy = Policy(100, CostTable.measured([(1, 10.0), (11, 20.0)]))
    first, second = grant(1, 9, 9), grant(1, 9, 9)
    spans = [Span(first.seq, 1, chain(7, [1, 2, 3], "a"), 0, 0, 0), Span(second.seq, 1, chain(7, [1], "a"), 0, 0, 0)]
    policy.learn(spans, [(1, 2), ()], [3, 1])
    assert policy.ledger.cost == 10.0 + 5  # six rows
    assert policy.ledger.plain_cost == 11.0 + 10.0 + 10.0  # two rows, then the first sequence alone, twice


class Places:
    """A constraint whose row says how many of 320 tokens may follow, by the length of the path."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def row(self, path: tuple[int, ...]) -> NDArray[np.int32]:
        row = np.zeros(320, np.bool_)
        row[: self.counts[len(path)]] = True
        return np.packbits(row, bitorder="little").view(np.int32)


def test_guesses_are_told_apart_by_where_in_a_grammar_they_are_made() -> None:
    seq = grant(1, 9, 9).seq
    seq.constraint = cast("Constraint", Places(1, 2, 40, 41))
    places = [kind[1] for kind in Calibration().outlook(seq, chain(7, [1, 2, 3, 4], "a")).kinds]
    assert places == ["", "forced", "structure", "structure", "string"]
    seq.constraint = FREE_TEXT
    assert {kind[1] for kind in Calibration().outlook(seq, chain(7, [1, 2], "a")).kinds[1:]} == {"free"}
