"""What forwards and drafts cost: measured once for the same facts, kept, and again where a file is no table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.overrides import TorchFunctionMode

from specdec.batch import Batch
from specdec.config import EngineConfig
from specdec.costs import ROWS, cost_table, drafter_costs, measure
from specdec.drafters.none import NoDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.drafting import Drafting
from specdec.engine import Engine
from specdec.protocols import Forward
from tests.fakes import BigramRunner, hash_engine, letters


def new_engine() -> Engine:
    config = EngineConfig(max_model_len=96, num_slots=256, block_size=4)
    runner = BigramRunner(np.zeros((8, 8), np.float32))
    return Engine(runner, [], config, new_text=letters, end_tokens=(0,))


def test_forwards_are_measured_once_for_the_same_facts(tmp_path: Path) -> None:
    engine = new_engine()
    table = cost_table(engine, {"model": "a"}, tmp_path)
    assert table.rows == ROWS
    assert all(0 < one <= other for one, other in zip(table.costs, table.costs[1:], strict=False))
    assert cost_table(engine, {"model": "a"}, tmp_path) == table
    assert len(list(tmp_path.iterdir())) == 1
    cost_table(engine, {"model": "b"}, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    engine.scheduler.pool.check([])


def test_of_the_logits_of_a_forward_that_is_timed_one_number_comes_to_the_host() -> None:
    fetched: list[int] = []

    class Noted(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") == "cpu":
                fetched.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    with Noted():
        measure(new_engine())
    assert set(fetched) == {1}


def test_forwards_are_timed_with_the_taps_that_steps_have() -> None:
    engine, drafter = new_engine(), NoDrafter()
    drafter.taps = (0, 2)
    engine.drafting = Drafting([drafter], 8, engine.metrics)
    taken: set[tuple[int, ...]] = set()
    inner = engine.runner.forward

    def noted(batch: Batch, taps: Sequence[int] = ()) -> Forward:
        taken.add(tuple(taps))
        return inner(batch, taps)

    engine.runner.forward = noted  # type: ignore[method-assign]
    measure(engine)
    assert taken == {(0, 2)}


def test_drafts_are_measured_by_drafter_and_leave_nothing_behind(tmp_path: Path) -> None:
    suffix = SuffixDrafter()
    engine = hash_engine(EngineConfig(512, 2048), NoDrafter(), suffix)
    costs = drafter_costs(engine, {"model": "a"}, tmp_path)
    assert costs.keys() == {"suffix"}
    assert costs["suffix"] > 0
    assert suffix.num_kept == 0
    assert not suffix._pools  # of texts that came to their end
    assert drafter_costs(engine, {"model": "a"}, tmp_path) == costs
    engine.scheduler.pool.check([])


@pytest.mark.parametrize("max_model_len", [2, 3, 4])
def test_drafts_are_measured_also_in_the_smallest_contexts(max_model_len: int, tmp_path: Path) -> None:
    engine = hash_engine(EngineConfig(max_model_len, 128), SuffixDrafter())
    assert drafter_costs(engine, {}, tmp_path).keys() == {"suffix"}
    engine.scheduler.pool.check([])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"ms": []}', '{"ms": {"x": 1}}', '{"ms": {"1": "fast"}}', '{"rows": 1}']
)
def test_a_file_that_is_no_table_is_measured_anew(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = new_engine()
    cost_table(engine, {}, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert cost_table(engine, {}, tmp_path).rows == ROWS
    assert "measuring costs again" in caplog.text
    assert file.read_text() != text
