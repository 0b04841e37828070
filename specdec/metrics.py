"""What the engine counts while it runs: plain numbers, written by the engine thread alone and read by anybody.

Knows no exporter and no clock; the server turns these into Prometheus's format, and measures time itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass(slots=True)
class SourceCount:
    """Drafted tokens of one drafter: `draft_tokens` nodes verified, `accepted_tokens` of them emitted."""

    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class Acceptance:
    """How far drafts were right, over some draws: of one sequence, or of all."""

    draws: int = 0  # target forwards that drew at least one token for a sequence
    drafts: int = 0  # draws with at least one drafted node
    draft_tokens: int = 0  # nodes verified
    accepted_tokens: int = 0  # drafted nodes that were emitted
    accepted_per_depth: list[int] = field(default_factory=list)  # [d]: draws that emitted a draft of depth d + 1
    by_source: dict[str, SourceCount] = field(default_factory=dict)  # the same nodes, by the drafter that guessed them

    def count(self, drafted: Seq[str], accepted: Seq[str]) -> None:
        """Count one draw: the sources of the nodes that were verified, and of those on the path that was emitted."""
        self.draws += 1
        self.drafts += len(drafted) > 0
        self.draft_tokens += len(drafted)
        self.accepted_tokens += len(accepted)
        self.accepted_per_depth.extend([0] * (len(accepted) - len(self.accepted_per_depth)))
        for depth in range(len(accepted)):
            self.accepted_per_depth[depth] += 1
        for source in drafted:
            self._source(source).draft_tokens += 1
        for source in accepted:
            self._source(source).accepted_tokens += 1

    def _source(self, name: str) -> SourceCount:
        return self.by_source.setdefault(name, SourceCount())

    @staticmethod
    def total(parts: Iterable[Acceptance]) -> Acceptance:
        """The sum of some counts."""
        parts = list(parts)
        by_source: dict[str, SourceCount] = {}
        for part in parts:
            for name, count in dict(part.by_source).items():
                total = by_source.setdefault(name, SourceCount())
                total.draft_tokens += count.draft_tokens
                total.accepted_tokens += count.accepted_tokens
        return Acceptance(
            sum(part.draws for part in parts),
            sum(part.drafts for part in parts),
            sum(part.draft_tokens for part in parts),
            sum(part.accepted_tokens for part in parts),
            [sum(column) for column in zip_longest(*(part.accepted_per_depth for part in parts), fillvalue=0)],
            by_source,
        )


@dataclass(slots=True)
class Metrics:
    """Counters only grow; gauges say how it stands after the last step.

    A reader in another thread may see a step half counted, never a torn number.
    """

    # counters
    steps: int = 0  # engine steps with at least one row
    finished: dict[str, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )  # sequences by finish reason
    prompt_tokens: int = 0  # of sequences admitted for the first time
    cached_prompt_tokens: int = 0  # of these, found in the prefix cache
    generation_tokens: int = 0  # tokens emitted
    acceptance: Acceptance = field(default_factory=Acceptance)
    preemptions: int = 0
    drafter_errors: int = 0  # trees lost to a drafter that raised or returned nonsense
    constraint_errors: int = 0  # sequences ended by their grammar's backend
    dead_ends: int = 0  # sequences ended where the grammar allowed nothing
    numerical_errors: int = 0  # sequences ended by logits that are not numbers

    # gauges
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0

    def count_finish(self, reason: str) -> None:
        """Count one finished sequence."""
        self.finished[reason] += 1
