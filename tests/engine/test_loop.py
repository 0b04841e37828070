"""The loop on a model that hashes what each row sees: hostile drafters, ends inside accepted runs, aborts, errors.

Every expectation is a run without drafts, or a definition by brute force.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.batch import Batch
from specdec.config import EngineConfig
from specdec.drafters.none import NoDrafter
from specdec.drafters.prediction import PredictionDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.engine import Engine, splitmix64
from specdec.errors import (
    ConfigError,
    ConstraintError,
    ContextTooLong,
    DeadEnd,
    InvalidRequest,
    NumericalError,
    QueueFull,
)
from specdec.protocols import Drafter, Forward
from specdec.request import Request, Sampling, Stopping
from specdec.sequence import Emission, Grant, Logprob, Sequence, Span
from specdec.tree import EMPTY, MAX_DRAFTS, DraftTree, chain, root
from tests.drafters_for_tests import OracleDrafter, RandomDrafter
from tests.fakes import Automaton, HashRunner, hash_engine, letters, run, texts

VOCAB_SIZE = 24
PLAIN = EngineConfig(max_model_len=48, num_slots=600, max_drafts=20)
CONFIGS = {
    "plain": PLAIN,
    "one block a slot": replace(PLAIN, block_size=1),
    "full trees": replace(PLAIN, max_drafts=MAX_DRAFTS, block_size=8),
    "chunks": replace(PLAIN, max_rows=5, block_size=4),
    "one row": replace(PLAIN, max_rows=1),
    "small pool": replace(PLAIN, num_slots=48 + 64, block_size=4),
    "no cache": replace(PLAIN, num_slots=48 + 64, block_size=3, prefix_caching=False),
    "one at a time": replace(PLAIN, max_num_seqs=1),
}
Emissions = dict[tuple[str, int], list[Emission]]
Seen = tuple[tuple[int, ...], str, str | None, str | int | None, tuple[Logprob, ...]]


class Proposer:
    """A drafter made of a function. Keeps a state for each sequence that it observed, as a learning drafter does."""

    names: tuple[str, ...] = ("test",)
    taps: tuple[int, ...] = ()

    def __init__(self, propose: Callable[[Grant], Any]) -> None:
        self.propose = propose
        self.verified: dict[Sequence, list[DraftTree]] = {}
        self.states: set[Sequence] = set()

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        return [self.propose(grant) for grant in grants]

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        for span in spans:
            self.states.add(span.seq)
            self.verified.setdefault(span.seq, []).append(span.tree)

    def forget(self, seq: Sequence) -> None:
        self.states.discard(seq)


class Returns:
    """A drafter that hands over whatever it is given, instead of trees."""

    names: tuple[str, ...] = ("test",)
    taps: tuple[int, ...] = ()

    def __init__(self, answer: Callable[[Seq[Grant]], Any]) -> None:
        self.answer = answer

    def draft(self, grants: Seq[Grant]) -> Any:
        return self.answer(grants)

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass


def tree(grant: Grant, tokens: Iterable[Any], parents: Iterable[Any], scores: Iterable[Any] | None = None) -> DraftTree:
    """A tree under the grant's last token, unchecked."""
    tokens = tuple(tokens)
    count = len(tokens)
    return DraftTree(
        (grant.seq.tokens[-1], *tokens),
        (-1, *parents),
        (1.0, *(scores if scores is not None else (1.0,) * count)),
        ("", *("bad",) * count),
    )


def mixed_requests(count: int = 8) -> list[Request]:
    """Prompts with common stems, all kinds of sampling and of ends."""
    rng = random.Random(5)
    stem = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    requests = []
    for number in range(count):
        prompt = stem[: rng.randint(1, 20)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 8))]
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 5]),
            min_p=rng.choice([0.0, 0.05]),
            presence_penalty=rng.choice([0.0, 0.7]),
            frequency_penalty=rng.choice([0.0, 0.4]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            logit_bias={3: 1.5, 4: -2.0} if number % 3 == 0 else {},
            seed=rng.randrange(2**64),
            logprobs=rng.choice([None, 0, 3]),
            speculative=number % 5 != 4,
        )
        stopping = Stopping(
            max_tokens=rng.choice([None, None, 1, 7, 30]),
            min_tokens=rng.choice([0, 1, 5]) if number % 4 == 1 else 0,
            stop=rng.choice([(), (), ("ab", "qc"), ("mnop",)]),
            stop_token_ids=rng.choice([(), (), (9, 10)]),
            ignore_eos=rng.random() < 0.6,
            include_stop=rng.random() < 0.5,
        )
        if number in (3, 6, 7):  # these fill the context, and together more than a small pool
            stopping = Stopping(ignore_eos=True)
        if stopping.max_tokens is not None and stopping.min_tokens > stopping.max_tokens:
            stopping = replace(stopping, min_tokens=0)
        requests.append(Request(tuple(prompt), sampling, stopping, n=3 if number == 2 else 1))
    return requests


def seen_by_caller(emissions: Emissions) -> dict[tuple[str, int], Seen]:
    """Tokens, text, reasons, and the log-probabilities."""
    return {
        key: (
            shown.tokens,
            shown.text,
            shown.finish_reason,
            shown.stop_reason,
            tuple(logprob for part in emissions[key] for logprob in part.logprobs),
        )
        for key, shown in texts(emissions).items()
    }


def expected_of(requests: Seq[Request]) -> dict[tuple[str, int], Seen]:
    """What a caller sees without drafts, in the plainest config. Computed once."""
    key = repr(requests)
    if key not in _EXPECTED:
        _EXPECTED[key] = seen_by_caller(run(hash_engine(PLAIN, NoDrafter()), requests))
    return _EXPECTED[key]


