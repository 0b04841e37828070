"""A whole engine over Triton's kernels, in the interpreter: the same tokens as without."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.config import EngineConfig
from specdec.graphs import GraphRunner
from specdec.kernels.device import interpreted
from specdec.protocols import Drafter
from specdec.request import Request, Sampling, Stopping
from specdec.runner import TorchRunner
from tests.drafters_for_tests import OracleDrafter, RandomDrafter
from tests.fakes import run, texts
from tests.tiny import tiny_engine

VOCAB_SIZE = 64
TOKEN_BYTES = [bytes([97 + token % 26]) for token in range(VOCAB_SIZE)]
MAX_MODEL_LEN = 40


@pytest.mark.parametrize(
    ("family", "captured"),
    [
        ("llama", True),
        ("gemma3_text", False),
        pytest.param("gemma3_text", True, marks=pytest.mark.slow),
    ],
)
def test_the_same_tokens_in_triton(family: str, captured: bool) -> None:
    """Trees, shared prefixes, windows, a pool so small that sequences are preempted; with the steps that a GPU
    captures, and launched kernel by kernel."""
    shared = tuple(7 * place % 61 + 3 for place in range(10))
    prompts = [(*shared, 5, 6), (*shared, 9), *(tuple(range(start, start + 24)) for start in (3, 14, 26, 38))]
    requests = [
        Request(prompt, Sampling(temperature=0.8, seed=seed), Stopping(max_tokens=14))
        for seed, prompt in enumerate(prompts)
    ]
    roomy = EngineConfig(MAX_MODEL_LEN, 8 * (MAX_MODEL_LEN + 64), block_size=4)
    told = texts(run(tiny_engine(family, [], roomy, token_bytes=TOKEN_BYTES, end_tokens=(0,)), requests))
    truth = {request.prompt: told[f"r{number}", 0].tokens for number, request in enumerate(requests)}
    drafters: list[Drafter] = [
        OracleDrafter(truth, VOCAB_SIZE, mistake_rate=0.1, branch_rate=0.5),
        RandomDrafter(6, VOCAB_SIZE),
    ]
    config = EngineConfig(MAX_MODEL_LEN, MAX_MODEL_LEN + 64, block_size=4, max_drafts=16)
    engine = tiny_engine(family, drafters, config, token_bytes=TOKEN_BYTES, end_tokens=(0,))
    with interpreted():
        if captured:
            assert isinstance(engine.runner, TorchRunner)
            runner = GraphRunner(engine.runner, max_rows=24, max_blocks=400)
            runner.capture()
            engine.runner = runner
        got = texts(run(engine, requests))
    assert got == told
    assert engine.metrics.acceptance.accepted_tokens > 5
    assert engine.metrics.drafter_errors == 0
    assert engine.metrics.preemptions > 0
