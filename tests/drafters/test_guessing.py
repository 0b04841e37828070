"""Guesses of a whole level at once, by Triton's kernels in the interpreter, are those made row by row on the CPU; and
trees that grow from them are the same trees. Rounding may let guesses of near-equal value change places: these are
counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.drafters.grow import Growth
from specdec.drafters.guessing import Guessing, Place
from specdec.drafters.heads import Head
from specdec.drafters.heads.medusa import Medusa
from specdec.drafters.model_drafter import ModelDrafter
from specdec.drafters.survival import Draws, Guesses, Survival
from specdec.engine import Engine
from specdec.errors import ConstraintError
from specdec.kernels.device import interpreted
from specdec.request import Request, Sampling, Speculative, Stopping
from specdec.sequence import Sequence
from specdec.staging import Staging
from specdec.tree import DraftTree
from tests.drafters import test_families, test_recurrent
from tests.drafters.heads import engine_with
from tests.drafters.sequences import new_sequence
from tests.engine.test_same_tokens import CONFIGS, SPECS, TOKEN_BYTES
from tests.engine.test_same_tokens import requests as grammar_requests
from tests.fakes import Automaton, run, texts
from tests.grammar.small_tokenizer import END_IDS
from tests.kernels.cover import pairwise
from tests.no_sync import no_sync

VOCAB_SIZE = 45
ENDS = (0, 44)
OWN = torch.tensor([0, 3, 4, 7, 8, 9, 11, 20, 21, 33, 40, 44])
# Where `guess` has 8 places, a mask that leaves 3 fills some, one that leaves none fills none.
GRAMMARS: dict[str, Seq[int]] = {
    "wide": range(0, 45, 2),
    "narrow": (3, 7, 40),
    "complete": ENDS,
    "nothing": (),
}
DIMENSIONS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7, 2.0],
    "filters": [{}, {"top_k": 4, "min_p": 0.02}],
    "penalties": [{}, {"repetition_penalty": 1.7}, {"presence_penalty": 1.1, "frequency_penalty": -0.4}],
    "bias": [{}, {3: 4.0, 11: -100.0}],
    "stopping": [Stopping(), Stopping(min_tokens=4, stop_token_ids=(7, 8)), Stopping(ignore_eos=True)],
    "grammar": ["free", *GRAMMARS, "forbidden", "fails"],
    "places": [1, 3],
}
FREE = {name: values[0] for name, values in DIMENSIONS.items()} | {"temperature": 1.0}


def text(case: dict[str, Any], rng: random.Random) -> Sequence:
    """A text as the case says, some tokens long."""
    sampling = Sampling(
        temperature=case["temperature"], logit_bias=case["bias"], **case["filters"], **case["penalties"]
    )
    seq = new_sequence([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 9))], sampling=sampling)
    seq.request = replace(seq.request, stopping=case["stopping"])
    seq.seed, seq.end_tokens = rng.choice([rng.randrange(2**64), -1, 2**63]), frozenset(ENDS)
    if case["grammar"] in GRAMMARS:
        allowed = GRAMMARS[case["grammar"]]
        everything = dict.fromkeys(range(VOCAB_SIZE), 1)
        seq.constraint = Automaton({0: everything, 1: dict.fromkeys(allowed, 1)}, {}).start()
        seq.constraint.advance([0])
    elif case["grammar"] == "forbidden":
        seq.constraint = Automaton({0: {}}, {}).start()
    elif case["grammar"] == "fails":
        seq.constraint = Failing()  # type: ignore[assignment]
    return seq


class Failing:
    """A grammar whose backend fails on whatever is drafted."""

    def row(self, path: tuple[int, ...]) -> None:
        raise ConstraintError("no row here")


def level(cases: list[dict[str, Any]], survival: Survival, seed: int) -> list[Place]:
    """Places of one text a case: its root, and where it has 3, nodes that grammars allow."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    places: list[Place] = []
    for case in cases:
        draws = Draws(text(case, rng), survival, VOCAB_SIZE)
        allowed = GRAMMARS.get(case["grammar"]) or range(VOCAB_SIZE)
        paths = [(), (rng.choice(allowed),), (rng.choice(allowed), rng.choice(allowed))][: case["places"]]
        places += [(draws, path) for path in paths]
    return places


def check_alike(found: Guesses | None, expected: Guesses | None) -> int:
    """How many guesses are others. One that takes another's place has its chance there, so all chances are the same."""
    if found is None or expected is None:
        assert found is expected
        return 0
    assert found.kind == expected.kind
    assert len(found.tokens) == len(expected.tokens)
    np.testing.assert_allclose(found.chances_GN, expected.chances_GN, rtol=0, atol=1e-5)
    assert found.survival == pytest.approx(expected.survival, abs=1e-5)
    return sum(one != other for one, other in zip(found.tokens, expected.tokens, strict=True))


