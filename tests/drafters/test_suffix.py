"""Suffix decoding: counts of what followed: here, and in finished texts of the same salt."""

from __future__ import annotations

import random

import pytest

from specdec.drafters import salts, suffix
from specdec.drafters.suffix import SuffixDrafter
from specdec.request import Request
from specdec.sequence import Grant, Sequence
from specdec.tree import EMPTY, DraftTree, root
from tests.drafters.sequences import new_sequence


def draft(drafter: SuffixDrafter, seq: Sequence, drafts: int = 62, depth: int = 62) -> DraftTree:
    (tree,) = drafter.draft([Grant(seq, len(seq.tokens), drafts, depth)])
    assert tree.problem(100) is None
    return tree


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[step] for step in tree.path(node)) for node in range(1, len(tree))}


def test_a_continuation_is_as_long_as_its_suffix() -> None:
    tree = draft(SuffixDrafter(), new_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]))
    assert paths(tree) == {(4,), (4, 5), (4, 5, 6)}
    assert set(tree.sources[1:]) == {"suffix"}


def test_branches_are_weighed_by_how_often_they_followed() -> None:
    """1 2 was followed by 3 three times and by 4 once."""
    tree = draft(SuffixDrafter(), new_sequence([1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2, 3, 6, 1, 2]))
    first = {tree.tokens[node]: tree.scores[node] for node in range(1, len(tree)) if tree.parents[node] == 0}
    assert set(first) == {3, 4}
    assert first[3] == pytest.approx(3 * first[4])


def test_a_text_that_repeats_is_guessed_to_repeat() -> None:
    tree = draft(SuffixDrafter(), new_sequence([1, 2, 3] * 4))
    deepest = max(paths(tree), key=len)
    assert deepest == tuple(([1, 2, 3] * 9)[: len(deepest)])
    assert len(deepest) >= 9


def test_a_finished_text_helps_later_ones_of_its_salt_and_no_others() -> None:
    drafter = SuffixDrafter()
    told = list(range(10, 40))

    def sequence(tokens: list[int], salt: str) -> Sequence:
        seq = new_sequence(tokens)
        seq.request = Request(seq.request.prompt, cache_salt=salt)
        return seq

    done = sequence(told, "a")
    drafter.forget(done)  # preempted, not finished
    assert draft(drafter, sequence([1, 10, 11, 12], "a")) == root(12)
    done.finish_reason = "stop"
    drafter.forget(done)
    assert paths(draft(drafter, sequence([1, 10, 11, 12], "a"))) == {(13,), (13, 14), (13, 14, 15)}
    assert draft(drafter, sequence([1, 10, 11, 12], "b")) == root(12)


def test_nothing_is_guessed_across_the_end_of_a_past_text() -> None:
    drafter = SuffixDrafter()
    for text in ([50, 10, 11, 12], [60, 61, 62]):
        done = new_sequence(text)
        done.finish_reason = "length"
        drafter.forget(done)
    assert draft(drafter, new_sequence([1, 50, 10, 11])).tokens == (11, 12)


def test_the_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "POOL_TOKENS", 1000)
    monkeypatch.setattr(salts, "MAX_SALTS", 3)
    drafter = SuffixDrafter()
    for number in range(200):
        done = new_sequence([number % 97] * 90)
        done.request = Request(done.request.prompt, cache_salt=str(number % 5))
        done.finish_reason = "stop"
        drafter.forget(done)
    assert len(drafter._pools) == 3
    for pool in drafter._pools.values():
        assert sum(len(tokens) for _, tokens in pool.generations()) <= 1000


def test_away_from_the_frontier_there_is_no_tree_and_without_a_grant_only_the_root() -> None:
    seq = new_sequence([1, 2, 3, 1, 2])
    assert SuffixDrafter().draft([Grant(seq, 2, 9, 9)]) == [EMPTY]
    assert draft(SuffixDrafter(), seq, drafts=0) == root(2)


@pytest.mark.parametrize("seed", range(5))
def test_random_texts_give_sound_trees_within_the_grant(seed: int) -> None:
    rng = random.Random(seed)
    drafter = SuffixDrafter()
    seq = new_sequence([rng.randrange(3) for _ in range(4)])
    for _ in range(150):
        drafts, depth = rng.randrange(63), rng.randrange(1, 20)
        tree = draft(drafter, seq, drafts, depth)
        assert tree.num_drafts <= drafts
        assert max(tree.depths()) <= depth
        seq.tokens += [rng.randrange(3) for _ in range(rng.randint(1, 3))]
