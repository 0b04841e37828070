"""What compiles kernels before the first request comes: a few tokens for every kind of request."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specdec.engine import Engine
from specdec.mask import TokenMask
from specdec.request import MAX_LOGPROBS, Request, Sampling, Stopping
from specdec.text import Detokenizer
from specdec.tree import DraftTree

PROMPT = 256  # tokens, which take larger tiles of attention than those that are drawn


def warm_up(engine: Engine) -> None:
    """Write a few tokens for every kind of request, so that none waits for what is compiled on first use. The engine
    must be idle; nothing is left behind."""
    config, vocab_size = engine.config, engine.runner.vocab_size
    alone = Engine(
        engine.runner,
        [],
        replace(config, prefix_caching=False),
        new_text=lambda _: Detokenizer(lambda token: b""),
        end_tokens=(0,),
    )
    prompt = (0,) * min(PROMPT, config.max_model_len - 1)
    for name, sampling in {
        "filtered": Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, logprobs=5),
        "penalized": Sampling(repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=MAX_LOGPROBS),
    }.items():
        alone.add(Request(prompt, sampling, Stopping(max_tokens=2), _Everything(vocab_size)), name)
        while alone.has_work:  # one after the other: of lists of likeliest tokens a step makes the longest
            alone.step()


class _Everything:
    """A `Grammar`, and its `Constraint`, that masks each row and allows all."""

    def __init__(self, vocab_size: int) -> None:
        self._all = np.full((vocab_size + 31) // 32, -1, np.int32)

    def start(self) -> _Everything:
        return self

    def prune(self, tree: DraftTree) -> DraftTree:
        return tree

    def mask(self, tree: DraftTree, first_row: int, mask: TokenMask) -> None:
        for row in range(first_row, first_row + len(tree)):
            mask.put(row, self._all)

    def row(self, path: tuple[int, ...]) -> NDArray[np.int32]:
        return self._all

    def forced(self, path: tuple[int, ...] = ()) -> tuple[int, ...]:
        return ()

    def advance(self, tokens: Seq[int]) -> None:
        pass

    def finish(self) -> None:
        pass
