"""A second causal language model with the target's tokenizer as the drafter (Leviathan, Kalman, Matias, arXiv
2211.17192), and the target's own first layers as one (Zhang et al., arXiv 2309.08168). Knows no files.

R rows, L logits rows, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.batch import Batch, Rows
from specdec.drafters.forwards import Follow, Forwards
from specdec.drafters.memory import News
from specdec.protocols import Attend, LayerShape, Model

if TYPE_CHECKING:
    from specdec.kv import KVCache, Pool
    from specdec.sequence import Sequence


class CausalHead:
    """A causal model as a `Head` for a target of `vocab_size`: its rows take tokens only.

    Only the first `num_tokens` ids are guessed, those that both models have if left out: rows beyond the tokenizer's
    are padding, and where the text holds such a one that this model lacks, it reads its last. Only the first `depth`
    layers run, all if left out.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self, name: str, model: Model, vocab_size: int, *, num_tokens: int | None = None, depth: int | None = None
    ) -> None:
        self.name = name
        self.layers: Seq[LayerShape] = model.layers[:depth]
        size = min(vocab_size, model.vocab_size, num_tokens or vocab_size)
        self.targets = None if size == vocab_size == model.vocab_size else torch.arange(size)
        self._model = model
        self._size = size
        self._depth = depth

    def features(self, taps: Seq[Tensor]) -> Tensor:
        """It takes none: always `[0, 0]`."""
        return torch.empty(0, 0)

    def forward(self, tokens_R: Tensor, features_RD: Tensor | None, positions_R: Tensor, attend: Attend) -> Tensor:
        """See `Head.forward`."""
        tokens_R = tokens_R.clamp(max=self._model.vocab_size - 1)
        hidden_RD, _ = self._model.forward(tokens_R, positions_R, attend, depth=self._depth)
        return hidden_RD

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """See `Head.logits`."""
        return self._model.logits(hidden_LD)[:, : self._size]


class Borrowed:
    """The context of the target's own first layers: the target's cache. What they write for guesses, and for the last
    known token, the verifying forward writes again. A `recurrent.Context` that keeps nothing."""

    num_kept = 0

    def __init__(self, head: CausalHead, cache: KVCache, pool: Pool) -> None:
        self.block_size = pool.block_size
        self._forwards = Forwards(head.forward, cache, pool)

    def observe(self, news: Seq[News]) -> None:
        """The target's cache is always up to date."""

    def catch_up(self, seqs: Seq[Sequence]) -> list[Tensor | None]:
        """See `recurrent.Context.catch_up`."""
        if not seqs:
            return []
        parts = [Rows.known(seq.blocks, seq.tokens[-1:], len(seq.tokens) - 1) for seq in seqs]
        return list(self.run(parts, None))

    def run(self, parts: Seq[Rows], features_RD: Tensor | None) -> Tensor:
        """See `recurrent.Context.run`."""
        return self._forwards.run(Batch.of(parts, self.block_size), features_RD)

    def follow(self, parts: Seq[Rows]) -> Follow | None:
        """See `recurrent.Context.follow`."""
        return self._forwards.follow(Batch.of(parts, self.block_size))

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept."""
