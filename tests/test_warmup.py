"""What is launched before the first request comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.config import EngineConfig
from specdec.drawing import WIDTHS
from specdec.engine import Engine
from specdec.kernels.device import interpreted
from specdec.kernels.gpu import logprobs, mask, sample
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
