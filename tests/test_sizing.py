"""What is left of a GPU's memory for the KV cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec.drafters.memory import Memory
from specdec.errors import ConfigError
from specdec.kv import KVCache, Pool
from specdec.protocols import LayerShape
from specdec.sizing import GIB, fitting, room

LAYERS = [LayerShape(2, 16), LayerShape(1, 8)]


def test_the_cache_gets_its_share_less_what_is_used_and_what_forwards_need() -> None:
    assert room(100 * GIB, 16 * GIB, 4 * GIB, 0.9) == 70 * GIB
    assert room(10 * GIB, 9 * GIB, 4 * GIB, 0.9) == -4 * GIB


def test_blocks_fill_the_room_and_too_few_are_refused() -> None:
    assert fitting(1000, 99, least=10, utilization=0.9, max_model_len=150) == 10
    for left in (999, 0, -5):
        with pytest.raises(ConfigError, match=r"gpu_memory_utilization 0.9 leaves .* a context of 150 tokens"):
            fitting(left, 100, least=10, utilization=0.9, max_model_len=150)


def test_a_pool_is_made_larger_with_all_that_lies_in_its_blocks() -> None:
    pool = Pool(2, 4, "cpu", torch.float32)
    cache = KVCache(LAYERS, pool.num_blocks, pool.block_size, device=pool.device, dtype=pool.dtype)
    pool.own(cache)
    memory = Memory(lambda *_: torch.empty(0), LAYERS[:1], 32, pool)
    block_bytes = pool.num_bytes // 2
    # Keys and values of both layers for the target, of one for the drafter, and its feature.
    assert block_bytes == 4 * (2 * 4 * (2 * 16 + 8) + 2 * 4 * 2 * 16 + 32)
    pool.resize(7)
    assert pool.num_blocks == 7
    assert pool.num_bytes == 7 * block_bytes
    assert [keys.shape for keys in cache.keys] == [(2, 28, 16), (1, 28, 8)]
    assert [values.shape for values in cache.values] == [(2, 28, 16), (1, 28, 8)]
    assert memory.num_bytes == 7 * 32 * 4


PROGRAM = """
import sys
from pathlib import Path

from tests.fake_gpu import GRAPH, fake_gpu

memory = 2**31
with fake_gpu(memory=memory) as launches:
    from specdec.build import Options, build
    from specdec.request import Request, Stopping
    from tests.server.conftest import write_model

    folder = write_model(Path(sys.argv[1]) / "tiny")
    drafters = sys.argv[2]
    loaded = build(str(folder), Options(device="cuda", policy="fixed", drafter=drafters, max_rows=128, max_num_seqs=4))
    made, alive = launches.captured, launches.alive
    pool = loaded.engine.runner.cache
    for number in range(3):
        loaded.engine.add(Request((5, 6, 7 + number), stopping=Stopping(max_tokens=9)), str(number))
    while loaded.engine.has_work:
        loaded.engine.step()
    print(made, alive, launches.captured, pool.num_bytes, GRAPH, memory)
    # What is read back is no tree, but all that grows one was asked for.
    assert drafters == "none" or {"front_kernel", "hang_kernel"} <= {name for name, _ in launches.asked}
"""


@pytest.mark.parametrize("drafters", [pytest.param("none", marks=pytest.mark.slow), "layer_skip:1"])
def test_the_cache_leaves_room_for_all_graphs_and_none_is_captured_later(drafters: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), drafters]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr
    made, alive, later, num_bytes, graph, memory = map(int, result.stdout.split())
    assert made == later == 2 * alive  # once to see what they take, then over the cache of that size
    assert alive > (20 if drafters == "none" else 60)
    share = memory * 9 // 10 - alive * graph
    assert share - 2**22 <= num_bytes <= share
