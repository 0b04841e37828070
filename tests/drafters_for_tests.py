"""Drafters that only tests use: one guesses at random, one knows the answer and errs on purpose."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specdec.tree import EMPTY, MAX_DRAFTS, DraftTree, chain, root

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.batch import Batch
    from specdec.sequence import Grant, Sequence, Span


def random_tree(rng: random.Random, last: int, vocab_size: int, max_drafts: int, max_depth: int) -> DraftTree:
    """A tree of any shape: a chain, a star or anything between, of up to `max_drafts` nodes."""
    tokens, parents, scores, depths = [last], [-1], [1.0], [0]
    wanted = rng.randint(0, min(max_drafts, MAX_DRAFTS))
    chain_likeness = rng.random()
    seen: set[tuple[int, int]] = set()
    for _ in range(wanted):
        parent = len(tokens) - 1 if rng.random() < chain_likeness else rng.randrange(len(tokens))
        token = rng.randrange(vocab_size)
        if depths[parent] >= max_depth or (parent, token) in seen:
            continue
        seen.add((parent, token))
        tokens.append(token)
        parents.append(parent)
        scores.append(scores[parent] * rng.random())
        depths.append(depths[parent] + 1)
    return DraftTree(tuple(tokens), tuple(parents), tuple(scores), ("", *["random"] * (len(tokens) - 1)))


class RandomDrafter:
    """Trees of random shape and random tokens, the same for the same seed and the same place of the same request."""

    names: tuple[str, ...] = ("random",)
    taps: tuple[int, ...] = ()

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.seed = seed
        self.vocab_size = vocab_size

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """See `Drafter.draft`."""
        return [self._draft(grant) for grant in grants]

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """See `Drafter.observe`: nothing is learned."""

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`: nothing is kept."""

    def _draft(self, grant: Grant) -> DraftTree:
        if not grant.at_frontier:
            return EMPTY
        rng = random.Random(f"{self.seed} {grant.seq.request_id} {grant.seq.index} {len(grant.seq.tokens)}")
        return random_tree(rng, grant.seq.tokens[-1], self.vocab_size, grant.drafts, grant.depth)


class OracleDrafter:
    """Knows how each prompt goes on. Each true token gets, at `mistake_rate`, a wrong one in its place in the chain
    (the rest of the chain is then lost), and at `branch_rate` a wrong sibling with a child of its own.

    `continuations` maps a prompt to the tokens that follow it: from a run without drafts.
    """

    names: tuple[str, ...] = ("oracle",)
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        continuations: Mapping[tuple[int, ...], Seq[int]],
        vocab_size: int,
        mistake_rate: float = 0.0,
        branch_rate: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.continuations = continuations
        self.vocab_size = vocab_size
        self.mistake_rate = mistake_rate
        self.branch_rate = branch_rate
        self.seed = seed

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """See `Drafter.draft`."""
        return [self._draft(grant) for grant in grants]

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """See `Drafter.observe`: it knows already."""

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`: nothing is kept."""

    def _draft(self, grant: Grant) -> DraftTree:
        seq = grant.seq
        if not grant.at_frontier:
            return EMPTY
        truth = self.continuations.get(seq.request.prompt, ())[seq.num_output :]
        if not truth or min(grant.drafts, grant.depth) <= 0:
            return root(seq.tokens[-1])
        rng = random.Random(f"{self.seed} {seq.request_id} {seq.index} {len(seq.tokens)}")
        spine = [
            self._wrong(rng, token) if rng.random() < self.mistake_rate else token for token in truth[: grant.depth]
        ]
        tree = chain(seq.tokens[-1], spine, "oracle")
        tokens, parents, scores = list(tree.tokens), list(tree.parents), list(tree.scores)
        for node in range(1, len(tree)):
            if rng.random() < self.branch_rate:
                sibling = len(tokens)
                tokens += [self._wrong(rng, tree.tokens[node]), rng.randrange(self.vocab_size)]
                parents += [tree.parents[node], sibling]
                scores += [scores[node] / 2, scores[node] / 4]
        count = len(tokens) - 1
        grown = DraftTree(tuple(tokens), tuple(parents), tuple(scores), ("", *["oracle"] * count))
        return grown.within(min(grant.drafts, MAX_DRAFTS), grant.depth)

    def _wrong(self, rng: random.Random, token: int) -> int:
        return (token + rng.randrange(1, self.vocab_size)) % self.vocab_size
