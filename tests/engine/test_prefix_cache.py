"""Published blocks hold exactly what a fresh computation would put there."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
from torch import Tensor

from specdec.batch import Batch
from specdec.config import EngineConfig
from specdec.drafters.none import NoDrafter
from specdec.request import Request, Sampling, Stopping
from specdec.sequence import Grant, Sequence, Span
from specdec.tree import EMPTY, DraftTree
from tests.fakes import hash_engine, run, texts

VOCAB_SIZE = 24


class DecoyDrafter:
    """Knows the answer, and puts a wrong sibling before each true node: no accepted node lies in its final slot."""

    names: tuple[str, ...] = ("test",)
    taps: tuple[int, ...] = ()

    def __init__(self, answer: Seq[int]) -> None:
        self.answer = answer

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        return [self._tree(grant) if grant.at_frontier else EMPTY for grant in grants]

    def _tree(self, grant: Grant) -> DraftTree:
        tokens, parents = [grant.seq.tokens[-1]], [-1]
        for token in self.answer[grant.seq.num_output :][: min(grant.drafts // 2, grant.depth)]:
            parent = len(tokens) - 1
            tokens += [(token + 1) % VOCAB_SIZE, token]
            parents += [parent, parent]
        return DraftTree(tuple(tokens), tuple(parents), (1.0,) * len(tokens), ("",) * len(tokens))

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_continued_conversation_reads_true_keys_from_the_cache(block_size: int) -> None:
    """Trees that were accepted out of slot order, up to the very end of a text, are compacted before publication."""
    config = EngineConfig(max_model_len=200, num_slots=600, block_size=block_size, max_drafts=30)
    rng = random.Random(block_size)
    first = Request(tuple(rng.randrange(VOCAB_SIZE) for _ in range(9)), Sampling(seed=4), Stopping(max_tokens=23))
    (answer,) = texts(run(hash_engine(config, NoDrafter()), [first])).values()
    tokens = answer.tokens
    second = Request((*first.prompt, *tokens, 5, 6), Sampling(seed=4), Stopping(max_tokens=20))
    fresh = texts(run(hash_engine(config, NoDrafter()), [second]))

    engine = hash_engine(config, DecoyDrafter(tokens))
    run(engine, [first])
    emissions = run(engine, [second])
    assert texts(emissions) == fresh
    seq = emissions["r0", 0][0].seq
    assert seq.num_cached == (len(first.prompt) + len(tokens) - 1) // block_size * block_size > 0
    assert engine.metrics.acceptance.accepted_tokens > 0


def test_equal_prompts_are_computed_once() -> None:
    config = EngineConfig(max_model_len=100, num_slots=600, block_size=4, max_rows=16)
    engine = hash_engine(config, NoDrafter())
    prompt = tuple(range(20)) * 2
    run(
        engine,
        [Request(prompt, Sampling(), Stopping(max_tokens=1), n=5), Request(prompt, Sampling(), Stopping(max_tokens=1))],
    )
    assert sum(engine.runner.rows_seen) == 40 + 5 * 4  # type: ignore[attr-defined]
    assert engine.metrics.cached_prompt_tokens == 5 * 36


def test_a_salt_keeps_caches_apart() -> None:
    config = EngineConfig(max_model_len=100, num_slots=600, block_size=4)
    engine = hash_engine(config, NoDrafter())
    prompt = tuple(range(20))
    for salt, cached in (("a", 0), ("b", 0), ("a", 16)):
        emissions = run(engine, [Request(prompt, Sampling(), Stopping(max_tokens=1), cache_salt=salt)])
        assert emissions["r0", 0][0].seq.num_cached == cached
