"""Every counter of what drafts gave, recounted from the trees that were verified and the tokens that were emitted; and
ends inside an accepted run, where tokens, text, log-probabilities and counters are cut together."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from specdec.config import EngineConfig
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.prediction import PredictionDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.engine import Engine
from specdec.errors import InvalidRequest
from specdec.metrics import Acceptance
from specdec.request import Request, Sampling, Speculative, Stopping
from specdec.sequence import Emission, Sequence
from specdec.tree import DraftTree
from tests.drafters_for_tests import OracleDrafter, RandomDrafter
from tests.fakes import Automaton, hash_engine
from tests.test_prediction import definition

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.batch import Batch
    from specdec.sequence import Grant, Span

VOCAB_SIZE = 24
ROOMY = EngineConfig(max_model_len=64, num_slots=900, max_drafts=24)
CONFIGS = {
    "roomy": ROOMY,
    "small pool": replace(ROOMY, num_slots=64 + 64, block_size=4),
    "chunks": replace(ROOMY, max_rows=7, block_size=4),
}


class Watcher:
    """A drafter that guesses nothing and writes down what was verified."""

    names: tuple[str, ...] = ()
    taps: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.trees: dict[Sequence, list[DraftTree]] = {}

    def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
        return NoDrafter().draft(grants)

    def observe(self, spans: Seq[Span], batch: Batch, taps: Seq[Tensor], paths: Seq[Seq[int]]) -> None:
        for span in spans:
            self.trees.setdefault(span.seq, []).append(span.tree)

    def forget(self, seq: Sequence) -> None:
        """What was written down stays."""


@dataclass(slots=True)
class Recount:
    """What `Acceptance` counts, counted from trees and emitted tokens alone."""

    draws: int
    drafts: int
    drafted: Counter[str]
    accepted: Counter[str]
    depths: Counter[int]

    @staticmethod
    def of(trees: Seq[DraftTree], emitted: Seq[Seq[int]]) -> Recount:
        count = Recount(0, 0, Counter(), Counter(), Counter())
        for tree, tokens in zip(trees, emitted, strict=True):
            count.draws += 1
            count.drafts += len(tree.tokens) > 1
            count.drafted.update(tree.sources[1:])
            place = 0
            for depth, token in enumerate(tokens):
                below = [n for n in range(len(tree)) if tree.parents[n] == place and tree.tokens[n] == token]
                if not below:
                    assert depth == len(tokens) - 1, "only the last token of a step was not a guess"
                    break
                (place,) = below
                count.accepted[tree.sources[place]] += 1
                count.depths[depth] += 1
        return count

    def assert_equals(self, counted: Acceptance) -> None:
        assert (counted.draws, counted.drafts) == (self.draws, self.drafts)
        assert counted.draft_tokens == self.drafted.total()
        assert counted.accepted_tokens == self.accepted.total()
        assert counted.accepted_per_depth == [self.depths[depth] for depth in range(len(self.depths))]
        assert counted.by_source.keys() == self.drafted.keys()
        for source, count in counted.by_source.items():
            assert (count.draft_tokens, count.accepted_tokens) == (self.drafted[source], self.accepted[source]), source


def requests() -> list[Request]:
    """Texts of all lengths and ends, free and under a grammar, some with a prediction, some with guesses of their
    choice."""
    rng = random.Random(8)
    stem = [rng.randrange(1, VOCAB_SIZE) for _ in range(12)]
    grammar = Automaton({0: {1: 1, 2: 1}, 1: {3: 2}, 2: {4: 3}, 3: {5: 0, 6: 0}}, {0: [0]})
    choices: list[bool | Speculative] = [True, Speculative("ngram,prediction", 6), True, False, Speculative("suffix")]
    asked = []
    for number in range(15):
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.3, 1.0]),
            seed=number,
            logprobs=rng.choice([None, 2]),
            speculative=choices[number % 5],
        )
        stopping = Stopping(
            max_tokens=rng.choice([1, 8, 30, 40]),
            ignore_eos=rng.random() < 0.7,
            stop=rng.choice([(), ("ab",), ("m", "pq")]),
        )
        prompt = (*stem[: rng.randint(1, 12)], *stem[: rng.randint(0, 6)], number)
        asked.append(
            Request(prompt, sampling, stopping, grammar if number % 4 == 2 else None, n=2 if number == 5 else 1)
        )
    return asked


def trace(engine: Engine, asked: Seq[Request], aborted: Seq[int] = ()) -> dict[Sequence, list[Emission]]:
    """Run all; some are aborted after a few steps. The emissions of each sequence."""
    emissions: dict[Sequence, list[Emission]] = {}
    for number, request in enumerate(asked):
        for seq in engine.add(request, f"r{number}"):
            emissions[seq] = []
    steps = 0
    while engine.has_work:
        steps += 1
        parts = engine.step()
        for number in aborted if steps == 6 else ():
            parts += engine.abort(f"r{number}")
        for part in parts:
            emissions[part.seq].append(part)
    return emissions


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("aborted", [(), (1, 4, 7, 11)], ids=["to the end", "some aborted"])
def test_every_counter_is_that_of_a_recount(config: str, aborted: tuple[int, ...]) -> None:
    asked = requests()
    plain = trace(
        hash_engine(ROOMY, NoDrafter()),
        [replace(request, sampling=replace(request.sampling, speculative=False)) for request in asked],
    )
    told = {seq.request.prompt: tuple(seq.tokens[seq.num_prompt :]) for seq in plain if seq.index == 0}
    for number, request in enumerate(asked):
        if request.sampling.speculative and "suffix" not in request.sampling.guesses.methods:
            truth = told[request.prompt]
            asked[number] = replace(request, prediction=(*truth[:5], 9, 9, *truth[6:]))
    oracle = OracleDrafter(told, VOCAB_SIZE, mistake_rate=0.3, branch_rate=0.3)
    watcher = Watcher()
    engine = hash_engine(
        CONFIGS[config],
        PredictionDrafter(),
        oracle,
        SuffixDrafter(),
        NgramDrafter(),
        RandomDrafter(1, VOCAB_SIZE),
        watcher,
    )
    emissions = trace(engine, asked, aborted)
    trees, emitted = [], []
    for seq, parts in emissions.items():
        own_trees = [tree for tree in watcher.trees.get(seq, ()) if len(tree)]
        own = [part.tokens for part in parts if part.tokens]
        Recount.of(own_trees, own).assert_equals(seq.acceptance)
        for tree, part in zip(own_trees, parts, strict=False):
            assert part.num_drafts == tree.num_drafts <= seq.request.sampling.guesses.limit
        output = [token for tokens in own for token in tokens]
        assert seq.tokens[seq.num_prompt :] == output
        assert seq.followed.num_tokens == definition(seq.request.prediction, output)
        if seq.request.sampling.logprobs is not None:
            assert [logprob.token for part in parts for logprob in part.logprobs] == output
        trees += own_trees
        emitted += own
    Recount.of(trees, emitted).assert_equals(engine.metrics.acceptance)
    assert Acceptance.total(seq.acceptance for seq in emissions) == engine.metrics.acceptance
    assert engine.metrics.generation_tokens == sum(map(len, emitted))
    assert engine.metrics.finished["abort"] == sum(parts[-1].finish_reason == "abort" for parts in emissions.values())
    assert engine.metrics.drafter_errors == 0
    by_source = engine.metrics.acceptance.by_source
    assert {"prediction", "oracle", "random"} <= by_source.keys()
    assert by_source["prediction"].accepted_tokens > 10
    if config == "small pool" and not aborted:
        assert engine.metrics.preemptions > 0


# Ends inside an accepted run

STREAM = Request((5, 6, 7), Sampling(seed=9, logprobs=1), Stopping(max_tokens=30, ignore_eos=True))
CUT = 9  # tokens that are left of the run


def stream() -> list[int]:
    (seq,) = trace(hash_engine(ROOMY, NoDrafter(), end_tokens=()), [STREAM])
    return seq.tokens[seq.num_prompt :]


def first_of(tokens: Seq[int]) -> int:
    """A place from `CUT` on whose token has not stood before it."""
    return next(place for place in range(CUT - 1, len(tokens)) if tokens[place] not in tokens[:place])


@pytest.mark.parametrize("kind", ["stop string", "end token", "stop token", "max_tokens", "grammar"])
def test_an_end_inside_an_accepted_run_cuts_tokens_text_logprobs_and_counters_together(kind: str) -> None:
    tokens = stream()
    letters = "".join(chr(97 + token) for token in tokens)
    place = first_of(tokens)
    end_tokens: tuple[int, ...] = (tokens[place],) if kind == "end token" else ()
    stopping = {
        "stop string": Stopping(max_tokens=30, stop=(letters[place - 1 : place + 1],)),
        "end token": Stopping(max_tokens=30),
        "stop token": Stopping(max_tokens=30, stop_token_ids=(tokens[place],)),
        "max_tokens": Stopping(max_tokens=place + 1),
        "grammar": Stopping(max_tokens=30),
    }[kind]
    grammar = None
    expected = tokens[: place + 1]
    if kind == "grammar":  # exactly the tokens before the place; then only the end is left
        end = next(token for token in range(VOCAB_SIZE) if token not in tokens[:place])
        end_tokens = (end,)
        grammar = Automaton({state: {token: state + 1} for state, token in enumerate(tokens[:place])}, {place: [end]})
        expected = [*tokens[:place], end]
    # A grammar's fake prunes guessed ends, and nothing is guessed as deep as the last token allowed.
    num_accepted = place + 1 if kind in ("stop string", "end token", "stop token") else place
    oracle, watcher = OracleDrafter({STREAM.prompt: [*expected, *tokens[place + 1 :]]}, VOCAB_SIZE), Watcher()
    engine = hash_engine(ROOMY, oracle, watcher, end_tokens=end_tokens)
    ((seq, (part,)),) = trace(engine, [replace(STREAM, stopping=stopping, grammar=grammar)]).items()
    shown = {"stop string": place - 1, "max_tokens": place + 1}.get(kind, place)
    assert (list(part.tokens), part.text) == (expected, letters[:shown])
    assert part.finish_reason == ("length" if kind == "max_tokens" else "stop")
    assert [logprob.token for logprob in part.logprobs] == expected
    assert seq.tokens == [*STREAM.prompt, *expected]
    assert seq.logprobs == list(part.logprobs)
    ((tree,),) = watcher.trees.values()
    if kind in ("stop string", "end token", "stop token"):
        assert tree.num_drafts > num_accepted, "more was guessed, right as it was"
    for acceptance in (seq.acceptance, engine.metrics.acceptance):
        Recount.of([tree], [part.tokens]).assert_equals(acceptance)
        assert acceptance.accepted_tokens == acceptance.by_source["oracle"].accepted_tokens == num_accepted
        assert acceptance.accepted_per_depth == [1] * num_accepted
    assert (part.num_drafts, part.num_accepted) == (tree.num_drafts, num_accepted)
    assert engine.metrics.generation_tokens == len(expected)
    assert engine.metrics.finished[part.finish_reason] == 1


# What a request may ask for


def test_a_drafter_that_does_not_run_is_refused_by_name() -> None:
    engine = hash_engine(ROOMY, PredictionDrafter(), SuffixDrafter())
    for method, wrong in (("ngram", "ngram"), ("suffix,eagle", "eagle"), ("none", "none")):
        with pytest.raises(InvalidRequest, match=f"'{wrong}' is not .* there are prediction, suffix$") as refused:
            engine.add(Request((1,), Sampling(speculative=Speculative(method))), "a")
        assert refused.value.param == "speculative.method"
    assert not engine.has_work


@pytest.mark.parametrize("drafter", ["none", "no nodes"])
def test_without_drafts_a_prediction_and_a_method_are_refused(drafter: str) -> None:
    drafters = NoDrafter() if drafter == "none" else PredictionDrafter()
    engine = hash_engine(replace(ROOMY, max_drafts=0), drafters)
    with pytest.raises(InvalidRequest, match="prediction: is of no use here") as refused:
        engine.add(Request((1,), prediction=(1,)), "a")
    assert (refused.value.param, refused.value.code) == ("prediction", "unsupported_parameter")
    with pytest.raises(InvalidRequest, match=r"there are none$"):
        engine.add(Request((1,), Sampling(speculative=Speculative("prediction"))), "a")
    engine.add(Request((1,), Sampling(speculative=Speculative(max_nodes=9)), Stopping(max_tokens=2)), "a")
