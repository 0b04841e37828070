"""Prompt lookup: the longest and most recent match, copied on, at a cost in new tokens only."""

from __future__ import annotations

import random
import time

import pytest

from specdec.drafters.ngram import MAX_CANDIDATES, NgramDrafter
from specdec.errors import ConfigError
from specdec.sequence import Grant
from specdec.tree import EMPTY, DraftTree, root
from tests.drafters.sequences import new_sequence


def draft(tokens: list[int], drafter: NgramDrafter | None = None, drafts: int = 62, depth: int = 62) -> DraftTree:
    (tree,) = (drafter or NgramDrafter()).draft([Grant(new_sequence(tokens), len(tokens), drafts, depth)])
    return tree


@pytest.mark.parametrize(
    ("tokens", "drafted"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1, 2, 3, 4]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2, 4, 9, 1]),  # equally long: the most recent
        ([7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2], [3, 9, 8, 1, 2, 4, 9]),  # the longer one, though older
        ([1, 2, 3, 4], []),
        ([1], []),
        ([1, 2], []),
        ([5, 5, 5], [5] * 7),  # overlaps itself: period 1
        ([1, 2, 1, 2, 1], [2, 1, 2, 1, 2, 1, 2]),  # period 2
        ([9, 1, 2, 3, 1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2, 3]),  # period 3
    ],
)
def test_what_followed_the_longest_most_recent_match_is_drafted(tokens: list[int], drafted: list[int]) -> None:
    tree = draft(tokens, NgramDrafter(num_drafts=7))
    assert list(tree.tokens) == [tokens[-1], *drafted]
    assert tree.parents == tuple(range(-1, len(drafted)))
    assert set(tree.sources[1:]) <= {"ngram"}
    assert tree.problem(10) is None


def reference(tokens: list[int], min_match: int, max_match: int, count: int) -> list[int]:
    """Prompt lookup by its definition: every length from the longest, every place from the most recent."""
    for length in range(max_match, min_match - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[place - length : place] == tokens[-length:]:
                copied = list(tokens)
                for _ in range(count):
                    copied.append(copied[place + len(copied) - len(tokens)])
                return copied[len(tokens) :]
    return []


@pytest.mark.parametrize("min_match", [1, 2, 3])
def test_drafts_equal_the_definition_on_random_text_that_grows(min_match: int) -> None:
    for seed in range(20):
        print("seed", seed)
        rng = random.Random(seed)
        drafter = NgramDrafter(min_match, 5, 9)
        seq = new_sequence([rng.randrange(4) for _ in range(rng.randint(1, 8))])
        # Fewer than 64 places with the same run, so the bound on candidates does not show.
        while len(seq.tokens) < MAX_CANDIDATES:
            (tree,) = drafter.draft([Grant(seq, len(seq.tokens), 62, 62)])
            assert list(tree.tokens[1:]) == reference(seq.tokens, min_match, 5, 9)
            if rng.random() < 0.2:
                drafter.forget(seq)  # preempted: the next draft is the same as if it had not been
            seq.tokens += [rng.randrange(4) for _ in range(rng.randint(1, 4))]


def test_longer_matches_are_trusted_more() -> None:
    short, long = draft([1, 2, 3, 8, 1, 2]), draft([1, 2, 3, 4, 5, 6, 8, 1, 2, 3, 4, 5])
    assert short.scores[1] < long.scores[1] < 1
    assert all(a > b for a, b in zip(long.scores, long.scores[1:], strict=False))


@pytest.mark.parametrize(("drafts", "depth", "count"), [(3, 9, 3), (9, 4, 4), (62, 62, 16), (0, 9, 0)])
def test_it_keeps_to_its_grant(drafts: int, depth: int, count: int) -> None:
    assert draft([1, 2, 3, 1, 2], drafts=drafts, depth=depth).num_drafts == count


def test_away_from_the_frontier_there_is_no_tree_and_without_a_grant_only_the_root() -> None:
    seq = new_sequence([1, 2, 3, 1, 2])
    assert NgramDrafter().draft([Grant(seq, 3, 9, 9), Grant(seq, 5, 0, 9)]) == [EMPTY, root(2)]


def test_a_step_costs_time_in_its_new_tokens_only() -> None:
    rng = random.Random(0)
    drafter, seq = NgramDrafter(), new_sequence([rng.randrange(50) for _ in range(100_000)])
    drafter.draft([Grant(seq, len(seq.tokens), 16, 16)])
    before = time.process_time()
    for _ in range(100):
        seq.tokens.append(rng.randrange(50))
        drafter.draft([Grant(seq, len(seq.tokens), 16, 16)])
    assert time.process_time() - before < 0.5  # 5 ms a step; reading all again takes ten times that


def test_nothing_is_kept_of_a_forgotten_sequence() -> None:
    drafter, seq = NgramDrafter(), new_sequence([1, 2, 3, 1, 2])
    drafter.draft([Grant(seq, 5, 9, 9)])
    drafter.forget(seq)
    drafter.forget(seq)
    assert not drafter._indexes


@pytest.mark.parametrize(("low", "high", "drafts"), [(0, 3, 5), (4, 3, 5), (2, 3, 0), (2, 3, 63)])
def test_numbers_that_make_no_sense_are_refused(low: int, high: int, drafts: int) -> None:
    with pytest.raises(ConfigError):
        NgramDrafter(low, high, drafts)
