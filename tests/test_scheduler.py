"""The scheduler, simulated without tensors: sequences grow, finish, are aborted and preempted; the law holds each step.

Slots remember the text that was computed into them, so a wrong prefix hit or a lost block shows at once.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence as Seq

import pytest

from specdec.config import EngineConfig
from specdec.errors import ConfigError
from specdec.free import FREE_TEXT
from specdec.request import Request, Sampling, Speculative
from specdec.scheduler import Scheduler
from specdec.sequence import Grant, Sequence, Span
from specdec.text import Detokenizer
from specdec.tree import EMPTY, MAX_DRAFTS

JUNK = -1


def config(num_slots: int = 0, **fields: int | bool) -> EngineConfig:
    """A small engine; a pool of the least size unless told."""
    fields = {"max_model_len": 40, "block_size": 4, "max_num_seqs": 8, "max_rows": 16, "max_drafts": 6, **fields}
    least = int(fields["max_model_len"]) + MAX_DRAFTS + 2
    return EngineConfig(num_slots=max(num_slots, least), **fields)  # type: ignore[arg-type]


class Simulation:
    """A scheduler, and a model's stand-in that writes into every slot the text up to it."""

    def __init__(self, settings: EngineConfig) -> None:
        self.config = settings
        self.scheduler = Scheduler(settings)
        self.slots: dict[int, int] = {}
        self.texts: dict[Sequence, list[int]] = {}
        self.known_rows = 0
        self.arrivals = 0

    def add(
        self, prompt: Seq[int], max_tokens: int = 1, *, salt: str = "", speculative: bool | Speculative = True
    ) -> Sequence:
        self.arrivals += 1
        request = Request(tuple(prompt), Sampling(speculative=speculative), cache_salt=salt)
        room = self.config.max_model_len - len(prompt)
        text = Detokenizer(lambda token: b"")
        seq = Sequence(
            str(self.arrivals), 0, request, 0, list(prompt), FREE_TEXT, text, min(room, max_tokens), frozenset()
        )
        seq.arrival = self.arrivals
        self.scheduler.add(seq)
        return seq

    def content(self, seq: Sequence, index: int) -> int:
        """What the slot of a token holds once it is computed: a hash of the text up to it."""
        hashes = self.texts.setdefault(seq, [])
        while len(hashes) <= index:
            hashes.append(hash((hashes[-1] if hashes else 0, seq.tokens[len(hashes)])))
        return hashes[index]

    def slot(self, seq: Sequence, index: int) -> int:
        block, offset = divmod(index, self.config.block_size)
        return seq.blocks[block] * self.config.block_size + offset

    def step(self, rng: random.Random | None = None) -> list[Grant]:
        """Schedule, compute, commit 1 to 1 + depth tokens at the frontier, settle; checks what always holds."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        grants = scheduler.schedule()
        pool.check(scheduler.tables())
        assert grants, "somebody always progresses"
        assert not running or grants[0].seq is running[0], "the oldest that runs always progresses"
        self._check_grants(grants)
        # The preempted stand first in the queue, oldest first; the rest keep their order.
        preempted = sorted(scheduler.preempted, key=lambda seq: seq.arrival)
        queue = list(scheduler.waiting)
        assert queue[: len(preempted)] == preempted
        assert [seq for seq in waiting if seq in queue] == queue[len(preempted) :]
        for seq in preempted:
            assert (seq.blocks, seq.num_computed, seq.num_published) == ([], 0, 0)
        assert [seq.arrival for seq in scheduler.running] == sorted(seq.arrival for seq in scheduler.running)
        assert len(scheduler.running) <= self.config.max_num_seqs

        for grant in grants:
            self._compute(grant, rng)
        scheduler.settle([Span(grant.seq, grant.known, EMPTY, 0, 0, 0) for grant in grants])
        pool.check(scheduler.tables())
        for seq in scheduler.running:
            assert len(seq.blocks) == -(-seq.num_computed // self.config.block_size), "nothing held past num_computed"
        assert all(not seq.blocks for seq in scheduler.waiting)
        assert not any(seq.finished for seq in (*scheduler.running, *scheduler.waiting))
        return grants

    def _check_grants(self, grants: list[Grant]) -> None:
        size = self.config.block_size
        assert len({id(grant.seq) for grant in grants}) == len(grants)
        assert sum(grant.known for grant in grants) <= self.config.max_rows
        for grant in grants:
            seq = grant.seq
            assert seq in self.scheduler.running
            assert 1 <= grant.known <= seq.num_pending
            assert grant.at_frontier or grant.drafts == grant.depth == 0
            assert 0 <= grant.drafts <= self.config.max_drafts
            if grant.drafts:
                assert grant.drafts <= seq.request.sampling.guesses.limit
                assert grant.depth >= 1
                assert len(seq.tokens) + grant.depth + 1 <= self.config.max_model_len
                assert seq.num_output + grant.depth + 1 <= seq.max_tokens
            needed = seq.num_computed + grant.known + grant.drafts
            assert len(seq.blocks) * size >= needed
            assert seq.num_published * size <= seq.num_computed < len(seq.tokens), "the last known token is computed"
            for index in range(seq.num_computed):
                assert self.slots[self.slot(seq, index)] == self.content(seq, index), "a hit holds another text"

    def _compute(self, grant: Grant, rng: random.Random | None) -> None:
        seq, at_frontier = grant.seq, grant.at_frontier
        self.known_rows += grant.known
        end = seq.num_computed + grant.known
        for index in range(seq.num_computed, end):
            self.slots[self.slot(seq, index)] = self.content(seq, index)
        for index in range(end, end + grant.drafts):
            self.slots[self.slot(seq, index)] = JUNK
        if not at_frontier:
            seq.num_computed = end
            return
        accepted = rng.randint(0, min(grant.drafts, grant.depth)) if rng else 0
        seq.tokens += [rng.randrange(2) if rng else 0 for _ in range(accepted + 1)]
        seq.num_computed = len(seq.tokens) - 1
        for index in range(end, seq.num_computed):
            self.slots[self.slot(seq, index)] = self.content(seq, index)
        assert seq.num_output <= seq.max_tokens
        if seq.num_output == seq.max_tokens or (rng and rng.random() < 0.02):
            seq.finish_reason = "length"

    def run(self, rng: random.Random | None = None, *, limit: int = 5000) -> int:
        """Steps until nothing is left; more than `limit` would be a livelock."""
        steps = 0
        while self.scheduler.has_work:
            self.step(rng)
            steps += 1
            assert steps < limit
        assert self.scheduler.pool.num_available == self.scheduler.pool.num_blocks - 1
        return steps


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_random_lives_keep_every_invariant(block_size: int, caching: bool) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    preemptions = hits = 0
    for heavy in (True, False, False, False):
        max_model_len = 70 if heavy else rng.choice([12, 40, 70])
        simulation = Simulation(
            config(
                max_model_len + MAX_DRAFTS + 2 + rng.choice([0, 0, 30]) * (not heavy),
                max_model_len=max_model_len,
                block_size=block_size,
                max_num_seqs=16 if heavy else rng.choice([1, 3, 16]),
                max_rows=64 if heavy else rng.choice([1, 2, 7, 64]),
                max_drafts=rng.choice([0, 1, 5, MAX_DRAFTS]),
                prefix_caching=caching,
            )
        )
        stems = [[rng.randrange(2) for _ in range(max_model_len - 1)] for _ in range(2)]
        lives: list[Sequence] = []
        for _ in range(60):
            for _ in range(rng.choice([0, 0, 1, 3])):
                prompt = rng.choice(stems)[: rng.randint(1, max_model_len - 1)]
                lives.append(
                    simulation.add(
                        prompt, rng.randint(1, 60), salt=rng.choice(["", "", "a"]), speculative=rng.random() < 0.8
                    )
                )
            if lives and rng.random() < 0.1:
                victim = rng.choice(lives)
                if not victim.finished:
                    victim.finish_reason = "abort"
                    simulation.scheduler.release(victim)
                    assert victim.blocks == []
                    simulation.scheduler.pool.check(simulation.scheduler.tables())
            if simulation.scheduler.has_work:
                simulation.step(rng)
        simulation.run(rng)
        assert all(seq.finished for seq in lives)
        preemptions += sum(seq.num_preemptions for seq in lives)
        hits += sum(seq.num_cached for seq in lives)
    assert preemptions > 0, "the pools are small enough to matter"
    assert (hits > 0) == caching


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 17, 39])
@pytest.mark.parametrize("max_rows", [3, 16, 200])
def test_equal_prompts_are_computed_once(length: int, max_rows: int) -> None:
    simulation = Simulation(config(600, max_rows=max_rows))
    lives = [simulation.add(range(length)) for _ in range(6)]
    simulation.run()
    shared = (length - 1) // 4 * 4
    assert simulation.known_rows == length + 5 * (length - shared)
    assert [seq.num_cached for seq in lives] == [0, *[shared] * 5]


def test_a_common_stem_is_computed_once_and_other_prompts_do_not_wait() -> None:
    simulation = Simulation(config(600, max_rows=16))
    first = simulation.add([*range(8), 100, 101, 102, 103, 104])
    second = simulation.add([*range(8), 200, 201, 202, 203, 204])
    other = simulation.add([9, 9, 9])
    grants = simulation.step()
    assert [grant.seq for grant in grants] == [first, other]
    assert [grant.seq for grant in simulation.step()] == [second]
    assert (first.num_cached, second.num_cached) == (0, 8)
    assert simulation.known_rows == 13 + 3 + 5


def test_salts_share_nothing() -> None:
    simulation = Simulation(config(600, max_rows=100))
    lives = [simulation.add(range(20), salt=salt) for salt in "ab"]
    simulation.run()
    assert [seq.num_cached for seq in lives] == [0, 0]
    assert simulation.known_rows == 40


@pytest.mark.parametrize("length", [4, 5, 8, 9])
def test_a_hit_never_covers_the_last_known_token(length: int) -> None:
    simulation = Simulation(config())
    simulation.add(range(length), 5)
    simulation.run()
    again = simulation.add(range(length))
    (grant,) = simulation.step()
    assert grant.known == length - again.num_cached
    assert again.num_cached == (length - 1) // 4 * 4


def test_drafts_take_free_blocks_only() -> None:
    """A pool that is full of cached prefixes grants drafts only in what the known tokens leave of their own block."""
    simulation = Simulation(config(max_drafts=20))
    pool = simulation.scheduler.pool
    for token in range(3):
        simulation.add([token] * 39)
    simulation.run()
    filler = pool.take_free(pool.num_free)
    pool.check([filler])
    cached = pool.num_available
    assert cached > 9
    seq = simulation.add([99] * 6, 30)
    for _ in range(6):
        held, available, length = len(seq.blocks), pool.num_available, len(seq.tokens)
        (grant,) = simulation.scheduler.schedule()
        assert grant.seq is seq
        assert grant.drafts == -length % 4, "the rest of the last block, and not one block more"
        assert len(seq.blocks) == -(-length // 4)
        assert pool.num_available == available - (len(seq.blocks) - held)
        simulation._compute(grant, None)
        simulation.scheduler.settle([Span(seq, grant.known, EMPTY, 0, 0, 0)])


def test_drafts_never_preempt() -> None:
    simulation = Simulation(config(max_model_len=40, max_drafts=MAX_DRAFTS, max_rows=200))
    lives = [simulation.add([token] * 20, 2) for token in range(5)]
    grants = simulation.step()
    assert [grant.seq for grant in grants] == lives
    assert sum(grant.drafts for grant in grants) > 0
    assert simulation.scheduler.preempted == []


@pytest.mark.parametrize(
    ("length", "max_tokens", "depth"),
    [(10, 100, 29), (36, 100, 3), (38, 100, 1), (39, 100, 0), (10, 4, 3), (10, 2, 1), (10, 1, 0), (37, 2, 1)],
)
def test_drafts_end_with_the_context_and_with_max_tokens(length: int, max_tokens: int, depth: int) -> None:
    """A walk of depth d emits d + 1 tokens."""
    simulation = Simulation(config(max_model_len=40, max_rows=100, max_drafts=5))
    simulation.add(range(length), max_tokens)
    (grant,) = simulation.step()
    assert grant.drafts == (5 if depth else 0)
    assert grant.depth == (depth if depth else 0)


def test_speculation_can_be_off_for_one_sequence() -> None:
    simulation = Simulation(config(max_rows=100))
    simulation.add(range(10), 20, speculative=False)
    simulation.add(range(50, 60), 20)
    assert [(grant.drafts, grant.depth) for grant in simulation.step()] == [(0, 0), (6, 19)]


@pytest.mark.parametrize(("max_nodes", "drafts"), [(None, 6), (62, 6), (6, 6), (5, 5), (1, 1), (0, 0)])
def test_a_request_may_lower_how_many_guesses_it_gets_and_not_raise_it(max_nodes: int | None, drafts: int) -> None:
    simulation = Simulation(config(max_rows=100))
    simulation.add(range(10), 20, speculative=Speculative("ngram", max_nodes))
    (grant,) = simulation.step()
    assert (grant.drafts, grant.depth) == (drafts, 19 if drafts else 0)


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    simulation = Simulation(config(max_model_len=80, block_size=4, max_rows=200, max_drafts=0, prefix_caching=False))
    old, young = simulation.add([1] * 60, 20), simulation.add([2] * 60, 20)
    simulation.step()
    late = simulation.add([3] * 40, 5)
    while not simulation.scheduler.preempted:
        simulation.step()
    assert simulation.scheduler.preempted == [young]
    assert simulation.scheduler.running == [old]
    assert list(simulation.scheduler.waiting) == [young, late]
    output = list(young.tokens)
    simulation.run()
    assert young.num_preemptions >= 1
    assert young.tokens[: len(output)] == output


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """What a preempted prompt finds again is its own work, not a hit."""
    simulation = Simulation(config(max_model_len=80, block_size=4, max_rows=16, max_drafts=0))
    old, young = simulation.add([1] * 60, 20), simulation.add([2] * 79, 1)
    simulation.run()
    assert young.num_preemptions >= 1
    assert young.num_cached == 0
    assert old.num_cached == 0


def test_an_aborted_sequence_leaves_nothing_wherever_it_is() -> None:
    simulation = Simulation(config(max_num_seqs=1, max_rows=4))
    running, waiting = simulation.add(range(20)), simulation.add(range(20))
    simulation.step()
    for seq in (running, waiting):
        seq.finish_reason = "abort"
        simulation.scheduler.release(seq)
    assert not simulation.scheduler.has_work
    assert simulation.scheduler.pool.usage == 0.0
    simulation.scheduler.release(running)
    simulation.scheduler.pool.check([])


def test_the_leader_of_equal_prompts_may_be_aborted() -> None:
    simulation = Simulation(config(600, max_rows=8))
    leader, *rest = [simulation.add(range(30), 2) for _ in range(3)]
    simulation.step()
    leader.finish_reason = "abort"
    simulation.scheduler.release(leader)
    simulation.run()
    assert all(seq.finish_reason == "length" for seq in rest)
    assert simulation.known_rows == 8 + 30 - 8 + 1 + 2 + 1


@pytest.mark.parametrize("block_size", [1, 16, 100])
def test_one_sequence_of_full_length_always_fits_beside_its_drafts(block_size: int) -> None:
    simulation = Simulation(config(max_model_len=40, block_size=block_size, max_drafts=MAX_DRAFTS))
    seq = simulation.add(range(20), 100)
    while simulation.scheduler.has_work:
        (grant,) = simulation.step()
        assert not grant.at_frontier or grant.drafts == (MAX_DRAFTS if grant.depth > 0 else 0)
    assert len(seq.tokens) == 40


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_slots": 103}, "num_slots (kv_cache_tokens) must be at least max_model_len + 64 = 104, got 103"),
        ({"max_model_len": 1}, "max_model_len must be at least 2, got 1"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_rows": -1}, "max_rows must be at least 1"),
        ({"max_waiting": 0}, "max_waiting must be at least 1"),
        ({"max_drafts": 63}, "max_drafts must be between 0 and 62, got 63"),
        ({"max_drafts": -1}, "max_drafts must be between 0 and 62, got -1"),
    ],
)
def test_a_bad_option_is_named(fields: dict[str, int], words: str) -> None:
    EngineConfig(max_model_len=40, num_slots=104)
    with pytest.raises(ConfigError, match=re.escape(words)):
        EngineConfig(**{"max_model_len": 40, "num_slots": 104, **fields})  # type: ignore[arg-type]