_EXPECTED: dict[str, dict[tuple[str, int], Seen]] = {}


def answers(requests: Seq[Request]) -> dict[tuple[int, ...], Seq[int]]:
    """How each prompt goes on, for `OracleDrafter`."""
    told = expected_of(requests)
    return {request.prompt: told[f"r{number}", 0][0] for number, request in enumerate(requests)}


def assert_empty(engine: Engine) -> None:
    assert not engine.has_work
    assert engine.scheduler.pool.usage == 0
    engine.scheduler.pool.check([])
    assert engine._sequences == {}


# A drafter changes speed, never text


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("drafter", ["none", "random", "oracle", "wrong oracle"])
def test_any_drafter_gives_the_same_text_under_any_config(drafter: str, config: str) -> None:
    requests = mixed_requests()
    drafters: dict[str, Drafter] = {
        "none": NoDrafter(),
        "random": RandomDrafter(3, VOCAB_SIZE),
        "oracle": OracleDrafter(answers(requests), VOCAB_SIZE, branch_rate=0.5),
        "wrong oracle": OracleDrafter(answers(requests), VOCAB_SIZE, mistake_rate=0.3, branch_rate=0.3),
    }
    engine = hash_engine(CONFIGS[config], drafters[drafter])
    assert seen_by_caller(run(engine, requests)) == expected_of(requests)
    assert engine.metrics.drafter_errors == 0
    if drafter == "oracle" and config not in ("one row", "chunks"):
        assert engine.metrics.acceptance.accepted_tokens > 50
    if config in ("small pool", "no cache"):
        assert engine.metrics.preemptions > 0
    assert_empty(engine)


