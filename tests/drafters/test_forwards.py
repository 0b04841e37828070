"""Drafters whose forwards are captured steps, on a CPU in Triton's interpreter: hidden states and texts as without."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.batch import Batch, Rows
from specdec.config import EngineConfig
from specdec.drafters.forwards import Forwards
from specdec.drafters.grow import Growth
from specdec.kernels.device import interpreted
from specdec.kv import KVCache, Pool
from specdec.request import Request, Sampling, Stopping
from tests.drafters.heads import PairHead, causal, engine_with
from tests.fakes import run, texts
from tests.tiny import tiny_model

VOCAB_SIZE, BLOCK_SIZE, WIDTH = 64, 4, 32
TOKEN_BYTES = [bytes([97 + token % 26]) for token in range(VOCAB_SIZE)]


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["pairs", "tokens"])
def test_hidden_states_are_those_of_forwards_that_are_launched(kind: str) -> None:
    target = tiny_model("llama", VOCAB_SIZE)
    head = PairHead(target, WIDTH, (1,)) if kind == "pairs" else causal(target)
    width, first = (WIDTH, 1) if kind == "pairs" else (0, 0)
    launched, captured = (
        Forwards(
            head.forward,
            KVCache(head.layers, 9, BLOCK_SIZE, device="cpu", dtype=torch.float32),
            Pool(9, BLOCK_SIZE, "cpu", torch.float32, captured_blocks=captured_blocks),
            width=width,
            first=first,
        )
        for captured_blocks in (0, 50)
    )
    generator = torch.Generator().manual_seed(4)
    steps = [
        [Rows.known([1, 2, 3], range(20, 26), first), Rows.known([4, 5], range(40, 42), first)],  # padded to 8
        [Rows([1, 2, 3], [7, 9, 11], [8, 8, 9], [8, 9, 10], [8, 8, 8], [1, 2, 5]), Rows.known([4, 5], [3], 3)],
        [Rows.known([6, 7, 8], range(9), first)],
    ]
    assert captured._steps is not None
    for parts in steps:
        batch = Batch.of(parts, BLOCK_SIZE)
        features = torch.randn(batch.num_rows, WIDTH, generator=generator) if width else None
        expected = launched.run(batch, features)
        with interpreted():
            found = captured.run(batch, features)
            kept = found.clone()
            captured.run(batch, features)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(found, kept)  # what was handed out is nobody else's
    assert len(captured._steps._made) == 3


@pytest.mark.parametrize("kind", ["pairs", "layer_skip"])
def test_texts_are_the_same_where_levels_are_captured(kind: str) -> None:
    target = tiny_model("llama", VOCAB_SIZE)
    head = PairHead(target, WIDTH, (0, 2)) if kind == "pairs" else causal(target, "layer_skip", 2)
    config = EngineConfig(32, 4 * 100, block_size=BLOCK_SIZE, max_drafts=4)
    requests = [Request((5, 9, 13, place), Sampling(seed=place), Stopping(max_tokens=7)) for place in (3, 40)]
    growth = Growth(depth=3, width=2, branch=2)
    written = []
    for captured_blocks in (0, 60):
        engine = engine_with(
            target,
            head,
            config,
            token_bytes=TOKEN_BYTES,
            end_tokens=(0,),
            growth=growth,
            captured_blocks=captured_blocks,
        )
        if captured_blocks:
            with interpreted():
                written.append(texts(run(engine, requests)))
        else:
            written.append(texts(run(engine, requests)))
        assert engine.metrics.drafter_errors == 0
        if kind == "layer_skip":  # of two layers two: it is the target
            assert engine.metrics.acceptance.accepted_tokens > 5
    assert written[0] == written[1]
