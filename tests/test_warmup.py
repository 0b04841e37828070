"""What is launched before the first request comes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.config import EngineConfig
from specdec.drafters.none import NoDrafter
from specdec.drawing import WIDTHS
from specdec.engine import Engine
from specdec.kernels.device import interpreted
from specdec.kernels.gpu import logprobs, mask, sample
from specdec.sequence import Grant
from specdec.tree import DraftTree
from specdec.warmup import warm_up
from tests.fakes import BigramRunner, letters


def test_what_requests_need_is_launched_before_they_come_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = set()
    for module, name in (
        (logprobs, "log_totals"),
        (logprobs, "top_rows"),
        (mask, "mask_rows"),
        (sample, "penalize_rows"),
        (sample, "add_rows"),
        (sample, "draw_rows"),
    ):
        launch = getattr(module, name)

        def noted(*args: Any, name: str = name, launch: Callable[..., Any] = launch) -> Any:
            launched.add((name, args[2]) if name == "top_rows" else name)
            return launch(*args)

        monkeypatch.setattr(module, name, noted)
    config = EngineConfig(max_model_len=96, num_slots=256, block_size=4)
    engine = Engine(BigramRunner(np.zeros((8, 8), np.float32)), [], config, new_text=letters, end_tokens=(0,))
    with interpreted():
        warm_up(engine)
    drawing = {"log_totals", "mask_rows", "penalize_rows", "add_rows", "draw_rows"}
    assert launched == {*drawing, *(("top_rows", width) for width in WIDTHS if width)}
    assert engine.metrics.steps == 0
    engine.scheduler.pool.check([])


@pytest.mark.parametrize("max_model_len", [5, 20, 96])
def test_trees_have_a_second_level_also_in_small_contexts(max_model_len: int) -> None:
    """Which nodes it has is chosen by kernels that the first does without."""
    depths: list[int] = []

    class Noting(NoDrafter):
        def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
            depths.extend(grant.depth for grant in grants)
            return super().draft(grants)

    config = EngineConfig(max_model_len, num_slots=256, block_size=4)
    runner = BigramRunner(np.zeros((8, 8), np.float32))
    warm_up(Engine(runner, [Noting()], config, new_text=letters, end_tokens=(0,)))
    assert max(depths) >= 2


PROGRAM = """
import random, sys

import torch

from tests.fake_gpu import fake_gpu

captured, seed = sys.argv[1] == "captured", 5
with fake_gpu() as launches:
    from specdec.config import EngineConfig
    from specdec.drafters.draft_model import Borrowed, CausalHead
    from specdec.drafters.model_drafter import ModelDrafter
    from specdec.drafters.recurrent import Recurrent
    from specdec.engine import Engine
    from specdec.graphs import GraphRunner
    from specdec.kv import Pool
    from specdec.models.config import ModelConfig
    from specdec.models.weights import random_model
    from specdec.request import Request, Sampling, Stopping
    from specdec.runner import TorchRunner
    from specdec.text import Detokenizer
    from specdec.warmup import _Everything, warm_up
    from tests.drafters_for_tests import RandomDrafter
    from tests.tiny import GEMMA

    raw = GEMMA | {"vocab_size": 1000}
    model = random_model(ModelConfig.from_dict(raw, "tiny"), device="cuda", dtype=torch.bfloat16, seed=1)
    config = EngineConfig(1500, 8 * 1600, max_rows=600, max_num_seqs=6)
    plain = TorchRunner(model, num_blocks=config.num_blocks, block_size=16, device="cuda", dtype=torch.bfloat16)
    pool = Pool(config.num_blocks, 16, "cuda", torch.bfloat16, captured_blocks=600 if captured else 0)
    head = CausalHead("layer_skip", model, 1000, depth=2)
    drafter = ModelDrafter(Recurrent(head, Borrowed(head, plain.cache, pool)), 1000)
    runner = plain
    if captured:
        runner = GraphRunner(plain, max_rows=64, max_blocks=600)
        runner.capture()
    new_text = lambda _: Detokenizer(lambda token: b"a")
    engine = Engine(runner, [drafter, RandomDrafter(6, 1000)], config, new_text=new_text, end_tokens=(0,))
    warm_up(engine)
    known = set(launches.asked)
    launches.waits.clear()
    print("kernels", *sorted({name for name, _ in known}))
    rng = random.Random(seed)
    asked = [
        *(Sampling(), Sampling(temperature=0.0, logprobs=3), Sampling(top_p=0.5, top_k=9, logprobs=0)),
        *(Sampling(repetition_penalty=1.3), Sampling(logit_bias={3: 1.0, 4: -100.0}, min_p=0.1)),
    ]
    for number, length in enumerate((1, 700, 2, 3, 15, 16, 17, 31, 33, 100, 500, 513)):
        prompt = tuple(rng.randrange(1000) for _ in range(length))
        stopping = Stopping(max_tokens=rng.choice((1, 3, 9)), min_tokens=rng.randrange(2))
        grammar = rng.choice((None, _Everything(1000)))
        engine.add(Request(prompt, rng.choice(asked), stopping, grammar), str(number))
        for _ in range(rng.randrange(3)):
            engine.step()
    while engine.has_work:
        engine.step()
    runner.move([40, 41], [90, 91])
    print("guesses", engine.metrics.acceptance.draft_tokens, "seed", seed)
    print("waits", *launches.waits)
    print("late", *sorted(launches.asked - known), sep="\\n")
"""


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_once_warm_no_request_waits_for_a_kernel_to_be_compiled_or_for_more_than_its_answer(captured: bool) -> None:
    """Prompts of any length, more rows than graphs take, guesses, grammars; on a GPU that only notes what is asked."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, "captured" if captured else "launched"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr
    first, second, waits, *late = result.stdout.splitlines()
    assert {"attend_kernel", "join_kernel", "guess_kernel", "draw_kernel", "top_kernel", "stage_kernel"} <= {
        *first.split()
    }
    assert ({"front_kernel", "hang_kernel"} <= {*first.split()}) is captured  # what grows trees unheard
    assert int(second.split()[1]) > 20, second
    assert waits == "waits", second
    assert late == ["late"], second
