"""Trees whose levels a device grows by itself are those that grow level by level, with one wait for the device; and
whatever befalls them, texts are the target's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from specdec.batch import Batch
from specdec.config import EngineConfig
from specdec.drafters.forwards import Follow, Forwards
from specdec.drafters.grow import Growth
from specdec.drafters.heads import Head
from specdec.drafters.heads.medusa import Medusa
from specdec.drafters.model_drafter import ModelDrafter
from specdec.engine import Engine
from specdec.request import Request, Sampling, Stopping
from specdec.sequence import Grant
from specdec.staging import Staging
from specdec.tree import DraftTree
from tests.drafters.heads import causal, engine_with
from tests.drafters.test_families import CONFIGS, ENDS, TOKEN_BYTES, made, target
from tests.fakes import run, texts
from tests.no_sync import no_sync

HEADS: dict[str, Callable[[], Head | Medusa]] = {
    "eagle": lambda: made("eagle"),
    "eagle 3 with a vocabulary of its own": lambda: made("eagle3-llama-residual-d2t"),
    "mtp": lambda: made("mtp of mimo"),
    "draft model": lambda: causal(target()),
    "layer skip": lambda: causal(target(), "layer_skip", 1),
}
GROWTHS = {
    "wide": Growth(depth=4, width=8, branch=4, floor=0.0),
    "narrow": Growth(depth=5, width=2, branch=3, floor=0.0),
    "cut by the floor": Growth(depth=5, width=3, branch=3, floor=0.08),
    "by ranks": Growth(depth=4, width=3, branch=3, ranks=((0.6, 0.3, 0.1), (0.5, 0.2), (), (0.4,))),
    "one level": Growth(depth=1),
}


def launched(self: Forwards, batch: Batch) -> Follow:
    """In the place of `Forwards.follow`: what it would replay is launched, so that a CPU does it."""

    def again(inputs: Mapping[str, Tensor]) -> Tensor:
        chosen = replace(
            batch,
            tokens_R=inputs["tokens"],
            positions_R=inputs["positions"],
            slots_R=inputs["slots"],
            ancestors_R=inputs["ancestors"],
        )
        return self.run(chosen, inputs.get("features"))

    return again


@dataclass
class Drafted:
    """One draft of a text, made at once and level by level, and how often the first waited."""

    grant: Grant
    found: DraftTree
    expected: DraftTree
    waits: int


@contextmanager
def drafting_twice(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, changed: Callable[[Grant], Grant] = lambda grant: grant
) -> Iterator[list[Drafted]]:
    """Every draft is made at once, which is what the engine takes, then level by level, over the slots that the first
    has written; for grants as `changed`."""
    (drafter,) = engine.drafting.drafters
    assert isinstance(drafter, ModelDrafter)
    draft, fetch, waits, seen = drafter.draft, Staging.fetch, 0, list[Drafted]()

    def counted(self: Staging, answer: Tensor) -> Any:
        nonlocal waits
        waits += 1
        return fetch(self, answer)

    def twice(grants: Seq[Grant]) -> list[DraftTree]:
        nonlocal waits
        grants = [changed(grant) for grant in grants]
        waits = 0
        with monkeypatch.context() as patch:
            patch.setattr(Forwards, "follow", launched)
            found = draft(grants)
        seen.extend(Drafted(*both, waits) for both in zip(grants, found, draft(grants), strict=True))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "fetch", counted)
        patch.setattr(drafter, "draft", twice)
        yield seen


def new_engine(name: str, growth: Growth, config: EngineConfig = CONFIGS["plain"]) -> Engine:
    return engine_with(target(), HEADS[name](), config, token_bytes=TOKEN_BYTES, end_tokens=ENDS, growth=growth)


def requests(*, penalized: bool) -> list[Request]:
    """Texts of all kinds, side by side: lengths, temperatures, biases, bans; one whose path matters, if wanted."""
    rng = random.Random(6)
    asked = [
        (Sampling(temperature=0.0), Stopping(max_tokens=9)),
        (Sampling(temperature=0.8, top_k=12, seed=2), Stopping(max_tokens=7, min_tokens=5, stop_token_ids=(7, 8))),
        (Sampling(temperature=1.0, top_p=0.9, logit_bias={3: 4.0, 11: -100.0}, seed=-3), Stopping(max_tokens=9)),
        (Sampling(temperature=0.6, min_p=0.02, seed=2**63), Stopping(max_tokens=12, ignore_eos=True)),
        (Sampling(temperature=0.7, presence_penalty=0.5 * penalized, seed=4), Stopping(max_tokens=8)),
    ]
    return [
        Request(tuple(rng.randrange(1, len(TOKEN_BYTES)) for _ in range(length)), sampling, stopping)
        for length, (sampling, stopping) in zip((3, 9, 2, 17, 30), asked, strict=True)
    ]


def check_alike(seen: Seq[Drafted], most: int = 1) -> None:
    """All but a few trees, in which chances of nearly the same size change places, are the same."""
    others = 0
    for one in seen:
        same = (one.found.tokens, one.found.parents) == (one.expected.tokens, one.expected.parents)
        others += not same
        if same:
            assert one.found.scores == pytest.approx(one.expected.scores, abs=1e-5)
    print(f"{others} of {len(seen)} trees differ")
    assert others <= most


@pytest.mark.parametrize(
    ("name", "growth"),
    [
        pytest.param(name, growth, marks=() if place == other else pytest.mark.slow)
        for place, name in enumerate(HEADS)
        for other, growth in enumerate(GROWTHS)
    ],
)
def test_trees_are_those_that_grow_level_by_level(name: str, growth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(name, GROWTHS[growth])
    asked = requests(penalized=True)
    with drafting_twice(engine, monkeypatch) as seen:
        written = texts(run(engine, asked))
    plain = new_engine(name, GROWTHS[growth], replace(CONFIGS["plain"], max_drafts=0))
    assert written == texts(run(plain, asked))
    assert engine.metrics.drafter_errors == 0
    check_alike(seen)
    assert max(one.found.num_drafts for one in seen) >= (8 if growth != "by ranks" else 3)
    (drafter,) = engine.drafting.drafters
    assert drafter.num_kept == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", HEADS)
def test_a_draft_of_texts_whose_path_does_not_matter_waits_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(name, GROWTHS["narrow"])
    with drafting_twice(engine, monkeypatch) as seen:
        run(engine, requests(penalized=False))
    assert all(one.waits == (1 if one.found.num_drafts else one.waits) <= 1 for one in seen)
    assert max(max(one.found.depths()) for one in seen) > 3


@pytest.mark.parametrize("name", ["eagle", "draft model"])
def test_nothing_that_befalls_texts_and_blocks_gets_into_their_trees(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grants of all kinds, pauses, aborts, a pool too small for all: trees are those that grow level by level, and
    texts those without drafts."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    befall(name, seed, monkeypatch, num_texts=12)


def befall(name: str, seed: int, monkeypatch: pytest.MonkeyPatch, num_texts: int) -> None:
    """A run of an engine on which much falls, by a seed."""
    rng = random.Random(seed)
    growth = Growth(rng.randint(1, 6), rng.randint(1, 9), rng.randint(1, 6), rng.choice([0.0, 0.02, 0.1]))
    config = EngineConfig(48, 48 + 64, block_size=rng.choice([1, 4, 16]), max_rows=24, max_drafts=rng.randint(1, 40))
    engine = new_engine(name, growth, config)
    stems = [tuple(rng.randrange(1, len(TOKEN_BYTES)) for _ in range(12)) for _ in range(3)]
    asked: list[Request] = []
    aborted: set[str] = set()
    emitted: dict[str, list[int]] = {}

    def moody(grant: Grant) -> Grant:
        if not grant.drafts or rng.random() < 0.5:
            return grant
        slots = rng.randint(1, grant.slots)
        return replace(grant, drafts=rng.randint(0, grant.drafts), depth=rng.randint(1, grant.depth), slots=slots)

    with drafting_twice(engine, monkeypatch, moody) as seen:
        while len(asked) < num_texts or engine.has_work:
            if len(asked) < num_texts and rng.random() < 0.8:
                prompt = rng.choice(stems)[: rng.randint(1, 12)] + (rng.randrange(1, 9),) * rng.randint(0, 6)
                sampling = Sampling(
                    temperature=rng.choice([0.0, 0.8, 1.5]),
                    presence_penalty=rng.choice([0.0, 0.0, 0.4]),
                    logit_bias=rng.choice([{}, {2: 3.0, 5: -100.0}]),
                    seed=len(asked),
                )
                stopping = Stopping(max_tokens=rng.randint(2, 20), min_tokens=rng.choice([0, 2]))
                asked.append(Request(prompt, sampling, stopping))
                engine.add(asked[-1], f"r{len(asked) - 1}")
            if asked and rng.random() < 0.03:
                aborted.add(victim := f"r{rng.randrange(len(asked))}")
                engine.abort(victim)
            for emission in engine.step():
                emitted.setdefault(emission.seq.request_id, []).extend(emission.tokens)
    plain = new_engine(name, growth, replace(CONFIGS["plain"], max_drafts=0))
    for (name, _), outcome in texts(run(plain, asked)).items():
        tokens = emitted.get(name, [])
        assert tokens == [*outcome.tokens][: len(tokens) if name in aborted else None]
    assert engine.metrics.drafter_errors == 0
    (drafter,) = engine.drafting.drafters
    assert drafter.num_kept == 0  # type: ignore[attr-defined]
    check_alike(seen)


@pytest.mark.parametrize("name", ["eagle 3 with a vocabulary of its own", "draft model"])
def test_between_forwards_what_a_drafter_keeps_waits_for_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes of a target's step, and what its own forwards leave for the next."""
    engine = new_engine(name, GROWTHS["narrow"], CONFIGS["chunked"])
    (drafter,) = engine.drafting.drafters
    assert isinstance(drafter, ModelDrafter)
    voice, forward, watching = drafter._voice, Forwards.run, ExitStack()
    calls: list[str] = []

    def unwatched(self: Forwards, *told: Any) -> Tensor:
        watching.close()
        hidden_RD = forward(self, *told)
        watching.enter_context(no_sync())
        calls.append("forward")
        return hidden_RD

    def watched(call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def during(*told: Any) -> Any:
            calls.append(what)
            with watching, monkeypatch.context() as patch:
                patch.setattr(Forwards, "run", unwatched)
                watching.enter_context(no_sync())
                return call(*told)

        return during

    monkeypatch.setattr(drafter, "observe", watched(drafter.observe, "observe"))
    monkeypatch.setattr(voice, "begin", watched(voice.begin, "begin"))
    run(engine, requests(penalized=True))
    assert engine.metrics.drafter_errors == 0
    assert calls.count("forward") > 15
    assert {"begin", "observe"} <= {before for before, call in pairwise(calls) if call == "forward"}
