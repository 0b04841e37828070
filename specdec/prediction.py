"""How a text follows what its caller predicted: token by token, in order. Knows tokens only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq


class Followed:
    """Walks a text beside its prediction and counts the predicted tokens that it repeats.

    While the two agree both go on. Where they part, the prediction waits until the last two tokens of the text stand
    together further on in it, and goes on behind them. So `num_tokens` is the length of a common subsequence of the
    two: no predicted token counts twice, and the number is a function of the two texts, whatever was drafted.

    `place` is the next token of the prediction; `run` how many tokens in a row have agreed just now (0: they have
    parted); `num_read` the tokens of the text so far.
    """

    __slots__ = ("_apart", "_before", "_pairs", "num_read", "num_tokens", "place", "prediction", "run")

    def __init__(self, prediction: Seq[int] = ()) -> None:
        self.prediction = prediction
        self.place = 0
        self.run = 0
        self.num_read = 0
        self.num_tokens = 0
        self._apart = 0  # tokens of the text since the two have parted
        self._before = -1  # the last of these
        self._pairs: dict[tuple[int, int], list[int]] | None = None  # places behind each two neighbours, once needed

    def read(self, tokens: Seq[int]) -> None:
        """Take in what the text has gained. Costs time in the new tokens, and once in the prediction."""
        self.num_read += len(tokens)
        if self.prediction:
            for token in tokens:
                self._follow(token)

    def _follow(self, token: int) -> None:
        if self._apart == 0 and self.place < len(self.prediction) and self.prediction[self.place] == token:
            self._go_on(self.place + 1, 1)
            return
        self.run = 0
        place = None if self._apart == 0 else self._behind(self._before, token)
        if place is None:
            self._apart += 1
            self._before = token
        else:
            self._apart = 0
            self._go_on(place, 2)

    def _go_on(self, place: int, count: int) -> None:
        self.place = place
        self.run += count
        self.num_tokens += count

    def _behind(self, first: int, second: int) -> int | None:
        """The first place behind these two tokens that lies past what was counted."""
        if self._pairs is None:
            self._pairs = {}
            for index in range(1, len(self.prediction)):
                pair = (self.prediction[index - 1], self.prediction[index])
                self._pairs.setdefault(pair, []).append(index + 1)
        places = self._pairs.get((first, second), [])
        found = bisect_left(places, self.place + 2)
        return places[found] if found < len(places) else None
