"""What the engine counts while it runs: plain numbers, written by the engine thread alone and read by anybody.

Knows no exporter and no clock; the server turns these into Prometheus's format, and measures time itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass(slots=True)
class Acceptance:
    """How far drafts were right, over some draws: of one sequence, or of all."""

    draws: int = 0  # target forwards that drew at least one token for a sequence
    drafts: int = 0  # draws with at least one drafted node
    draft_tokens: int = 0  # nodes verified
    accepted_tokens: int = 0  # drafted nodes that were emitted
    accepted_per_depth: list[int] = field(default_factory=list)  # [d]: draws that emitted a draft of depth d + 1

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Count one draw: `num_drafts` nodes verified, of which a path of `num_accepted` was emitted."""
        self.draws += 1
        self.drafts += num_drafts > 0
        self.draft_tokens += num_drafts
        self.accepted_tokens += num_accepted
        self.accepted_per_depth.extend([0] * (num_accepted - len(self.accepted_per_depth)))
        for depth in range(num_accepted):
            self.accepted_per_depth[depth] += 1

    @staticmethod
    def total(parts: Iterable[Acceptance]) -> Acceptance:
        """The sum of some counts."""
        parts = list(parts)
        return Acceptance(
            sum(part.draws for part in parts),
            sum(part.drafts for part in parts),
            sum(part.draft_tokens for part in parts),
            sum(part.accepted_tokens for part in parts),
            [sum(column) for column in zip_longest(*(part.accepted_per_depth for part in parts), fillvalue=0)],
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
