"""Every family of heads in the engine, over one tiny target: the text is the target's, and what heads guess from is
what a dense recomputation says, wherever the engine has been."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.config import EngineConfig
from specdec.drafters.grow import Growth
from specdec.drafters.heads import Head, Target
from specdec.drafters.heads.checkpoint import open_head
from specdec.drafters.heads.eagle import Eagle
from specdec.drafters.heads.eagle3 import Eagle3
from specdec.drafters.heads.medusa import Medusa
from specdec.drafters.heads.mtp import Mtp
from specdec.engine import Engine
from specdec.models import build
from specdec.models.config import ModelConfig
from specdec.protocols import Model
from specdec.request import Request, Sampling, Speculative, Stopping
from tests.drafters import test_heads_eagle, test_heads_medusa, test_heads_mtp
from tests.drafters.head_files import LAYERS, RECORDED, VOCABULARY, WIDTH, recorded, write
from tests.drafters.heads import causal, dense_draft, engine_with, watched
from tests.fakes import Outcome, run, texts
from tests.tiny import LLAMA, filled

ENDS = (0,)
TOKEN_BYTES = [bytes([97 + token % 26]) for token in range(VOCABULARY)]
CONFIGS = {
    "plain": EngineConfig(96, 1024, max_drafts=24),
    "chunked": EngineConfig(96, 1024, max_rows=9, block_size=4),
    "preempting": EngineConfig(96, 160, block_size=8, max_drafts=24),
    "blocks of 1": EngineConfig(96, 1024, block_size=1, max_drafts=12),
}
SAMPLING = Sampling(temperature=0.8, top_p=0.95, presence_penalty=0.3, logit_bias={7: 1.0}, seed=5)
Opened = Head | Medusa


@functools.cache
def target() -> Model:
    raw = LLAMA | {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
    return filled(build(ModelConfig.from_dict(raw, "tiny")), raw)


def seen_by_heads() -> Target:
    return Target(LAYERS, WIDTH, VOCABULARY, target().embed, target().logits)


def from_record(case: str) -> Callable[[Path], Opened]:
    def opened(folder: Path) -> Opened:
        config, tensors, _ = recorded(case)
        return open_head(write(folder, config, tensors), seen_by_heads())

    return opened


def eagle(variant: str) -> Callable[[Path], Opened]:
    def opened(folder: Path) -> Opened:
        says = test_heads_eagle.VARIANTS[variant]
        tensors = test_heads_eagle.tensors_of(variant)
        # What it goes on from is never normed, and would grow from guess to guess, as what rounding leaves of it would.
        tensors["fc.weight"] = tensors["fc.weight"] / 2
        write(folder, test_heads_eagle.CONFIG | says.get("config", {}), tensors)
        return open_head(folder, seen_by_heads())

    return opened


def mtp(body: str, spelling: str) -> Callable[[Path], Opened]:
    def opened(folder: Path) -> Opened:
        _, _, raw, tensors = test_heads_mtp.made(body, spelling)
        return open_head(write(folder, raw, tensors), seen_by_heads())

    return opened


def medusa(folder: Path) -> Opened:
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    return open_head(write(folder, config, test_heads_medusa.weights(1)), seen_by_heads())


FAMILIES: dict[str, Callable[[Path], Opened]] = {
    **{path.name: from_record(path.name) for path in sorted(RECORDED.iterdir())},
    "eagle": eagle("llama 3: fc without a bias"),
    "eagle, norms and bias": eagle("add_para_norm"),
    "eagle, two layers": eagle("two layers"),
    "mtp of deepseek": mtp("llama", "deepseek"),
    "mtp of mimo": mtp("qwen2", "mimo"),
    "mtp of qwen": mtp("qwen3_next", "qwen"),
    "medusa": medusa,
}


# One of each kind where the engine is hard on it.
HARD = ["eagle3-llama-residual-d2t", "eagle, norms and bias", "mtp of qwen", "peagle-qwen3", "medusa"]
CASES = [(family, "plain") for family in FAMILIES] + [
    (family, config) for config in CONFIGS if config != "plain" for family in HARD
]


def made(family: str) -> Opened:
    with tempfile.TemporaryDirectory() as folder:
        return FAMILIES[family](Path(folder))


def new_engine(head: Opened, config: EngineConfig) -> Engine:
    growth = Growth(depth=4, width=3, branch=3, floor=0.0)
    return engine_with(target(), head, config, token_bytes=TOKEN_BYTES, end_tokens=ENDS, growth=growth)


def requests() -> list[Request]:
    rng = random.Random(6)
    prompts = [tuple(rng.randrange(1, VOCABULARY) for _ in range(length)) for length in (1, 2, 7, 31)]
    prompts.append(prompts[3])
    return [
        Request(prompt, SAMPLING, Stopping(max_tokens=14), n=1 + (index == 2)) for index, prompt in enumerate(prompts)
    ]


@functools.cache
def root_only() -> dict[tuple[str, int], Outcome]:
    engine = new_engine(made("eagle"), replace(CONFIGS["plain"], max_drafts=0))
    return texts(run(engine, requests()))


@pytest.mark.parametrize(("family", "config"), CASES)
def test_the_text_is_the_targets_and_guesses_are_dense(
    family: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = made(family)
    engine = new_engine(head, CONFIGS[config])
    plain = new_engine(head, replace(CONFIGS[config], max_drafts=0))
    with watched(monkeypatch) as seen:
        first = run(engine, requests())
        second = run(engine, requests())
    assert texts(first) == texts(second) == root_only()
    for one in (1, 2):
        assert texts(run(plain, requests())) == root_only(), one
    assert engine.metrics.drafter_errors == 0
    assert engine.metrics.cached_prompt_tokens == plain.metrics.cached_prompt_tokens > 0
    (drafter,) = engine.drafting.drafters
    assert drafter.num_kept == 0  # type: ignore[attr-defined]
    levels = 4 if isinstance(head, Mtp | Eagle | Eagle3) else 3
    assert {len(row.path) for row in seen} == set(range(levels))
    for row in random.Random(3).sample(seen, 30):
        dense = dense_draft(head, target(), row.tokens, row.path)
        torch.testing.assert_close(row.logits_V, dense, atol=1e-4, rtol=0, msg=str(row))


@pytest.mark.parametrize("family", ["eagle3-llama", "medusa", "peagle-llama"])
def test_a_drafter_that_was_not_asked_for_a_while_guesses_from_the_same(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the policy mutes for some draws takes up again without a gap."""
    head = made(family)
    engine = new_engine(head, CONFIGS["plain"])
    ask, steps = engine.policy.ask, 0

    def deaf(grants):  # type: ignore[no-untyped-def]
        nonlocal steps
        steps += 1
        muted = frozenset(engine.drafting.names) if steps % 7 < 4 else frozenset()
        return [replace(grant, muted=muted) for grant in ask(grants)]

    monkeypatch.setattr(engine.policy, "ask", deaf)
    with watched(monkeypatch) as seen:
        assert texts(run(engine, requests())) == root_only()
    assert len(seen) > 40
    for row in random.Random(3).sample(seen, 40):
        dense = dense_draft(head, target(), row.tokens, row.path)
        torch.testing.assert_close(row.logits_V, dense, atol=1e-4, rtol=0, msg=str(row))


