"""One text that grows: the only mutable noun of the engine. Owned by it; knows no tensors and no scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec.blocks import block_hash, chain_start
from specdec.counts import TokenCounts
from specdec.errors import SpecdecError
from specdec.metrics import Acceptance
from specdec.prediction import Followed
from specdec.tree import DraftTree

if TYPE_CHECKING:
    from specdec.protocols import Constraint
    from specdec.request import Request
    from specdec.text import Detokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """The raw model's log-probability of a picked token, and of the likeliest tokens at the same place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. `num_computed` tokens of `tokens` are in the KV cache; the rest are pending.

    That number is the whole state of progress: prefill, chunks, decode and resuming after preemption are all
    `num_computed` catching up with `len(tokens)`. `constraint` and `text` are functions of the tokens, not of the KV.
    """

    request_id: str
    index: int
    request: Request
    seed: int
    tokens: list[int]
    constraint: Constraint
    text: Detokenizer
    max_tokens: int
    end_tokens: frozenset[int]  # the model's
    ending: frozenset[int] = field(init=False)  # those that end this text: none where free text ignores them
    arrival: int = 0
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens that the first admission found in the prefix cache
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0  # leading blocks whose hash is in the prefix cache
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks, from the first
    acceptance: Acceptance = field(default_factory=Acceptance)
    followed: Followed = field(init=False)  # how the output follows the request's prediction
    num_preemptions: int = 0
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: SpecdecError | None = None
    _counts: TokenCounts | None = field(default=None, init=False)
    _num_counted: int = field(default=0, init=False)  # leading tokens that are in `_counts`

    def __post_init__(self) -> None:
        self.followed = Followed(self.request.prediction)
        ignored = self.request.grammar is None and self.request.stopping.ignore_eos
        self.ending = frozenset() if ignored else self.end_tokens

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_pending(self) -> int:
        """Known tokens that are not in the KV cache."""
        return len(self.tokens) - self.num_computed

    @property
    def finished(self) -> bool:
        """Whether nothing will be added any more."""
        return self.finish_reason is not None

    def block_names(self, count: int, block_size: int) -> list[bytes]:
        """Hashes of the first `count` full blocks, extended as the sequence grows."""
        names = self.block_hashes
        while len(names) < count:
            start = len(names) * block_size
            parent = names[-1] if names else chain_start(self.request.cache_salt)
            names.append(block_hash(parent, self.tokens[start : start + block_size]))
        return names[:count]

    def counts(self) -> TokenCounts:
        """How often each token of the text was drawn. Costs time in the tokens that are new since the last call."""
        if self._counts is None:
            self._counts, self._num_counted = TokenCounts(self.request.prompt), self.num_prompt
        for token in self.tokens[self._num_counted :]:
            self._counts.draw(token)
        self._num_counted = len(self.tokens)
        return self._counts


@dataclass(frozen=True, slots=True)
class Grant:
    """What the scheduler lets one sequence do in a step: compute `known` pending tokens, and, where these reach the
    frontier, verify up to `drafts` nodes none deeper than `depth` (slots for them are reserved). A drafter that keeps
    keys and values of its own may write `slots` of them, the root's included. Drafters in `muted` are not asked."""

    seq: Sequence
    known: int
    drafts: int = 0
    depth: int = 0
    slots: int = 0
    muted: frozenset[str] = frozenset()

    @property
    def at_frontier(self) -> bool:
        """Whether the last token of the grant is the last that is known: the root of a tree."""
        return self.seq.num_computed + self.known == len(self.seq.tokens)


@dataclass(frozen=True, slots=True)
class Span:
    """A grant with its tree, placed in a batch: rows `first_row ..` hold the known tokens, then nodes 1, 2, ...;
    logits rows `first_logit ..` hold the nodes from the root on. `root_slot` is the index in the sequence, and the KV
    slot, of the last known token of the span: it stays what it was when the sequence has grown."""

    seq: Sequence
    known: int
    tree: DraftTree
    first_row: int
    first_logit: int
    root_slot: int

    @property
    def num_rows(self) -> int:
        """Rows of the batch: known tokens and drafts."""
        return self.known + self.tree.num_drafts


@dataclass(frozen=True, slots=True)
class Emission:
    """What one step added to one sequence. Token ids, text, logprobs and counters are cut together.

    `text` is the newly visible text (a stop string, or bytes that are not yet a character, are held back);
    `finish_reason` is None while the sequence goes on, else "stop", "length", "abort" or "error" (then `error` is set);
    `stop_reason` is the stop string or the stop token id that ended it, None for the model's own end tokens.
    """

    seq: Sequence
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Logprob, ...] = ()
    num_drafts: int = 0
    num_accepted: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: SpecdecError | None = None
