"""A text that is followed byte by byte tells its watcher what a JSON reader reads from it."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import pytest

from specdec.grammar.json_text import JsonText, Kind, Place, Scalar


class Recorder:
    """A watcher that forbids nothing and keeps what it is told."""

    def __init__(self, events: tuple[Any, ...] = ()) -> None:
        self.events = events

    def begins(self, kind: Kind) -> Recorder:
        return Recorder((*self.events, ("begins", kind)))

    def key(self, name: str) -> Recorder:
        return Recorder((*self.events, ("key", name)))

    def scalar(self, value: Scalar) -> Recorder:
        return Recorder((*self.events, ("scalar", value)))

    def closes(self) -> Recorder:
        return Recorder((*self.events, ("closes",)))

    def continues(self) -> Recorder:
        return Recorder((*self.events, ("continues",)))


def told(value: Any) -> list[Any]:
    """What a watcher is told of a value."""
    match value:
        case dict():
            events: list[Any] = [("begins", Kind.OBJECT)]
            for index, (key, item) in enumerate(value.items()):
                events += [*([("continues",)] if index else []), ("key", key), *told(item)]
            return [*events, ("closes",)]
        case list():
            events = [("begins", Kind.ARRAY)]
            for index, item in enumerate(value):
                events += [*([("continues",)] if index else []), *told(item)]
            return [*events, ("closes",)]
        case str():
            return [("begins", Kind.STRING), ("scalar", value)]
        case Decimal() | int() if not isinstance(value, bool):
            return [("begins", Kind.NUMBER), ("scalar", Decimal(value))]
    return [("scalar", value)]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {random_text(rng): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice([None, True, False, rng.randrange(-99, 99), Decimal("-1.5e3"), Decimal("0.25"), random_text(rng)])


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice('ab"\\/\n\x1f{}[],: é€😀') for _ in range(rng.randrange(6)))


def written(value: Any, rng: random.Random) -> bytes:
    """JSON text with whitespace and escapes of all kinds."""
    blank = rng.choice(["", " ", "\n\t"])
    match value:
        case dict():
            pairs = (f"{string(key, rng)}{blank}:{blank}{written(item, rng).decode()}" for key, item in value.items())
            return (blank + "{" + blank + f"{blank},{blank}".join(pairs) + blank + "}").encode()
        case list():
            items = (written(item, rng).decode() for item in value)
            return (blank + "[" + blank + f"{blank},{blank}".join(items) + blank + "]").encode()
        case str():
            return string(value, rng).encode()
        case Decimal():
            return str(value).encode()
    return json.dumps(value).encode()


def string(value: str, rng: random.Random) -> str:
    if rng.random() < 0.5:
        return json.dumps(value)
    return json.dumps(value, ensure_ascii=False).replace("a", rng.choice(["a", "\\u0061"]))


@pytest.mark.parametrize("seed", range(40))
def test_the_watcher_is_told_what_the_text_says_however_it_is_cut(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    value = random_value(rng)
    data = written(value, rng)
    text: JsonText | None = JsonText(Recorder())
    at = 0
    while at < len(data):
        size = rng.choice([1, 1, 2, 3, 8])
        assert text is not None
        before = (text.place, text.raw, text.open, text.key_next, text.escaped)
        following = text.after(data[at : at + size])
        assert before == (text.place, text.raw, text.open, text.key_next, text.escaped)
        text, at = following, at + size
    assert text is not None
    end = text.ended()
    assert end is not None and isinstance(end.watcher, Recorder)
    assert list(end.watcher.events) == told(value)
    assert end.open == b""


@pytest.mark.parametrize("seed", range(20))
def test_the_string_so_far_is_a_beginning_of_the_whole_one(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    value = random_text(rng) + random_text(rng)
    data = string(value, rng).encode()
    longest = ""
    for end in range(1, len(data)):
        text = JsonText(Recorder()).after(data[:end])
        assert text is not None and text.place is Place.STRING
        assert value.startswith(text.so_far()) and text.so_far().startswith(longest)
        longest = text.so_far()
    assert longest == value