@pytest.mark.parametrize("family", ["eagle3-llama", "mtp of qwen", "peagle-llama", "medusa", "draft_model"])
def test_a_step_that_it_did_not_observe_leaves_no_wrong_guess(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed there. What it can no longer know it does not guess from, in this text and in those that share blocks
    with it."""
    head = causal(target()) if family == "draft_model" else made(family)
    engine = new_engine(head, CONFIGS["plain"])
    (drafter,) = engine.drafting.drafters
    observe, steps = drafter.observe, 0

    def deaf(*told):  # type: ignore[no-untyped-def]
        nonlocal steps
        steps += 1
        if steps % 4 == 0:
            raise RuntimeError("a step that fails")
        observe(*told)

    monkeypatch.setattr(drafter, "observe", deaf)
    with watched(monkeypatch) as seen:
        for _ in range(2):
            assert texts(run(engine, requests())) == root_only()
    assert engine.metrics.drafter_errors == steps // 4 > 0
    assert drafter.num_kept == 0  # type: ignore[attr-defined]
    for row in random.Random(3).sample(seen, min(40, len(seen))):
        dense = dense_draft(head, target(), row.tokens, row.path)
        torch.testing.assert_close(row.logits_V, dense, atol=1e-4, rtol=0, msg=str(row))


def test_what_waits_for_a_drafter_keeps_nothing_of_its_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is not asked for long holds its own texts' features, not those of all rows of their steps."""
    engine = new_engine(made("eagle3-llama"), CONFIGS["plain"])
    (drafter,) = engine.drafting.drafters
    ask = engine.policy.ask
    monkeypatch.setattr(
        engine.policy, "ask", lambda grants: [replace(one, muted=frozenset(drafter.names)) for one in ask(grants)]
    )
    for number in range(12):
        engine.add(Request(tuple(range(1, 9)), replace(SAMPLING, seed=number), Stopping(max_tokens=60)), f"r{number}")
    most = 0
    while engine.has_work:
        engine.step()
        held = [part for kept in drafter._voice._context._kept.values() for part in kept.waiting]  # type: ignore[attr-defined]
        rows = sum(map(len, held))
        assert sum(part.untyped_storage().nbytes() for part in held) == rows * WIDTH * 4
        most = max(most, rows)
    assert most > 12 * 10


def test_a_request_without_drafts_costs_the_drafter_nothing() -> None:
    engine = new_engine(made("eagle3-llama"), CONFIGS["plain"])
    off = [replace(one, sampling=replace(SAMPLING, speculative=Speculative(max_nodes=0))) for one in requests()]
    (drafter,) = engine.drafting.drafters
    for number, request in enumerate(off):
        engine.add(request, f"r{number}")
    while engine.has_work:
        engine.step()
        assert drafter.num_kept == 0  # type: ignore[attr-defined]


def test_medusa_heads_made_from_the_target_accept_everything() -> None:
    """A target without attention whose next token is a permutation of the last: head i looks it up i + 2 times."""
    size, generator = 16, torch.Generator().manual_seed(2)
    raw = LLAMA | {"vocab_size": size, "hidden_size": size, "num_hidden_layers": 1}
    model = filled(build(ModelConfig.from_dict(raw, "tiny")), raw)
    follows = torch.randperm(size, generator=generator)
    state = dict(model.named_parameters())  # type: ignore[attr-defined]
    with torch.no_grad():
        for name, parameter in state.items():
            parameter.zero_() if "proj" in name else parameter.fill_(1.0)
        state["model.embed_tokens.weight"].copy_(torch.eye(size))
        state["lm_head.weight"].copy_(torch.eye(size)[:, follows.argsort()] * 4)
    tensors = {}
    place = follows
    for number in range(3):
        place = follows[place]
        tensors[f"{number}.0.linear.weight"] = torch.zeros(size, size)
        tensors[f"{number}.0.linear.bias"] = torch.zeros(size)
        tensors[f"{number}.1.weight"] = torch.eye(size)[:, place.argsort()] * 4
    with tempfile.TemporaryDirectory() as folder:
        head = open_head(
            write(Path(folder), {"medusa_num_heads": 3}, tensors), Target(1, size, size, model.embed, model.logits)
        )
    engine = engine_with(
        model, head, CONFIGS["plain"], token_bytes=TOKEN_BYTES, end_tokens=(), growth=Growth(floor=0.0)
    )
    sampling = Sampling(temperature=0.0)
    emissions = run(engine, [Request((5, 3, int(follows[3])), sampling, Stopping(max_tokens=4 * 10 + 1))])
    assert [len(part.tokens) for part in emissions["r0", 0]] == [1, *[4] * 10]