HOSTILE: dict[str, Callable[[Grant], Any]] = {
    "a token past the vocabulary": lambda grant: tree(grant, [VOCAB_SIZE], [0]),
    "a negative token": lambda grant: tree(grant, [-1], [0]),
    "a token that is a float": lambda grant: tree(grant, [1.5], [0]),
    "a token that is a boolean": lambda grant: tree(grant, [True], [0]),
    "a token that is a word": lambda grant: tree(grant, ["a"], [0]),
    "a tensor": lambda grant: tree(grant, [torch.tensor([1, 2])], [0]),
    "twins": lambda grant: tree(grant, [1, 1], [0, 0]),
    "twins of a node below": lambda grant: tree(grant, [1, 2, 3, 2], [0, 1, 1, 1]),
    "63 drafts": lambda grant: tree(grant, range(63), range(63)),
    "1000 drafts": lambda grant: tree(grant, [1] * 1000, range(1000)),
    "another root": lambda grant: chain((grant.seq.tokens[-1] + 1) % VOCAB_SIZE, [1, 2], "bad"),
    "no tree": lambda grant: EMPTY,
    "None": lambda grant: None,
    "a list": lambda grant: [1, 2, 3],
    "a parent that follows": lambda grant: tree(grant, [1, 2], [2, 0]),
    "a circle": lambda grant: tree(grant, [1], [1]),
    "a parent that is a float": lambda grant: tree(grant, [1, 2], [0, 1.0]),
    "two roots": lambda grant: tree(grant, [1, 2], [0, -1]),
    "a score that is not a number": lambda grant: tree(grant, [1], [0], [math.nan]),
    "a score that is a word": lambda grant: tree(grant, [1], [0], ["high"]),
    "a score above its parent's": lambda grant: tree(grant, [1, 2], [0, 1], [0.1, 0.2]),
    "scores below 0": lambda grant: tree(grant, [1, 2], [0, 1], [-math.inf, -math.inf]),
    "a score below that of a hopeless parent": lambda grant: tree(grant, [1, 2], [0, 1], [0.0, -1.0]),
    "a source that is a list": lambda grant: DraftTree((grant.seq.tokens[-1],), (-1,), (1.0,), ([],)),  # type: ignore[arg-type]
    "a source that is nothing": lambda grant: DraftTree((grant.seq.tokens[-1],), (-1,), (1.0,), (None,)),  # type: ignore[arg-type]
    "fewer scores": lambda grant: tree(grant, [1, 2], [0, 1], [0.1]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_malformed_tree_is_dropped_and_counted(kind: str) -> None:
    requests = mixed_requests(4)
    engine = hash_engine(PLAIN, Proposer(HOSTILE[kind]))
    assert seen_by_caller(run(engine, requests)) == expected_of(requests)
    assert engine.metrics.drafter_errors > 0
    assert engine.metrics.acceptance.draft_tokens == 0
    assert_empty(engine)


WELL_FORMED: dict[str, Callable[[Grant], Any]] = {
    "past the context's end": lambda grant: chain(grant.seq.tokens[-1], [grant.seq.tokens[-1]] * MAX_DRAFTS, "deep"),
    "a star": lambda grant: tree(grant, range(VOCAB_SIZE), [0] * VOCAB_SIZE),
    "a star on a stalk": lambda grant: tree(grant, [1, *range(VOCAB_SIZE)], [0, *[1] * VOCAB_SIZE]),
    "scores of 0": lambda grant: tree(grant, [1, 2, 3], [0, 1, 0], [0.0, 0.0, 5e-324]),
    "end tokens": lambda grant: tree(grant, [0, 0, 0], [0, 1, 2]),
    "more than was granted, at no frontier": lambda grant: tree(grant, [1, 2, 3], [0, 1, 2]),
}


@pytest.mark.parametrize("kind", WELL_FORMED)
@pytest.mark.parametrize("config", ["plain", "small pool", "chunks"])
def test_a_hostile_but_well_formed_tree_changes_nothing(kind: str, config: str) -> None:
    requests = mixed_requests(5)
    engine = hash_engine(CONFIGS[config], Proposer(WELL_FORMED[kind]))
    assert seen_by_caller(run(engine, requests)) == expected_of(requests)
    assert_empty(engine)


def test_a_star_over_the_vocabulary_accepts_at_every_step() -> None:
    """Every token is proposed, so every step emits the pick and the bonus, and out-of-order slots are compacted."""
    request = Request((1, 2, 3), Sampling(seed=1), Stopping(max_tokens=20, ignore_eos=True))
    engine = hash_engine(replace(PLAIN, max_drafts=VOCAB_SIZE), Proposer(WELL_FORMED["a star"]))
    emissions = run(engine, [request])
    assert texts(emissions) == texts(run(hash_engine(PLAIN, NoDrafter()), [request]))
    assert [len(part.tokens) for part in emissions["r0", 0]] == [2] * 10


def raises(message: str) -> Callable[[object], Any]:
    def fail(_: object) -> Any:
        raise RuntimeError(message)

    return fail


ANSWERS: dict[str, Callable[[Seq[Grant]], Any]] = {
    "raises": raises("no memory"),
    "too few": lambda grants: [],
    "too many": lambda grants: [root(grant.seq.tokens[-1]) for grant in (*grants, grants[0])],
    "None": lambda grants: None,
    "a number": lambda grants: 7,
    "no end of trees": lambda grants: itertools.cycle([root(grants[0].seq.tokens[-1])]),
    "a generator that raises": lambda grants: (raises("late")(grant) for grant in grants),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_drafter_that_fails_costs_its_drafts_only(kind: str) -> None:
    requests = mixed_requests(4)
    engine = hash_engine(PLAIN, Returns(ANSWERS[kind]))
    assert seen_by_caller(run(engine, requests)) == expected_of(requests)
    assert engine.metrics.drafter_errors > 0
    assert engine.metrics.acceptance.draft_tokens == 0
    assert_empty(engine)


@pytest.mark.parametrize("kind", [*HOSTILE, *ANSWERS])
@pytest.mark.parametrize("first", [False, True])
def test_a_hostile_drafter_among_others_costs_its_own_nodes_only(kind: str, first: bool) -> None:
    hostile = Proposer(HOSTILE[kind]) if kind in HOSTILE else Returns(ANSWERS[kind])
    suffix, prediction = SuffixDrafter(), PredictionDrafter()
    engine = hash_engine(
        CONFIGS["small pool"],
        *([hostile, suffix, prediction] if first else [suffix, prediction, hostile]),
    )
    requests = mixed_requests(5)
    guessed = [
        replace(request, prediction=request.prompt if request.sampling.speculative else ()) for request in requests
    ]
    assert seen_by_caller(run(engine, guessed)) == expected_of(requests)
    assert engine.metrics.drafter_errors > 0
    assert engine.metrics.acceptance.by_source.keys() == {"suffix", "prediction"}
    assert suffix.num_kept == prediction.num_kept == engine.policy.num_kept == 0
    assert_empty(engine)


def test_drafters_that_fail_to_learn_or_to_forget_keep_no_other_from_it() -> None:
    broken, sound = RandomDrafter(3, VOCAB_SIZE), Proposer(lambda grant: root(grant.seq.tokens[-1]))
    broken.observe = broken.forget = lambda *arguments: raises("broken")(None)  # type: ignore[assignment]
    engine = hash_engine(CONFIGS["small pool"], broken, sound)
    requests = mixed_requests(4)
    assert seen_by_caller(run(engine, requests)) == expected_of(requests)
    assert sound.verified
    assert sound.states == set()
    assert engine.metrics.drafter_errors >= engine.metrics.steps


@pytest.mark.parametrize("method", ["observe", "forget"])
def test_a_drafter_that_fails_to_learn_or_to_forget_harms_nobody(method: str) -> None:
    requests = mixed_requests(4)
    drafter = RandomDrafter(3, VOCAB_SIZE)
    setattr(drafter, method, lambda *arguments: raises("broken")(None))
    engine = hash_engine(CONFIGS["small pool"], drafter)
    assert seen_by_caller(run(engine, requests)) == expected_of(requests)
    assert engine.metrics.drafter_errors > 0
    engine.add(requests[0], "again")
    engine.step()
    engine.abort("again")
    assert_empty(engine)


def test_a_drafter_forgets_what_it_observed() -> None:
    """Whatever way a sequence goes, nothing about it is learned after the drafter was told to forget it."""
    drafter = Proposer(lambda grant: chain(grant.seq.tokens[-1], [1, 2], "x") if grant.at_frontier else EMPTY)
    engine = hash_engine(CONFIGS["small pool"], drafter)
    run(engine, mixed_requests())
    assert engine.metrics.preemptions > 0
    assert drafter.states == set()


def test_a_preempted_sequence_is_forgotten_and_resumes_with_the_same_text() -> None:
    requests = [
        Request(tuple(range(number, number + 20)), Sampling(seed=number), Stopping(max_tokens=40, ignore_eos=True))
        for number in range(3)
    ]
    oracle = OracleDrafter(answers(requests), VOCAB_SIZE, mistake_rate=0.2, branch_rate=0.4)
    forgotten: list[Sequence] = []
    oracle.forget = lambda seq: forgotten.append(seq)  # type: ignore[method-assign]
    engine = hash_engine(CONFIGS["small pool"], oracle)
    preempted = {}
    for number, request in enumerate(requests):
        (seq,) = engine.add(request, f"r{number}")
        preempted[seq] = 0
    emissions: Emissions = {}
    drafting = 0
    while engine.has_work:
        before = {seq: seq.num_preemptions for seq in preempted}
        had_drafts = {seq: seq.acceptance.draft_tokens for seq in preempted}
        for part in engine.step():
            emissions.setdefault((part.seq.request_id, part.seq.index), []).append(part)
        for seq, count in before.items():
            if seq.num_preemptions > count:
                assert seq in forgotten
                drafting += had_drafts[seq] > 0
    assert drafting > 0, "some had verified drafts before they were preempted"
    assert seen_by_caller(emissions) == expected_of(requests)
    assert_empty(engine)


# Batches


def test_the_same_seed_gives_the_same_text_in_any_company() -> None:
    requests = mixed_requests()
    together = expected_of(requests)
    for number, request in enumerate(requests):
        alone = expected_of([request])
        assert {index: shown for (_, index), shown in alone.items()} == {
            index: shown for (name, index), shown in together.items() if name == f"r{number}"
        }


def test_the_same_seed_gives_the_same_text_whenever_the_others_come() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    requests = mixed_requests()
    expected = expected_of(requests)
    for config in ("plain", "small pool", "chunks"):
        engine = hash_engine(CONFIGS[config], RandomDrafter(seed, VOCAB_SIZE))
        emissions: Emissions = {}
        todo = list(enumerate(requests))
        rng.shuffle(todo)
        while todo or engine.has_work:
            if todo and (rng.random() < 0.3 or not engine.has_work):
                number, request = todo.pop()
                engine.add(request, f"r{number}")
            for part in engine.step():
                emissions.setdefault((part.seq.request_id, part.seq.index), []).append(part)
        assert seen_by_caller(emissions) == expected


def test_choices_have_seeds_of_their_own() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(1234567) == 6457827717110365317
    assert splitmix64(1234567 + 0x9E3779B97F4A7C15) == 3203168211198807973
    stopping = Stopping(max_tokens=12, ignore_eos=True)
    for seed in (0, 77, 2**64 - 1, -5):
        many = run(
            hash_engine(PLAIN, RandomDrafter(1, VOCAB_SIZE)), [Request((1, 2), Sampling(seed=seed), stopping, n=4)]
        )
        shown = seen_by_caller(many)
        assert len({text for _, text, *_ in shown.values()}) == 4
        seeds = [seed, *(splitmix64(seed + index) for index in range(1, 4))]
        for index, own in enumerate(seeds):
            assert many["r0", index][0].seq.seed == own
            alone = seen_by_caller(
                run(hash_engine(PLAIN, NoDrafter()), [Request((1, 2), Sampling(seed=own), stopping)])
            )
            assert alone["r0", 0] == shown["r0", index]


def test_a_request_without_a_seed_gets_a_fresh_one_and_is_told() -> None:
    request = Request((1, 2), Sampling(), Stopping(max_tokens=12, ignore_eos=True))
    emissions = run(hash_engine(PLAIN, NoDrafter()), [request, request])
    first, second = (emissions[f"r{number}", 0][0].seq.seed for number in range(2))
    assert first != second
    again = replace(request, sampling=Sampling(seed=second))
    assert texts(run(hash_engine(PLAIN, NoDrafter()), [again]))["r0", 0] == texts(emissions)["r1", 0]


# Ends


STREAM = Request((5, 6, 7), Sampling(seed=9, logprobs=2), Stopping(max_tokens=40, ignore_eos=True))


@functools.cache
def stream() -> tuple[list[int], str]:
    """Forty tokens that `STREAM` draws, and their letters."""
    ((tokens, text, *_),) = expected_of([STREAM]).values()
    return list(tokens), text


def ended_at(stopping: Stopping, end_tokens: Seq[int]) -> tuple[list[int], str, str, str | int | None]:
    """What a caller should see of the stream under these ends, token by token: the definition."""
    tokens, text = stream()
    ends = () if stopping.ignore_eos else end_tokens
    for count in range(1, len(tokens) + 1):
        token, begun = tokens[count - 1], text[: count - 1]
        for start in range(count):
            if count > stopping.min_tokens and text[start:count] in stopping.stop and start >= stopping.min_tokens:
                shown = text[:count] if stopping.include_stop else text[:start]
                return tokens[:count], shown, "stop", text[start:count]
        if token in ends or token in stopping.stop_token_ids:
            return (
                tokens[:count],
                text[:count] if stopping.include_stop else begun,
                "stop",
                None if token in ends else token,
            )
        if count == stopping.max_tokens:
            return tokens[:count], text[:count], "length", None
    raise AssertionError("the stream is too short")


@pytest.mark.parametrize("include_stop", [False, True])
def test_an_end_inside_an_accepted_run_cuts_all_together(include_stop: bool) -> None:
    tokens, text = stream()
    ends: list[tuple[Stopping, list[int]]] = []
    for place in range(1, 30, 3):
        here = Stopping(max_tokens=40, include_stop=include_stop)
        ends += [
            (replace(here, max_tokens=place), []),
            (replace(here, stop=(text[place : place + 2],)), []),
            (replace(here, stop=(text[place : place + 3], "zz")), []),
            (replace(here, stop_token_ids=(tokens[place],)), []),
            (here, [tokens[place], 23]),
            (replace(here, ignore_eos=True, stop_token_ids=(tokens[place],)), [tokens[place]]),
            (replace(here, stop=(text[place],), max_tokens=place + 1), [tokens[place]]),
        ]
    for stopping, end_tokens in ends:
        request = replace(STREAM, stopping=stopping)
        results = []
        oracle = OracleDrafter({STREAM.prompt: tokens}, VOCAB_SIZE, branch_rate=0.3)
        for drafter in (NoDrafter(), oracle):
            engine = hash_engine(PLAIN, drafter, end_tokens=end_tokens)
            emissions = run(engine, [request])
            got, shown, reason, why, logprobs = seen_by_caller(emissions)["r0", 0]
            assert (list(got), shown, reason, why) == ended_at(stopping, end_tokens)
            assert [logprob.token for logprob in logprobs] == list(got)
            results.append((got, shown, reason, why, logprobs))
            seq = emissions["r0", 0][0].seq
            assert seq.tokens == [*STREAM.prompt, *got]
            assert list(logprobs) == seq.logprobs
            assert engine.metrics.generation_tokens == len(seq.logprobs) == seq.num_output
            assert seq.acceptance.accepted_tokens == sum(part.num_accepted for part in emissions["r0", 0])
            assert seq.acceptance.accepted_tokens + seq.acceptance.draws >= seq.num_output
            assert seq.acceptance.accepted_tokens <= seq.num_output
            assert_empty(engine)
        assert results[0] == results[1]


def test_min_tokens_come_before_any_end() -> None:
    """Stop ids and end tokens cannot be drawn before `min_tokens` tokens, with drafts or without."""
    for min_tokens in (1, 3, 10):
        requests = [
            Request(
                (1, 2),
                Sampling(seed=seed),
                Stopping(max_tokens=12, min_tokens=min_tokens, stop_token_ids=tuple(range(1, 20))),
            )
            for seed in range(5)
        ]
        expected = expected_of(requests)
        for tokens, *_ in expected.values():
            assert min(token for token in tokens[:min_tokens]) >= 20
        assert {reason for _, _, reason, *_ in expected.values()} == {"stop"}
        engine = hash_engine(PLAIN, OracleDrafter(answers(requests), VOCAB_SIZE, branch_rate=0.5))
        assert seen_by_caller(run(engine, requests)) == expected


def test_a_text_ends_with_its_context() -> None:
    config = replace(PLAIN, max_model_len=16)
    request = Request(tuple(range(10)), Sampling(seed=1), Stopping(ignore_eos=True))
    for drafter in (NoDrafter(), Proposer(WELL_FORMED["past the context's end"])):
        engine = hash_engine(config, drafter)
        ((tokens, _, reason, *_),) = seen_by_caller(run(engine, [request])).values()
        assert len(tokens) == 6
        assert reason == "length"
    engine.add(Request(tuple(range(15)), Sampling(), Stopping()), "fits")
    with pytest.raises(ContextTooLong, match="prompt: is 16 tokens long, and the context of 16 must leave room"):
        engine.add(Request(tuple(range(16)), Sampling(), Stopping()), "does not")


# Counters


@pytest.mark.parametrize("config", ["plain", "small pool", "chunks"])
def test_counters_are_those_of_a_trace(config: str) -> None:
    """What the drafter saw verified, matched against what was emitted, gives every number again."""
    requests = mixed_requests()
    told = answers(requests)
    oracle = OracleDrafter(told, VOCAB_SIZE, mistake_rate=0.2, branch_rate=0.4)
    spy = Proposer(oracle._draft)
    engine = hash_engine(CONFIGS[config], spy)
    emissions = run(engine, requests)
    draws = drafts = draft_tokens = accepted_tokens = generated = 0
    per_depth = [0] * 100
    for parts in emissions.values():
        seq = parts[0].seq
        trees = [tree for tree in spy.verified[seq] if len(tree)]
        assert len(trees) == len(parts)
        for tree, part in zip(trees, parts, strict=True):
            node, depth = 0, 0
            for token in part.tokens:
                below = [child for child in tree.children()[node] if tree.tokens[child] == token]
                if not below:
                    break
                (node,) = below
                per_depth[depth] += 1
                depth += 1
            assert (part.num_drafts, part.num_accepted) == (tree.num_drafts, depth)
            assert len(part.tokens) in (depth, depth + 1)
            draws += 1
            drafts += tree.num_drafts > 0
            draft_tokens += tree.num_drafts
            accepted_tokens += depth
            generated += len(part.tokens)
        own = seq.acceptance
        assert own.draws == len(trees)
        assert own.draft_tokens == sum(tree.num_drafts for tree in trees)
        assert own.accepted_tokens == sum(own.accepted_per_depth) == sum(part.num_accepted for part in parts)
    total = engine.metrics.acceptance
    assert (total.draws, total.drafts, total.draft_tokens, total.accepted_tokens) == (
        draws,
        drafts,
        draft_tokens,
        accepted_tokens,
    )
    assert total.accepted_per_depth == [count for count in per_depth if count]
    assert engine.metrics.generation_tokens == generated
    assert engine.metrics.prompt_tokens == sum(len(request.prompt) * request.n for request in requests)
    assert engine.metrics.cached_prompt_tokens == sum(parts[0].seq.num_cached for parts in emissions.values())
    reasons = [parts[-1].finish_reason for parts in emissions.values()]
    assert engine.metrics.finished == {reason: reasons.count(reason) for reason in ("stop", "length", "abort", "error")}
    assert engine.metrics.preemptions == sum(parts[0].seq.num_preemptions for parts in emissions.values())
    assert engine.metrics.steps == len(engine.runner.rows_seen)  # type: ignore[attr-defined]
    assert max(engine.runner.rows_seen) <= CONFIGS[config].max_rows  # type: ignore[attr-defined]
    assert (engine.metrics.running, engine.metrics.waiting, engine.metrics.kv_usage) == (0, 0, 0)


# Aborts


@pytest.mark.parametrize("config", ["plain", "small pool", "chunks"])
def test_an_abort_at_any_moment_frees_everything(config: str) -> None:
    requests = mixed_requests(6)
    expected = expected_of(requests)
    for moment in range(0, 30, 3):
        drafter = Proposer(RandomDrafter(moment, VOCAB_SIZE)._draft)
        engine = hash_engine(CONFIGS[config], drafter)
        for number, request in enumerate(requests):
            engine.add(request, f"r{number}")
        emissions: Emissions = {}
        for _ in range(moment):
            for part in engine.step() if engine.has_work else ():
                emissions.setdefault((part.seq.request_id, part.seq.index), []).append(part)
        left = {(seq.request_id, seq.index) for seqs in engine._sequences.values() for seq in seqs if not seq.finished}
        for number in range(len(requests)):
            parts = engine.abort(f"r{number}")
            assert {(part.seq.request_id, part.seq.index) for part in parts} == {
                key for key in left if key[0] == f"r{number}"
            }
            assert all(part.finish_reason == "abort" == part.seq.finish_reason for part in parts)
            engine.scheduler.pool.check(engine.scheduler.tables())
            assert engine.abort(f"r{number}") == []
        assert drafter.states == set()
        assert engine.metrics.finished["abort"] == len(left)
        assert (engine.metrics.running, engine.metrics.waiting, engine.metrics.kv_blocks_used) == (0, 0, 0)
        assert_empty(engine)
        for key, parts in emissions.items():
            tokens = expected[key][0]
            got = tuple(token for part in parts for token in part.tokens)
            assert got == tokens[: len(got)]


def test_aborting_one_changes_nothing_for_the_others() -> None:
    requests = mixed_requests(6)
    expected = expected_of(requests)
    engine = hash_engine(CONFIGS["small pool"], RandomDrafter(1, VOCAB_SIZE))
    emissions: Emissions = {}
    for number, request in enumerate(requests):
        engine.add(request, f"r{number}")
    for moment in range(10**6):
        if not engine.has_work:
            break
        if moment in (1, 4):
            engine.abort(f"r{moment}")
        for part in engine.step():
            emissions.setdefault((part.seq.request_id, part.seq.index), []).append(part)
    got = seen_by_caller(emissions)
    kept = {key for key in expected if key[0] not in ("r1", "r4")}
    assert {key: got[key] for key in kept} == {key: expected[key] for key in kept}


def test_three_hundred_requests_leave_nothing_behind() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    config = EngineConfig(max_model_len=40, num_slots=104, block_size=4, max_rows=24, max_drafts=8, max_waiting=1000)
    drafter = Proposer(RandomDrafter(seed, VOCAB_SIZE)._draft)
    engine = hash_engine(config, drafter)
    stem = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    finished = added = 0
    live: list[str] = []
    while added < 300 or engine.has_work:
        while added < 300 and rng.random() < 0.6:
            prompt = (*stem[: rng.randint(0, 25)], rng.randrange(VOCAB_SIZE))
            engine.add(Request(prompt, Sampling(), Stopping(max_tokens=rng.randint(1, 14))), f"r{added}")
            live.append(f"r{added}")
            added += 1
        if live and rng.random() < 0.4:
            finished += len(engine.abort(live.pop(rng.randrange(len(live)))))
        finished += sum(part.finish_reason is not None for part in engine.step())
        if added % 10 == 0:
            engine.scheduler.pool.check(engine.scheduler.tables())
    assert finished == 300 == sum(engine.metrics.finished.values())
    assert engine.metrics.preemptions > 0
    assert engine.metrics.finished["abort"] > 0
    assert drafter.states == set()
    assert_empty(engine)


# Errors of one request


def letters_only(*tokens: int) -> Automaton:
    """Any of the tokens, for ever; the text may end after each."""
    return Automaton({0: dict.fromkeys(tokens, 0)}, {0: [0]})


def failing(method: str, length: int) -> Automaton:
    def fail(called: str, at: int) -> None:
        if called == method and at >= length:
            raise ConstraintError(f"{method} broke")

    return Automaton({0: dict.fromkeys(range(1, VOCAB_SIZE), 0)}, {0: [0]}, fail)


@pytest.mark.parametrize("method", ["prune", "mask", "advance"])
@pytest.mark.parametrize("length", [0, 1, 6])
@pytest.mark.parametrize("drafter", ["random", "none"])
def test_a_constraint_that_fails_ends_its_own_request_alone(method: str, length: int, drafter: str) -> None:
    others = mixed_requests(4)
    bad = Request((1, 2, 3), Sampling(seed=3), Stopping(max_tokens=30, ignore_eos=True), failing(method, length))
    engine = hash_engine(PLAIN, NoDrafter() if drafter == "none" else RandomDrafter(2, VOCAB_SIZE))
    emissions = run(engine, [*others, bad])
    last = emissions["r4", 0][-1]
    if method == "prune" and drafter == "none":
        assert last.finish_reason == "length", "nothing was guessed, so nothing was pruned"
        return
    assert last.finish_reason == "error"
    assert isinstance(last.error, ConstraintError)
    assert str(last.error) == f"{method} broke"
    assert last.seq.error is last.error
    emitted = sum(len(part.tokens) for part in emissions["r4", 0])
    assert emitted >= length
    good = expected_of([replace(bad, grammar=letters_only(*range(1, VOCAB_SIZE)))])["r0", 0][0]
    assert tuple(last.seq.tokens[3:]) == good[:emitted]
    shown = seen_by_caller(emissions)
    assert {key: value for key, value in shown.items() if key[0] != "r4"} == expected_of(others)
    assert engine.metrics.constraint_errors == 1
    assert engine.metrics.finished["error"] == 1
    assert_empty(engine)


DEAD = Automaton({0: {1: 0, 2: 0, 3: 1}, 1: {}}, {0: [0]})  # after token 3 nothing may follow, not even the end


@pytest.mark.parametrize("drafts", [False, True])
def test_a_dead_end_counts_only_where_the_text_goes(drafts: bool) -> None:
    propose = chain if drafts else lambda token, tokens, source: root(token)
    drafter = Proposer(lambda grant: propose(grant.seq.tokens[-1], [3, 1], "x") if grant.at_frontier else EMPTY)
    stopping = Stopping(max_tokens=8, ignore_eos=True)
    avoids = Request((1,), Sampling(seed=1, logit_bias={3: -100.0}), stopping, DEAD)
    walks_in = Request((1,), Sampling(seed=1, logit_bias={3: 100.0}), stopping, DEAD)
    engine = hash_engine(PLAIN, drafter)
    emissions = run(engine, [avoids, walks_in])
    assert emissions["r0", 0][-1].finish_reason == "length"
    assert sum(len(part.tokens) for part in emissions["r0", 0]) == 8
    last = emissions["r1", 0][-1]
    assert last.finish_reason == "error"
    assert isinstance(last.error, DeadEnd)
    assert str(last.error) == "no token is allowed at position 2"
    assert last.seq.tokens == [1, 3]
    assert seen_by_caller(emissions)["r1", 0][:2] == ((3,), "d")
    assert (engine.metrics.dead_ends, engine.metrics.constraint_errors) == (1, 0)
    if drafts:
        assert len(emissions["r1", 0]) == 1, "the dead end is found in the step that walks into it"
    assert_empty(engine)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("stopping", "expected"),
    [
        (Stopping(min_tokens=9, max_tokens=20), ((5, 6, 0), "fg", "stop", None)),
        (Stopping(ignore_eos=True), ((5, 6, 0), "fg", "stop", None)),
        (Stopping(ignore_eos=True, min_tokens=9, include_stop=True), ((5, 6, 0), "fga", "stop", None)),
        (Stopping(stop_token_ids=(6,), min_tokens=2), ((5, 6), "f", "stop", 6)),
        (Stopping(max_tokens=2), ((5, 6), "fg", "length", None)),
    ],
)
def test_what_the_grammar_leaves_no_choice_about_comes_before_bans(
    stopping: Stopping, expected: tuple[object, ...], drafts: bool
) -> None:
    two_tokens = Automaton({0: {5: 1}, 1: {6: 2}}, {2: [0]})
    drafter = OracleDrafter({(1,): (5, 6, 0)}, VOCAB_SIZE) if drafts else NoDrafter()
    emissions = run(hash_engine(PLAIN, drafter), [Request((1,), Sampling(seed=1), stopping, two_tokens)])
    assert seen_by_caller(emissions) == {("r0", 0): (*expected, ())}


def test_a_grammar_that_may_go_on_does_so_until_min_tokens() -> None:
    stopping = Stopping(min_tokens=9, max_tokens=20)
    for seed in range(5):
        request = Request((1,), Sampling(seed=seed, logit_bias={0: 50.0}), stopping, letters_only(1, 2))
        ((tokens, _, reason, *_),) = seen_by_caller(
            run(hash_engine(PLAIN, RandomDrafter(seed, VOCAB_SIZE)), [request])
        ).values()
        assert len(tokens) == 10
        assert set(tokens[:9]) <= {1, 2}
        assert (tokens[9], reason) == (0, "stop")


class PoisonedRunner:
    """Rows behind one token are not numbers."""

    def __init__(self, config: EngineConfig, poison: int) -> None:
        self.inner = HashRunner(config, VOCAB_SIZE)
        self.vocab_size = VOCAB_SIZE
        self.poison = poison

    def forward(self, batch: Batch, taps: Seq[int] = ()) -> Forward:
        logits_LV = self.inner.forward(batch).logits_LV
        logits_LV[batch.tokens_R[batch.logit_rows_L] == self.poison, 5] = math.nan
        return Forward(logits_LV)

    def move(self, sources: Seq[int], targets: Seq[int]) -> None:
        self.inner.move(sources, targets)


def poisoned_engine(drafter: Drafter, poison: int) -> Engine:
    return Engine(PoisonedRunner(PLAIN, poison), [drafter], PLAIN, new_text=letters, end_tokens=(0,))


@pytest.mark.parametrize("drafts", [False, True])
def test_logits_that_are_not_numbers_end_one_request_where_it_goes_there(drafts: bool) -> None:
    drafter = Proposer(lambda grant: chain(grant.seq.tokens[-1], [13, 1] if drafts else [], "x"))
    stopping = Stopping(max_tokens=8, ignore_eos=True)
    avoids = Request((1,), Sampling(seed=1, logit_bias={13: -100.0}), stopping)
    walks_in = Request((1,), Sampling(seed=1, logit_bias={13: 100.0}), stopping)
    begins_there = Request((2, 13), Sampling(temperature=0.0), stopping)
    emissions = run(engine := poisoned_engine(drafter, 13), [avoids, walks_in, begins_there])
    shown = seen_by_caller(emissions)
    assert shown["r0", 0] == expected_of([avoids])["r0", 0]
    assert shown["r1", 0][:3] == ((13,), "n", "error")
    assert shown["r2", 0][:3] == ((), "", "error")
    for name, position in (("r1", 2), ("r2", 2)):
        error = emissions[name, 0][-1].error
        assert isinstance(error, NumericalError)
        assert str(error) == f"the model's logits at position {position} are not numbers"
    assert engine.metrics.acceptance.draws == sum(bool(part.tokens) for parts in emissions.values() for part in parts)
    assert engine.metrics.numerical_errors == engine.metrics.finished["error"] == 2
    assert_empty(engine)


@pytest.mark.parametrize("max_rows", [64, 8])
def test_what_a_failed_text_computed_is_not_shared(max_rows: int) -> None:
    """Keys that led to logits that are not numbers must not serve the next request, in whatever step they came."""
    config = replace(PLAIN, max_rows=max_rows)
    engine = Engine(PoisonedRunner(config, 13), [], config, new_text=letters, end_tokens=(0,))
    request = Request((*[1] * 40, 13), Sampling(seed=1), Stopping(max_tokens=4))
    for _ in range(2):
        (parts,) = run(engine, [request]).values()
        assert parts[-1].finish_reason == "error"
        assert parts[-1].seq.num_cached == 0


# What the engine refuses, and what it survives


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (Request((VOCAB_SIZE,)), "prompt"),
        (Request((1, -1)), "prompt"),
        (Request((1,), Sampling(logit_bias={VOCAB_SIZE: 1.0})), "logit_bias"),
        (Request((1,), stopping=Stopping(stop_token_ids=(VOCAB_SIZE,))), "stop_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(request_: Request, param: str) -> None:
    engine = hash_engine(PLAIN, NoDrafter())
    with pytest.raises(InvalidRequest, match=f"^{param}: token .* is not in the vocabulary of 24$") as caught:
        engine.add(request_, "a")
    assert caught.value.param == param
    assert_empty(engine)


def test_an_id_in_use_and_a_full_queue_are_refused() -> None:
    engine = hash_engine(replace(PLAIN, max_waiting=2), NoDrafter())
    engine.add(Request((1,)), "a")
    with pytest.raises(InvalidRequest, match="request_id: 'a' is in use"):
        engine.add(Request((1,)), "a")
    engine.add(Request((1,)), "b")
    with pytest.raises(QueueFull, match="2 sequences wait already") as caught:
        engine.add(Request((1,)), "c")
    assert caught.value.retry_after >= 1
    engine.step()
    engine.add(Request((1,)), "c")
    for name in "abc":
        engine.abort(name)
    assert_empty(engine)
    engine.add(Request((1,)), "a")


def test_end_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"end_tokens must be ids below 24, got \[24\]"):
        hash_engine(PLAIN, NoDrafter(), end_tokens=(1, 24))


class FlakyRunner:
    """Every third forward fails before it writes, every third after."""

    def __init__(self, config: EngineConfig) -> None:
        self.inner = HashRunner(config, VOCAB_SIZE)
        self.vocab_size = VOCAB_SIZE
        self.calls = 0

    def forward(self, batch: Batch, taps: Seq[int] = ()) -> Forward:
        self.calls += 1
        if self.calls % 3 == 0:
            raise MemoryError("the device is full")
        forward = self.inner.forward(batch)
        if self.calls % 3 == 1:
            raise MemoryError("the device is full")
        return forward

    def move(self, sources: Seq[int], targets: Seq[int]) -> None:
        self.inner.move(sources, targets)


@pytest.mark.parametrize("config", ["plain", "small pool", "chunks"])
def test_a_forward_that_fails_loses_nothing(config: str) -> None:
    """Nothing is committed before the forward is back: the step can be made again, or everything aborted."""
    requests = mixed_requests(5)
    engine = Engine(
        FlakyRunner(CONFIGS[config]), [RandomDrafter(2, VOCAB_SIZE)], CONFIGS[config], new_text=letters, end_tokens=(0,)
    )
    for number, request in enumerate(requests):
        engine.add(request, f"r{number}")
    emissions: Emissions = {}
    failures = 0
    while engine.has_work:
        try:
            parts = engine.step()
        except MemoryError:
            failures += 1
            engine.scheduler.pool.check(engine.scheduler.tables())
            continue
        for part in parts:
            emissions.setdefault((part.seq.request_id, part.seq.index), []).append(part)
    assert failures > 10
    assert seen_by_caller(emissions) == expected_of(requests)
    assert_empty(engine)


def test_logprobs_are_those_of_the_raw_row() -> None:
    """Penalties, bias, temperature and filters change what is picked, not what is reported."""
    request = Request(
        (1, 2, 3),
        Sampling(temperature=0.5, top_k=3, logit_bias={7: 5.0}, presence_penalty=1.0, seed=3, logprobs=VOCAB_SIZE - 4),
        Stopping(max_tokens=10, ignore_eos=True),
    )
    rows: list[np.ndarray] = []
    runner = HashRunner(PLAIN, VOCAB_SIZE)
    engine = Engine(runner, [], PLAIN, new_text=letters, end_tokens=(0,))
    forward = runner.forward

    def record(batch: Batch, taps: Seq[int] = ()) -> Forward:
        result = forward(batch)
        rows.extend(torch.log_softmax(result.logits_LV.double(), -1).numpy())
        return result

    runner.forward = record  # type: ignore[method-assign]
    (parts,) = run(engine, [request]).values()
    logprobs = [logprob for part in parts for logprob in part.logprobs]
    assert len(logprobs) == len(rows) == 10
    for logprob, row in zip(logprobs, rows, strict=True):
        assert logprob.logprob == pytest.approx(row[logprob.token], abs=1e-9)
        order = np.argsort(-row, kind="stable")[: VOCAB_SIZE - 4]
        assert [token for token, _ in logprob.top] == order.tolist()
        assert [value for _, value in logprob.top] == pytest.approx(row[order].tolist(), abs=1e-9)
