"""Models that draft: small networks over the target's hidden states, as pure functions of rows.

They know neither cache, nor sequences, nor the engine: what a row sees is `attend`'s business, what its feature is the
caller's. R rows, L logits rows, D what a head keeps a position, V target vocabulary, W its draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.protocols import Attend, LayerShape


@dataclass(frozen=True, slots=True)
class Target:
    """What a head needs of the model it drafts for. `embed` maps token ids `[R]` to what enters the first layer;
    `head` maps hidden states `[L, hidden_size]`, after the final norm, to fp32 logits `[L, vocab_size]`."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]


@runtime_checkable
class Head(Protocol):
    """A drafter's model with layers of its own. The row in slot s holds token s and the feature of position s - 1, and
    predicts token s + 1."""

    name: str
    """What a request may call it by."""
    layers: Sequence[LayerShape]
    """Its attention layers, numbered from 0 for `attend`."""
    taps: tuple[int, ...]
    """What it reads of the target: k < n + 1 is the residual stream that enters layer k of n (k = n: after the last
    layer, before the final norm), n + 1 what the target's own head reads, after the final norm."""
    targets: Tensor | None
    """int64 `[W]`: the target's id of each draft id; None where they are the same ids."""

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """What is kept of a position, `[R, D]`, from the target's `taps` of R rows."""
        ...

    def forward(self, tokens_R: Tensor, features_RD: Tensor | None, positions_R: Tensor, attend: Attend) -> Tensor:
        """Hidden states `[R, D]`: what `logits` reads, and the features of the next level of drafts. No features is
        for models that look at tokens only."""
        ...

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """fp32 logits `[L, W]` over draft ids, from what `forward` returned."""
        ...
