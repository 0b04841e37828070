"""Whole models whose layers run in Triton's interpreter: the logits and the tokens that plain torch gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.config import EngineConfig
from specdec.drafters.ngram import NgramDrafter
from specdec.kernels.device import interpreted
from specdec.kernels.norm_rope import Rotary, rotate_and_write
from specdec.request import Request, Sampling, Stopping
from tests.fakes import run, texts
from tests.models.dense import Dense
from tests.tiny import tiny_engine, tiny_model

FAMILIES = ["llama", "qwen3", "gemma3_text"]
VOCAB_SIZE = 60
# What moves or names memory, for us and for the interpreter, and so launches nothing that computes.
SILENT = {
    "arange", "atleast_2d", "copy_", "empty", "flatten", "new_empty", "set_", "slice", "split_with_sizes", "unsqueeze",
    "view",
}  # fmt: skip


class Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch is asked to compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name not in SILENT:
            self.operations[name] += 1
        return function(*args, **(kwargs or {}))


class Queries:
    """Satisfies `protocols.Attend`: rotates and writes, and attends to nothing."""

    def __init__(self, kv_heads: int, size: int) -> None:
        self.keys, self.values = torch.zeros(kv_heads, 8, size), torch.zeros(kv_heads, 8, size)

    def __call__(
        self,
        layer: int,
        qk_RJK: Tensor,
        v_RGK: Tensor,
        rotary: Rotary | None,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return rotate_and_write(qk_RJK, v_RGK, rotary, self.keys, self.values, torch.arange(len(qk_RJK)))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_taps_are_those_of_the_references(family: str) -> None:
    model = tiny_model(family, VOCAB_SIZE)
    tokens_R, positions_R = torch.arange(7) * 5, torch.arange(7)
    taps = tuple(range(len(model.layers) + 2))

    def forward(depth: int | None = None) -> list[Tensor]:
        hidden_RD, streams = model.forward(tokens_R, positions_R, Dense(), taps[: 2 if depth else None], depth)
        return [model.logits(hidden_RD), *streams]

    with torch.inference_mode():
        expected = [*forward(), *forward(1)]
        with interpreted():
            found = [*forward(), *forward(1)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_computes_nothing_around_the_linears_of_a_layer(family: str) -> None:
    model = tiny_model(family, VOCAB_SIZE)
    attend = Queries(model.layers[0].num_kv_heads, model.layers[0].head_size)
    model.embed(torch.arange(3))  # what is worked out once a process
    with torch.inference_mode(), interpreted(), Asked() as asked:
        model.forward(torch.arange(3), torch.arange(3), attend)
    scaled = {"mul": 1} if family == "gemma3_text" else {}  # the embedding
    assert asked.operations == {"embedding": 1, "linear": 4 * len(model.layers), **scaled}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_writes_the_same_tokens(family: str) -> None:
    config = EngineConfig(max_model_len=32, num_slots=192, block_size=8, max_drafts=6)
    asked = [
        Request((7, 8, 9, 7, 8), Sampling(temperature=0.0), Stopping(max_tokens=4)),
        Request((1, 2), Sampling(temperature=1.0, seed=3), Stopping(max_tokens=4)),
    ]

    def engine() -> Any:
        token_bytes = [bytes([97 + token % 26]) for token in range(VOCAB_SIZE)]
        return tiny_engine(family, [NgramDrafter()], config, token_bytes=token_bytes, end_tokens=(0,))

    told = texts(run(engine(), asked))
    with interpreted():
        assert texts(run(engine(), asked)) == told
