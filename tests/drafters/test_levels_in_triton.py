"""Trees that grow on a device, by the forwards that a GPU captures and by Triton's kernels in its interpreter: those of
the CPU, and between two answers nothing waits."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.config import EngineConfig
from specdec.drafters.grow import Growing, Growth
from specdec.drafters.levels import Following
from specdec.drafters.model_drafter import ModelDrafter
from specdec.drafters.recurrent import Recurrent
from specdec.engine import Engine
from specdec.kernels.device import interpreted
from specdec.request import Request, Sampling, Stopping
from specdec.sequence import Grant
from specdec.staging import Staging
from specdec.tree import DraftTree
from tests.drafters.heads import engine_with
from tests.drafters.test_families import ENDS, TOKEN_BYTES, target
from tests.drafters.test_levels import HEADS, Drafted, check_alike
from tests.fakes import run, texts
from tests.no_sync import no_sync
from tests.test_graphs import traced

CONFIG = EngineConfig(64, 512, block_size=4, max_drafts=8)
GROWTH = Growth(depth=3, width=2, branch=2, floor=0.0)
BIASED = Sampling(temperature=0.8, top_k=9, logit_bias={3: 2.0}, seed=2)


def new_engine(name: str, captured_blocks: int) -> Engine:
    return engine_with(
        target(),
        HEADS[name](),
        CONFIG,
        token_bytes=TOKEN_BYTES,
        end_tokens=ENDS,
        growth=GROWTH,
        captured_blocks=captured_blocks,
    )


def drafter_of(engine: Engine) -> ModelDrafter:
    (drafter,) = engine.drafting.drafters
    assert isinstance(drafter, ModelDrafter)
    return drafter


def voice_of(engine: Engine) -> Recurrent:
    voice = drafter_of(engine)._voice
    assert isinstance(voice, Recurrent)
    return voice


@contextmanager
def drafting_in_triton(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Drafted]]:
    """Every draft is made by the kernels, which is what the engine takes, then on the CPU: what a drafter keeps of the
    texts is made there, too."""
    drafter = drafter_of(engine)
    forwards = voice_of(engine)._context._forwards  # type: ignore[attr-defined]
    steps, forwards._steps = forwards._steps, None
    draft, fetch, waits, seen = drafter.draft, Staging.fetch, 0, list[Drafted]()

    def counted(self: Staging, answer: Tensor) -> Any:
        nonlocal waits
        waits += 1
        return fetch(self, answer)

    def twice(grants: Seq[Grant]) -> list[DraftTree]:
        nonlocal waits
        waits = 0
        with interpreted(), monkeypatch.context() as patch:
            patch.setattr(forwards, "_steps", steps)
            found = draft(grants)
        seen.extend(Drafted(*both, waits) for both in zip(grants, found, draft(grants), strict=True))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "fetch", counted)
        patch.setattr(drafter, "draft", twice)
        yield seen


@pytest.mark.parametrize(
    "name",
    [
        "eagle 3 with a vocabulary of its own",
        *[pytest.param(name, marks=pytest.mark.slow) for name in HEADS if not name.startswith("eagle 3")],
    ],
)
def test_trees_are_those_of_the_cpu_and_only_texts_whose_path_matters_wait_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        Request((5, 9, 3), BIASED, Stopping(max_tokens=7)),
        Request((7, 8), Sampling(temperature=0.0, presence_penalty=0.3), Stopping(max_tokens=5)),
    ]
    engine = new_engine(name, captured_blocks=60)
    with drafting_in_triton(engine, monkeypatch) as seen:
        written = texts(run(engine, asked))
    assert written == texts(run(new_engine(name, captured_blocks=0), asked))
    assert engine.metrics.drafter_errors == 0
    check_alike(seen)
    waits = [one.waits for one in seen]
    print(f"waits {waits}")
    assert max(waits) == 1 + GROWTH.depth  # of both
    assert 1 in waits  # of the first alone, once the other has ended


def test_between_the_roots_and_the_answer_nothing_waits_and_all_drafts_ask_for_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = new_engine("eagle", captured_blocks=60)
    voice, fetch = voice_of(engine), Staging.fetch
    follow, stack, asked_for = voice.follow, ExitStack(), list[list[Any]]()

    def watched(growing: Seq[Growing], width: int, num_rows: int) -> Following | None:
        following = follow(growing, width, num_rows)
        if following is not None:
            stack.enter_context(no_sync())
            asked_for.append(stack.enter_context(traced()))
        return following

    def heard(self: Staging, answer: Tensor) -> Any:
        stack.close()
        return fetch(self, answer)

    for _ in range(2):  # its buffers are made when they are first used
        drafter_of(engine)._guessing.staging(torch.device("cpu")).move({"anything": np.zeros(1)})
    with drafting_in_triton(engine, monkeypatch) as seen, monkeypatch.context() as patch:
        patch.setattr(voice, "follow", watched)
        patch.setattr(Staging, "fetch", heard)
        for prompt in ((5, 9, 3), (8, 2, 2, 2, 17, 30, 1)):
            engine.add(Request(prompt, BIASED, Stopping(max_tokens=GROWTH.depth + 2)), "one")
            while not seen or not seen[-1].found.num_drafts:
                engine.step()
            engine.abort("one")
            seen.clear()
    assert engine.metrics.drafter_errors == 0
    print(f"{len(asked_for[0])} operations")
    assert len(asked_for[0]) > 100
    assert asked_for[0] == asked_for[1]
