"""Predicted output: followed from its beginning, and found again after an edit."""

from __future__ import annotations

import random

import pytest

from specdec.drafters.prediction import PredictionDrafter
from specdec.sequence import Grant, Sequence
from specdec.tree import EMPTY, MAX_DRAFTS, DraftTree, root
from tests.drafters.sequences import new_sequence


def draft(drafter: PredictionDrafter, seq: Sequence, drafts: int = 62, depth: int = 62) -> DraftTree:
    (tree,) = drafter.draft([Grant(seq, len(seq.tokens), drafts, depth)])
    assert tree.problem(1000) is None
    assert set(tree.sources[1:]) <= {"prediction"}
    return tree


def write(seq: Sequence, *tokens: int) -> None:
    seq.tokens += tokens
    seq.followed.read(tokens)


def test_a_prediction_is_followed_from_its_beginning_and_found_again_after_a_change() -> None:
    seq = new_sequence([1], prediction=range(20, 50))
    drafter = PredictionDrafter()
    assert draft(drafter, seq, drafts=5).tokens == (1, 20, 21, 22, 23, 24)
    write(seq, 20, 21)
    assert draft(drafter, seq, drafts=3).tokens == (21, 22, 23, 24)
    write(seq, 99, 98)  # the answer leaves the prediction
    assert draft(drafter, seq) == root(98)
    write(seq, 30, 31)  # and comes back to it further on
    assert draft(drafter, seq, drafts=2).tokens == (31, 32, 33)


def test_while_the_answer_is_the_prediction_all_that_is_granted_is_drafted() -> None:
    prediction = [*range(100, 300)]
    seq = new_sequence([1], prediction=prediction)
    assert draft(PredictionDrafter(), seq).tokens == (1, *prediction[:MAX_DRAFTS])
    write(seq, *prediction[:190])
    assert draft(PredictionDrafter(), seq).tokens == (289, *prediction[190:])
    write(seq, *prediction[190:])
    assert draft(PredictionDrafter(), seq) == root(299)


def test_after_an_edit_guesses_are_as_long_as_what_has_agreed_since() -> None:
    seq = new_sequence([1], prediction=range(20, 90))
    drafter = PredictionDrafter()
    write(seq, 20, 99, 22, 23)
    assert draft(drafter, seq).tokens == (23, 24, 25)
    write(seq, *range(24, 30))
    assert draft(drafter, seq).tokens == (29, *range(30, 38))


def test_the_place_that_follows_what_was_written_is_among_the_guesses_however_many_look_alike() -> None:
    line = [7, 8, 9]
    prediction = [token for number in range(200) for token in (100 + number, *line)]
    seq = new_sequence([1], prediction=prediction)
    write(seq, *prediction[:12], 999, *line)  # one name changed early in two hundred lines
    tree = draft(PredictionDrafter(), seq)
    assert 104 in [tree.tokens[node] for node in range(1, len(tree)) if tree.parents[node] == 0]


@pytest.mark.parametrize(("drafts", "depth", "count"), [(3, 9, 3), (9, 4, 4), (62, 62, 30), (0, 9, 0), (9, 0, 0)])
def test_it_keeps_to_its_grant(drafts: int, depth: int, count: int) -> None:
    assert draft(PredictionDrafter(), new_sequence([1], prediction=range(20, 50)), drafts, depth).num_drafts == count


def test_away_from_the_frontier_there_is_no_tree_and_without_a_prediction_only_the_root() -> None:
    drafter = PredictionDrafter()
    assert drafter.draft([Grant(new_sequence([1, 2, 3], prediction=[4]), 2, 9, 9)]) == [EMPTY]
    assert draft(drafter, new_sequence([1, 2, 3, 1, 2])) == root(2)
    assert drafter.num_kept == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_texts_give_sound_trees_within_the_grant_whatever_is_forgotten(seed: int) -> None:
    rng = random.Random(seed)
    prediction = [rng.randrange(4) for _ in range(40)]
    drafter = PredictionDrafter()
    seq = new_sequence([1], prediction=prediction)
    for _ in range(100):
        drafts, depth = rng.randrange(63), rng.randrange(1, 20)
        tree = draft(drafter, seq, drafts, depth)
        assert tree.num_drafts <= drafts
        assert max(tree.depths()) <= depth
        assert tree == draft(PredictionDrafter(), seq, drafts, depth)
        if rng.random() < 0.2:
            drafter.forget(seq)
            assert drafter.num_kept == 0
        agreed = prediction[seq.followed.place : seq.followed.place + rng.randint(1, 4)]
        write(seq, *(agreed if rng.random() < 0.6 else [rng.randrange(4)]))
