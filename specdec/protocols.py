"""The seams of the engine: what a drafter, a grammar, a model and a runner must offer. Nothing here does anything.

R rows of a batch, L logits rows, V vocabulary, D width, H query heads, G key-value heads, J = H + G, K head size.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from specdec.batch import Batch
    from specdec.kernels.norm_rope import Rotary
    from specdec.mask import TokenMask
    from specdec.sequence import Grant, Sequence, Span
    from specdec.tree import DraftTree


class Constraint(Protocol):
    """What the text of one sequence may become. Pure over trees: `advance` is the only mutation.

    The mask row is the law: `prune` keeps a child exactly if its bit is set in its parent's row, and a set bit means
    that `advance` takes the token. End tokens belong to the engine: their bits are set where the text may end, and
    `advance` is never given one. Any method raises `ConstraintError` when the backend fails on committed tokens.
    """

    def prune(self, tree: DraftTree) -> DraftTree:
        """The tree without the nodes that the grammar forbids (and all below them). The root always stays."""
        ...

    def mask(self, tree: DraftTree, first_row: int, mask: TokenMask) -> None:
        """Claim and fill one row a node: row `first_row + i` says what may follow node i. The root's own token is
        already advanced. Free text claims nothing. A row with no bit set is a dead end, fatal only if visited."""
        ...

    def row(self, path: tuple[int, ...]) -> NDArray[np.int32] | None:
        """What may follow if `path` came next: words as in a mask row, no bit set where `path` is forbidden. None for
        free text. For drafters and policies that want to know what is possible; do not change it."""
        ...

    def forced(self, path: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Tokens that the grammar leaves no choice about behind `path`, as the real tokenizer writes them; the last is
        held back where it may merge with what follows. A guess for drafters, never a commitment."""
        ...

    def advance(self, tokens: Seq[int]) -> None:
        """Move past tokens that were emitted (never end tokens)."""
        ...

    def finish(self) -> None:
        """An end token was emitted after all that was advanced. Raises `ConstraintError` where the whole text is not
        what was asked for."""
        ...


class Grammar(Protocol):
    """A compiled grammar: immutable, shared by requests and threads."""

    def start(self) -> Constraint:
        """A constraint at the beginning of the text."""
        ...


class Drafter(Protocol):
    """Guesses what comes next. Whatever it does changes speed, never text."""

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may call it by (`Speculative.method`); empty for one that never guesses."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose output it wants to `observe`; empty for drafters that look only at tokens."""
        ...

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        """One tree a grant, rooted at the sequence's last token, of at most `grant.drafts` nodes and `grant.depth`
        levels; `EMPTY` where the grant is not at the frontier. Mutates nothing that verification could see."""
        ...

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        """Learn from a verified step, after commit: `paths[i]` are the accepted nodes of span i."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Release what is kept for a sequence: it finished, was aborted, or was preempted."""
        ...


class Attend(Protocol):
    """What a model calls in each layer: rotate queries and keys, write keys and values, attend over the paged cache."""

    def __call__(
        self,
        layer: int,
        qk_RJK: Tensor,
        v_RGK: Tensor,
        rotary: Rotary | None,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`[R, H, K]`: each row attends to the slots it may see (docs/design.md, 2).

        `qk_RJK` are the queries and, behind them, the keys of each row, not rotated yet where there is a `rotary`."""
        ...


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps per token: `num_kv_heads` keys and values of `head_size`."""

    num_kv_heads: int
    head_size: int


class Model(Protocol):
    """A target (or a drafter): rows in, rows out. Knows no cache, no batch, no quantisation."""

    vocab_size: int

    @property
    def layers(self) -> Seq[LayerShape]:
        """One entry an attention layer."""
        ...

    def embed(self, tokens_R: Tensor) -> Tensor:
        """What enters the first layer: `[R, D]`."""
        ...

    def forward(
        self, tokens_R: Tensor, positions_R: Tensor, attend: Attend, taps: Seq[int] = (), depth: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states `[R, D]` after the final norm, and for each tap k `[R, D]`: the residual stream that enters
        layer k; for k = n, the number of layers, what leaves the last, before the final norm; for n + 1 the hidden
        states themselves. With a `depth` only so many layers run before the final norm."""
        ...

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """fp32 logits `[L, V]`."""
        ...


@dataclass(frozen=True, slots=True)
class Forward:
    """What a forward gives back: fp32 logits `[L, V]`, and one `[R, D]` tensor a tap."""

    logits_LV: Tensor
    taps: tuple[Tensor, ...] = ()


class Runner(Protocol):
    """Runs batches of rows on one device, with the KV cache in it. One call a step over the flat rows."""

    vocab_size: int

    def forward(self, batch: Batch, taps: Seq[int] = ()) -> Forward:
        """Write keys and values of all rows to their slots, and return logits of the rows that ask; and the `taps` of
        all rows (see `Model.forward`)."""
        ...

    def move(self, sources: Seq[int], targets: Seq[int]) -> None:
        """Copy KV slots; every source is read before any target is written."""
        ...