@pytest.mark.parametrize("targets", [None, OWN])
def test_a_level_guessed_at_once_is_the_level_guessed_row_by_row(targets: Tensor | None) -> None:
    survival, seed = Survival(), random.randrange(2**32)
    cases = pairwise(DIMENSIONS if targets is None else DIMENSIONS | {"filters": [{}], "places": [1]})
    places = level(cases, survival, seed)
    width = VOCAB_SIZE if targets is None else len(targets)
    logits_LW = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(places), width)).astype(np.float32))
    logits_LW[0, 5], logits_LW[1, 5], logits_LW[2] = torch.nan, torch.inf, -torch.inf
    before_LW = logits_LW.clone()
    expected = Guessing(VOCAB_SIZE, targets).guesses(logits_LW, places, 8)
    with interpreted():
        found = Guessing(VOCAB_SIZE, targets).guesses(logits_LW, places, 8)
    assert torch.equal(logits_LW.nan_to_num(9e9), before_LW.nan_to_num(9e9))
    moved = sum(map(check_alike, found, expected))
    print(f"{moved} guesses of {len(places)} rows changed places")
    assert moved <= 2
    assert {None if one is None else min(len(one.tokens), 4) for one in expected} >= {None, 2, 3, 4}
    assert expected[:3] == [None] * 3


def test_survival_is_that_of_the_temper_which_has_predicted_best() -> None:
    survival = Survival()
    places = level([FREE], survival, 3)
    logits_1V = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (1, VOCAB_SIZE)).astype(np.float32))
    kinds = set()
    for _ in range(3):
        with interpreted():
            (guesses,) = Guessing(VOCAB_SIZE, None).guesses(logits_1V, places, 4)
        assert guesses is not None
        assert guesses.survival == tuple(guesses.chances_GN[survival.temper(guesses.kind)])
        survival.learn(guesses, guesses.tokens[-1])
        kinds.add(guesses.kind)
    assert survival.temper(kinds.pop()) > 3


def test_between_the_logits_and_the_one_answer_nothing_waits_for_the_device() -> None:
    everything = {"filters": {"min_p": 0.1}, "penalties": {"presence_penalty": 1.0}, "bias": {1: 2.0}, "places": 3}
    places = level([FREE, FREE | everything | {"grammar": "wide"}], Survival(), 2)
    words = [(one.seq.constraint.row(path), False) for one, path in places]
    for targets in (None, OWN):
        guessing, staging = Guessing(VOCAB_SIZE, targets), Staging("cpu")
        logits_LW = torch.randn(len(places), VOCAB_SIZE if targets is None else len(targets))
        with interpreted(), no_sync():
            answer_LN = guessing.enqueue(logits_LW, places, words, 5, staging)
        assert (answer_LN.shape, answer_LN.dtype) == ((len(places), 5 * 9), torch.int32)


# Trees


def family(name: str) -> tuple[Engine, list[Request]]:
    """A head of `test_families` in its engine: penalties, a bias and noise."""
    engine = engine_with(
        test_families.target(),
        test_families.made(name),
        test_families.CONFIGS["plain"],
        token_bytes=test_families.TOKEN_BYTES,
        end_tokens=test_families.ENDS,
        growth=Growth(depth=3, width=2, branch=3),
    )
    return engine, [replace(one, sampling=replace(one.sampling, top_p=1.0)) for one in test_families.requests()]


def under_a_grammar(name: str) -> tuple[Engine, list[Request]]:
    head: Head | Medusa = test_recurrent.heads()[name]
    engine = engine_with(
        test_recurrent.target(),
        head,
        CONFIGS["plain"],
        token_bytes=TOKEN_BYTES,
        end_tokens=END_IDS,
        growth=Growth(depth=3, width=2, branch=3),
    )
    return engine, grammar_requests(SPECS["schema"], Sampling(presence_penalty=0.4, logit_bias={7: 2.0}, seed=3))


ENGINES: dict[str, Callable[[], tuple[Engine, list[Request]]]] = {
    "eagle": lambda: family("eagle"),
    "eagle 3 with a vocabulary of its own": lambda: family("eagle3-llama-residual-d2t"),
    "p-eagle": lambda: family("peagle-qwen3"),
    "medusa": lambda: family("medusa"),
    "draft model under a grammar": lambda: under_a_grammar("draft_model"),
    "reduced vocabulary under a grammar": lambda: under_a_grammar("reduced"),
}


