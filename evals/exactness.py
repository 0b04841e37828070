"""Whether two runs drew the same tokens, and if not, how near the tie was where they first part. Knows no files."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specdec.batch import Batch
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.free import FREE_TEXT
from specdec.mask import TokenMask
from specdec.sampling import compared, scores
from specdec.sequence import Sequence, Span
from specdec.tree import EMPTY, root


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two outputs differ: its index in the output, and how near the draw there was to another.

    `gap` is the difference of the two best perturbed scores (score / temperature + noise; the score itself at
    temperature 0) in the root-only run. Where the other run's token did not pass top-k, top-p or min-p there, it is how
    far below the last that passed it lies, and `filtered` is True. Infinite where nothing else was allowed.
    """

    index: int
    gap: float
    filtered: bool = False


def first_difference(first: Seq[int], second: Seq[int]) -> int | None:
    """The first index at which two outputs differ, the length of the shorter where it begins the other, or None."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def difference(engine: Engine, plain: Sequence, other: Seq[int]) -> Difference | None:
    """Where the output of the finished root-only sequence `plain` and the output `other` part, or None if nowhere.

    The engine must be idle. Computes the common prefix again as a root-only run does, row by row.
    """
    output = plain.tokens[plain.num_prompt :]
    index = first_difference(output, other)
    if index is None:
        return None
    scores_V, seq = _scores(engine, plain, index)
    ids, values = compared(scores_V, seq, 0)
    token = other[index] if index < len(other) else None
    if ids is not None and token is not None and token not in ids:
        scaled_V = scores_V / np.float32(seq.request.sampling.temperature)
        return Difference(index, float(scaled_V[ids].min() - scaled_V[token]), filtered=True)
    if len(values) < 2:
        return Difference(index, math.inf)
    second, first = np.partition(values, -2)[-2:]
    return Difference(index, float(first) - float(second))


def _scores(engine: Engine, plain: Sequence, index: int) -> tuple[NDArray[np.float32], Sequence]:
    """The scores at output `index` of a root-only run, computed in the shapes that it had: the prompt in the engine's
    chunks, again from where its own blocks began if a prefix was found cached, then a row at a time."""
    config, pool = engine.config, engine.scheduler.pool
    prompt, length = plain.num_prompt, plain.num_prompt + index
    blocks = pool.take(-(-length // config.block_size))
    if blocks is None:
        raise ConfigError(f"the engine is not idle: {pool.num_available} free blocks do not hold {length} tokens")
    constraint = (plain.request.grammar or FREE_TEXT).start()
    constraint.advance(plain.tokens[prompt:length])
    seq = replace(plain, tokens=plain.tokens[:length], num_computed=0, blocks=blocks, constraint=constraint)
    starts = [*range(0, prompt, config.max_rows)] if plain.num_cached else []
    starts += [*range(plain.num_cached, prompt, config.max_rows), *range(prompt, length)]
    mask = TokenMask(1, engine.runner.vocab_size)
    try:
        for start in starts:
            seq.num_computed = start
            known = min(prompt - start, config.max_rows) if start < prompt else 1
            tree = root(seq.tokens[-1]) if start + known == length else EMPTY
            span = Span(seq, known, tree, 0, 0, start + known - 1)
            forward = engine.runner.forward(Batch.build([span], config.block_size))
    finally:
        pool.release(blocks)
    constraint.mask(root(seq.tokens[-1]), 0, mask)
    return scores(forward.logits_LV[0].cpu().numpy(), seq, (), mask.allowed(0)), seq
