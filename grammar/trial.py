"""A short random text under a new grammar, to see that one can be written and what its rows cost. Knows no backend."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np

from specdec.errors import ConstraintError
from specdec.grammar.walk import Vocabulary
from specdec.mask import bits
from specdec.protocols import Grammar

NUM_TOKENS = 64
MAX_TOKEN_SECONDS = 0.25  # of CPU: a step of the engine, and with it every other text, waits for as long


class TooCostly(Exception):
    """No text can be written under the grammar, or not at the pace of an engine."""


def try_out(grammar: Grammar, vocabulary: Vocabulary, spelled: Sequence[bytes]) -> None:
    """Write a text of up to 64 tokens, whose bytes `spelled` holds, always the same under the same grammar. One with a
    slow token is written twice: what else the machine does makes one token slow, but hardly the same one again.

    Raises `TooCostly`.
    """
    seconds = _write(grammar, vocabulary, spelled)
    if max(seconds) > MAX_TOKEN_SECONDS:
        seconds = [min(pair) for pair in zip(seconds, _write(grammar, vocabulary, spelled), strict=True)]
    if max(seconds) > MAX_TOKEN_SECONDS:
        place = seconds.index(max(seconds)) + 1
        raise TooCostly(f"token {place} of a text takes more than {MAX_TOKEN_SECONDS * 1_000:g} ms of processor time")


def _write(grammar: Grammar, vocabulary: Vocabulary, spelled: Sequence[bytes]) -> list[float]:
    """The seconds of CPU that each token of a text takes. It goes on where it can, and where a text has to end another
    one begins. Every other token holds a quote where one may, so that keys and values come."""
    quotes, closers = (np.array([any(map(data.__contains__, marks)) for data in spelled]) for marks in (b'"', b"}]"))
    rng = random.Random(0)
    constraint = grammar.start()
    seconds = []
    for place in range(NUM_TOKENS):
        began = time.thread_time()
        try:
            row_W = constraint.row(())
            allowed = bits(vocabulary.text_words_W if row_W is None else row_W, vocabulary.size)
            allowed[sorted(vocabulary.end_ids)] = False
            for wanted in (~closers, quotes if place % 2 else ~quotes):
                if (allowed & wanted).any():
                    allowed &= wanted
            choices = np.flatnonzero(allowed).tolist()
            if choices:
                constraint.advance([rng.choice(choices)])
            else:
                constraint = grammar.start()
        except ConstraintError as error:
            raise TooCostly(f"token {place + 1} of a text under it cannot be written: {error}") from error
        seconds.append(time.thread_time() - began)
    return seconds
