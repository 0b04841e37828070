"""How a text follows its prediction: a common subsequence of the two, the same however the text came."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest

from specdec.prediction import Followed


def followed(prediction: Seq[int], text: Seq[int]) -> Followed:
    one = Followed(prediction)
    one.read(text)
    return one


@pytest.mark.parametrize(
    ("prediction", "text", "count", "place", "run"),
    [
        ([], [1, 2], 0, 0, 0),
        ([1, 2, 3], [], 0, 0, 0),
        ([1, 2, 3], [1, 2], 2, 2, 2),
        ([1, 2, 3], [1, 2, 3, 4], 3, 3, 0),
        ([1, 2, 3], [4, 5, 6], 0, 0, 0),
        ([1, 2, 3, 4, 5], [1, 9, 3, 4, 5], 4, 5, 3),  # one replaced
        ([1, 2, 3, 4, 5], [1, 9, 8, 2, 3, 4, 5], 5, 5, 4),  # two put in
        ([1, 2, 3, 4, 5], [1, 4, 5], 3, 5, 2),  # two left out
        ([1, 2, 3, 4], [1, 9, 3], 1, 1, 0),  # one token alone is no place
        ([1, 2, 3, 2, 4], [1, 2, 4], 2, 2, 0),  # the 2 before 4 is not the one that was written
        ([1, 2, 3, 1, 2, 4], [9, 1, 2, 4], 2, 2, 0),  # the first place, not the best
        ([1, 1, 1], [1, 1, 1, 1, 1, 1], 3, 3, 0),
    ],
)
def test_it_goes_on_where_two_tokens_meet_again(
    prediction: list[int], text: list[int], count: int, place: int, run: int
) -> None:
    one = followed(prediction, text)
    assert (one.num_tokens, one.place, one.run, one.num_read) == (count, place, run, len(text))


def definition(prediction: Seq[int], text: Seq[int]) -> int:
    """The count by its definition, with a scan where `Followed` keeps an index."""
    place, count = 0, 0
    apart: list[int] = []
    for token in text:
        if not apart and list(prediction[place : place + 1]) == [token]:
            place, count = place + 1, count + 1
            continue
        apart.append(token)
        for start in range(place, len(prediction) - 1):
            if len(apart) > 1 and list(prediction[start : start + 2]) == apart[-2:]:
                place, count, apart = start + 2, count + 2, []
                break
    return count


def longest_common_subsequence(one: Seq[int], other: Seq[int]) -> int:
    row = [0] * (len(other) + 1)
    for left in one:
        before = 0
        for index, right in enumerate(other, 1):
            before, row[index] = row[index], before + 1 if left == right else max(row[index], row[index - 1])
    return row[-1]


@pytest.mark.parametrize("seed", range(4))
def test_it_is_a_common_subsequence_however_the_text_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        letters = rng.choice([2, 4, 30])
        prediction = [rng.randrange(letters) for _ in range(rng.randint(1, 40))]
        text = list(prediction)
        for _ in range(rng.randint(0, 5)):  # edits
            start, length = rng.randrange(len(text) + 1), rng.randint(0, 3)
            text[start : start + length] = [rng.randrange(letters) for _ in range(rng.randint(0, 3))]
        whole = followed(prediction, text)
        assert whole.num_tokens == definition(prediction, text)
        assert whole.num_tokens <= longest_common_subsequence(prediction, text)
        if text == prediction:
            assert whole.num_tokens == len(prediction)
        pieces, place = Followed(prediction), 0
        while place < len(text):
            step = rng.randint(1, 6)
            pieces.read(text[place : place + step])
            place += step
        assert (pieces.num_tokens, pieces.place, pieces.run) == (whole.num_tokens, whole.place, whole.run)