@contextmanager
def interpreted_guesses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, guesses are made by the kernels, and nothing else is."""
    guesses = Guessing.guesses

    def at_once(self: Guessing, *told: Any) -> list[Guesses | None]:
        with interpreted():
            return guesses(self, *told)

    with monkeypatch.context() as patch:
        patch.setattr(Guessing, "guesses", at_once)
        yield


@contextmanager
def guessing_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[DraftTree, DraftTree]]]:
    """Every draft is made twice: on the CPU, then by the kernels, which is what the engine takes. Both trees."""
    (drafter,) = engine.drafting.drafters
    assert isinstance(drafter, ModelDrafter)
    draft, trees = drafter.draft, list[tuple[DraftTree, DraftTree]]()

    def twice(grants: Any) -> list[DraftTree]:
        expected = draft(grants)
        with interpreted_guesses(monkeypatch):
            found = draft(grants)
        trees.extend(zip(found, expected, strict=True))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(drafter, "draft", twice)
        yield trees


@pytest.mark.parametrize(
    "name",
    [
        "eagle 3 with a vocabulary of its own",
        "medusa",
        "p-eagle",
        "reduced vocabulary under a grammar",
        *[pytest.param(name, marks=pytest.mark.slow) for name in ("eagle", "draft model under a grammar")],
    ],
)
def test_trees_are_those_of_the_cpu_and_texts_the_targets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = ENGINES[name]()
    asked = [replace(one, stopping=Stopping(max_tokens=5), n=1) for one in asked[1:3]]
    plain, _ = ENGINES[name]()
    with guessing_at_once(engine, monkeypatch) as trees:
        told = texts(run(engine, asked))
    off = [replace(one, sampling=replace(one.sampling, speculative=Speculative(max_nodes=0))) for one in asked]
    assert told == texts(run(plain, off))
    assert engine.metrics.drafter_errors == 0
    assert engine.metrics.acceptance.draft_tokens > 0
    others = 0
    for found, expected in trees:
        same = (found.tokens, found.parents) == (expected.tokens, expected.parents)
        others += not same
        if same:
            assert found.scores == pytest.approx(expected.scores, abs=1e-5)
    print(f"{others} of {len(trees)} trees differ")
    assert len(trees) > 3
    assert others <= 1


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", ["medusa", "p-eagle", "eagle"])
def test_what_no_path_changes_is_guessed_for_all_levels_at_once(
    name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives the trees that growing level by level gives. Who goes on from its own guesses waits once a level."""
    engine, asked = ENGINES[name]()
    (drafter,) = engine.drafting.drafters
    draft, fetch, waits = drafter.draft, Staging.fetch, 0
    seen: list[tuple[int, DraftTree, DraftTree]] = []

    def counted(self: Staging, answer: Tensor) -> Any:
        nonlocal waits
        waits += 1
        return fetch(self, answer)

    def twice(grants: Any) -> list[DraftTree]:
        nonlocal waits
        with monkeypatch.context() as patch:
            patch.setattr(Draws, "ignores_path", False)
            expected = draft(grants)
        waits = 0
        with interpreted_guesses(monkeypatch) if kernels else nullcontext():
            found = draft(grants)
        seen.extend((waits, one, other) for one, other in zip(found, expected, strict=True))
        return found

    monkeypatch.setattr(Staging, "fetch", counted)
    monkeypatch.setattr(drafter, "draft", twice)
    free = Sampling(temperature=0.8, logit_bias={7: 1.0}, seed=5)
    run(engine, [replace(asked[2], sampling=free, stopping=Stopping(max_tokens=5), n=1)])
    assert engine.metrics.drafter_errors == 0
    for waited, found, expected in seen:
        assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
        assert found.scores == pytest.approx(expected.scores, abs=1e-5)
        depth = max(found.depths())
        levels = range(depth, 4) if name == "eagle" else [min(1, depth)]
        assert waited in (levels if kernels else [0])
    assert max(found.num_drafts for _, found, _ in seen) > 3


def test_penalties_and_grammars_look_at_the_path() -> None:
    for change, ignores in (
        ({}, True),
        ({"temperature": 0.0, "bias": {3: 4.0}, "stopping": Stopping(min_tokens=4)}, True),
        ({"penalties": {"presence_penalty": 0.1}}, False),
        ({"grammar": "wide"}, False),
    ):
        ((draws, _),) = level([FREE | change], Survival(), 0)
        assert draws.ignores_path is ignores
