"""Voices that guess several tokens ahead in one go: Medusa's heads, and P-EAGLE's rows of a mask token. What they say
of a depth does not depend on the guesses before it; only the noise, the penalties and the grammar of a path do.

R rows, L logits rows, D width of the features, V vocabulary of the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.batch import Rows
from specdec.drafters.grow import Growing
from specdec.drafters.heads.medusa import Medusa
from specdec.drafters.heads.peagle import PEagle
from specdec.drafters.memory import Memory, News

if TYPE_CHECKING:
    from specdec.sequence import Grant, Sequence


class MedusaVoice:
    """Satisfies `Voice`. Head i, from 0, guesses the token i + 1 places behind the last known one, from the target's
    hidden state of the token before that. There is nothing to keep but this state."""

    def __init__(self, heads: Medusa) -> None:
        self.name, self.taps, self.targets, self.levels = heads.name, heads.taps, heads.targets, heads.num_heads
        self.follow = None
        self._heads = heads
        self._last: dict[Sequence, tuple[int, Tensor]] = {}  # how much is computed, and the feature [D] of its end
        self._said: dict[tuple[Sequence, int], Tensor] = {}

    @property
    def num_kept(self) -> int:
        """See `Voice`."""
        return len(self._last)

    def features(self, taps: Seq[Tensor]) -> Tensor:
        """See `Voice`: the hidden states themselves."""
        (hidden_RD,) = taps
        return hidden_RD

    def observe(self, news: Seq[News]) -> None:
        """See `Voice`."""
        for item in news:
            if item.features is not None and len(item.features):
                self._last[item.seq] = (item.end, item.features[-1].clone())

    def begin(self, grants: Seq[Grant]) -> list[bool]:
        """See `Voice`."""
        return [
            (last := self._last.get(grant.seq)) is not None and last[0] == len(grant.seq.tokens) - 1 for grant in grants
        ]

    def expand(self, front: Seq[tuple[Growing, int]]) -> Tensor:
        """See `Voice`."""
        return self.ahead([(one.seq, len(one.paths[node])) for one, node in front])

    def ahead(self, places: Seq[tuple[Sequence, int]]) -> Tensor:
        """See `Voice`."""
        for depth in sorted({depth for _, depth in places}):
            seqs = [seq for seq, other in dict.fromkeys(places) if other == depth and (seq, depth) not in self._said]
            if seqs:
                features_LD = torch.stack([self._last[seq][1] for seq in seqs])
                for seq, logits_V in zip(seqs, self._heads.logits(features_LD, depth), strict=True):
                    self._said[seq, depth] = logits_V
        return torch.stack([self._said[place] for place in places])

    def end(self) -> None:
        """See `Voice`."""
        self._said = {}

    def forget(self, seq: Sequence) -> None:
        """See `Voice`."""
        self._last.pop(seq, None)


class MaskedVoice:
    """Satisfies `Voice`: P-EAGLE. Behind the row of the last known token come rows of the mask token, each of which
    sees those before it."""

    def __init__(self, head: PEagle, memory: Memory) -> None:
        self.name, self.taps, self.targets, self.levels = head.name, head.taps, head.targets, head.ahead
        self.follow = None
        self._head = head
        self._memory = memory
        self._mask_1D = head.mask_features()
        self._said: dict[Sequence, Tensor] = {}

    @property
    def num_kept(self) -> int:
        """See `Voice`."""
        return self._memory.num_kept + len(self._said)

    def features(self, taps: Seq[Tensor]) -> Tensor:
        """See `Voice`."""
        return self._head.features(taps)

    def observe(self, news: Seq[News]) -> None:
        """See `Voice`."""
        self._memory.observe(news)

    def begin(self, grants: Seq[Grant]) -> list[bool]:
        """See `Voice`."""
        hidden = self._memory.catch_up([grant.seq for grant in grants])
        parts, hidden_LD, counts = [], [], []
        for grant, hidden_D in zip(grants, hidden, strict=True):
            if hidden_D is None:
                continue
            seq, root = grant.seq, len(grant.seq.tokens) - 1
            count = min(self._head.ahead, grant.slots) - 1
            hidden_LD.append(hidden_D[None])
            counts.append((seq, count))
            if count > 0:
                places = range(root + 1, root + 1 + count)
                masks = [self._head.mask_token] * count
                # Row i of them, at slot root + i, sees the root's slot and those of rows 1 to i.
                seen = [(1 << (i + 1)) - 1 for i in range(1, count + 1)]
                parts.append(Rows(seq.blocks, masks, places, places, [root] * count, seen))
        if not counts:
            return [False] * len(grants)
        masked_RD = None
        if parts:
            masked_RD = self._memory.run(parts, self._mask_1D.expand(sum(len(part.tokens) for part in parts), -1))
        row = 0
        for (seq, count), root_1D in zip(counts, hidden_LD, strict=True):
            count = max(0, count)
            own = [root_1D] if masked_RD is None else [root_1D, masked_RD[row : row + count]]
            row += count
            self._said[seq] = self._head.logits(torch.cat(own))
        return [hidden_D is not None for hidden_D in hidden]

    def expand(self, front: Seq[tuple[Growing, int]]) -> Tensor:
        """See `Voice`."""
        return self.ahead([(one.seq, len(one.paths[node])) for one, node in front])

    def ahead(self, places: Seq[tuple[Sequence, int]]) -> Tensor:
        """See `Voice`."""
        return torch.stack([self._said[seq][depth] for seq, depth in places])

    def end(self) -> None:
        """See `Voice`."""
        self._said = {}

    def forget(self, seq: Sequence) -> None:
        """See `Voice`."""
        self._memory.forget(seq)
