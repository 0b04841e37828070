"""Who runs in a step, and how far. Integers only: no tensors, no clock, no drafter.

Running sequences come first, oldest first; then waiting ones in order of arrival; then drafts share what is left.
Known tokens may evict cached prefixes and preempt younger sequences; drafts take free blocks only.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator

from specdec.blocks import BlockPool
from specdec.config import EngineConfig
from specdec.errors import NumericalError
from specdec.sequence import Grant, Sequence, Span


class Scheduler:
    """Holds the queue of waiting sequences, the running ones, and the pool they share."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size, caching=config.prefix_caching)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []  # by the last call of schedule

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. The caller has checked that its prompt fits `max_model_len`."""
        self.waiting.append(seq)

    def schedule(self) -> list[Grant]:
        """Grants of this step, at most `max_rows` known rows in all, drafts not counted: `trim` sees to those."""
        self.preempted = []
        grants: list[Grant] = []
        budget = self.config.max_rows
        for seq in list(self.running):
            known = min(seq.num_pending, budget)
            if known == 0 or seq not in self.running or not self._reserve(seq, known):
                continue
            grants.append(Grant(seq, known))
            budget -= known
        if not self.preempted:
            grants.extend(self._admit(budget))
        return [self._with_drafts(grant) for grant in grants]

    def settle(self, spans: Iterable[Span]) -> None:
        """After commit: publish the full blocks, give back those past `num_computed`, release the finished."""
        for span in spans:
            seq = span.seq
            if isinstance(seq.error, NumericalError):  # the keys may be what failed, those of earlier steps too
                self.pool.withdraw(seq.blocks)
            elif seq.finish_reason != "error":
                self._publish(seq)
            if seq.finished:
                self.release(seq)
            else:
                self._trim_table(seq, -(-seq.num_computed // self.config.block_size))

    def release(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is, and give back its blocks."""
        if seq in self.running:
            self.running.remove(seq)
        if seq in self.waiting:
            self.waiting.remove(seq)
        self._trim_table(seq, 0)

    def tables(self) -> Iterator[list[int]]:
        """The block tables of all sequences, for `BlockPool.check`."""
        for seq in (*self.running, *self.waiting):
            yield seq.blocks

    # Known tokens

    def _reserve(self, seq: Sequence, known: int) -> bool:
        """Blocks for `known` more tokens, preempting the youngest while there are too few. False if that was `seq`."""
        while not self._grow(seq, seq.num_computed + known):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _grow(self, seq: Sequence, num_slots: int) -> bool:
        missing = -(-num_slots // self.config.block_size) - len(seq.blocks)
        if missing > 0:
            blocks = self.pool.take(missing)
            if blocks is None:
                return False
            seq.blocks.extend(blocks)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._trim_table(seq, 0)
        seq.num_computed = 0
        seq.num_preemptions += 1
        self.waiting.appendleft(seq)
        self.preempted.append(seq)

    def _trim_table(self, seq: Sequence, count: int) -> None:
        self.pool.release(seq.blocks[count:])
        del seq.blocks[count:]
        seq.num_published = min(seq.num_published, count)

    # Admission

    def _admit(self, budget: int) -> list[Grant]:
        grants: list[Grant] = []
        held_back: list[Sequence] = []
        unpublished = self._unpublished() if self.waiting else set()
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting.popleft()
            names = self._prompt_names(seq)
            hits = self.pool.match(names)
            if len(hits) < len(names) and names[len(hits)] in unpublished:
                held_back.append(seq)  # somebody computes this very block now: wait for it, do not compute it twice
                continue
            self.pool.acquire(hits)
            seq.blocks = list(hits)
            seq.num_published = len(hits)
            seq.num_computed = len(hits) * self.config.block_size
            known = min(seq.num_pending, budget)
            if not self._grow(seq, seq.num_computed + known):
                self._trim_table(seq, 0)
                seq.num_computed = 0
                self.waiting.appendleft(seq)
                break
            if seq.num_preemptions == 0:
                seq.num_cached = seq.num_computed
            insort(self.running, seq, key=lambda other: other.arrival)
            unpublished.update(names[len(hits) :])
            grants.append(Grant(seq, known))
            budget -= known
        self.waiting.extendleft(reversed(held_back))
        return grants

    def _prompt_names(self, seq: Sequence) -> list[bytes]:
        """Hashes of the blocks that a prefix hit may cover: never the one with the last known token."""
        if not self.config.prefix_caching:
            return []
        return seq.block_names((len(seq.tokens) - 1) // self.config.block_size, self.config.block_size)

    def _unpublished(self) -> set[bytes]:
        """Hashes of the known full blocks that running sequences are on their way to publish."""
        if not self.config.prefix_caching:
            return set()
        size = self.config.block_size
        return {
            name for seq in self.running for name in seq.block_names(len(seq.tokens) // size, size)[seq.num_published :]
        }

    def _publish(self, seq: Sequence) -> None:
        full = seq.num_computed // self.config.block_size
        if self.config.prefix_caching and full > seq.num_published:
            names = seq.block_names(full, self.config.block_size)
            for index in range(seq.num_published, full):
                self.pool.publish(seq.blocks[index], names[index])
            seq.num_published = full

    # Drafts

    def _with_drafts(self, grant: Grant) -> Grant:
        """The grant with the nodes it may verify, whose slots are reserved from free blocks."""
        seq = grant.seq
        if not grant.at_frontier:
            return grant
        length = len(seq.tokens)
        # A walk of depth d emits d + 1 tokens: no deeper than what may still be emitted.
        depth = min(self.config.max_model_len - length, seq.max_tokens - seq.num_output) - 1
        wanted = min(self.config.max_drafts, seq.request.sampling.guesses.limit) if depth > 0 else 0
        if wanted <= 0:
            return grant
        missing = -(-(length + wanted) // self.config.block_size) - len(seq.blocks)
        if missing > 0:
            seq.blocks.extend(self.pool.take_free(missing))
        slots = len(seq.blocks) * self.config.block_size - length
        return Grant(seq, grant.known, min(wanted, slots), depth, slots + 1)
