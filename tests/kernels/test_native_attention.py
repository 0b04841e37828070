"""Attention in C: the reference's numbers, and each row's bits whatever stands beside it."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.paged import PagedRows, visible
from specdec.kernels.tree_attention import native_tree_attention, serves, tree_attention

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C compiler here")
NUM_SLOTS = 300


def paged(blocks: list[int], prefix: list[int], ancestors: list[int], longest: int, block_size: int) -> PagedRows:
    """Rows of one sequence."""
    bounds = [(0, len(prefix))]
    return PagedRows.of([blocks], bounds, [longest], torch.tensor(prefix), torch.tensor(ancestors), block_size)


def slots_of(rows: PagedRows) -> list[int]:
    """The cache's slots of the one sequence, in order."""
    assert rows.layout is not None
    offsets = torch.arange(rows.block_size)
    return (rows.blocks_B[:, None] * rows.block_size + offsets).flatten()[: rows.layout.longest].tolist()


def scene(rng: random.Random) -> tuple[Tensor, Tensor, Tensor, PagedRows]:
    """Queries of a random tree under a context, over scattered slots."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    groups, shared, size = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([8, 16, 24, 64, 256])
    num_rows, prefix = rng.randint(1, 20), rng.randrange(200)
    ancestors = [1]
    for node in range(1, num_rows):
        ancestors.append(ancestors[rng.randrange(node)] | 1 << node)
    block_size = rng.choice([1, 4, 16])
    blocks = torch.randperm(NUM_SLOTS // block_size, generator=generator)[: -(-(prefix + num_rows) // block_size)]
    rows = paged(blocks.tolist(), [prefix] * num_rows, ancestors, prefix + num_rows, block_size)
    q_RHK = torch.randn(num_rows, groups * shared, size, generator=generator)
    keys, values = torch.randn(2, groups, NUM_SLOTS, size, generator=generator)
    return q_RHK, keys, values, rows


@pytest.mark.parametrize("window", [None, 1, 5, 50])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_it_gives_what_the_reference_gives(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(10):
        q_RHK, keys, values, rows = scene(rng)
        sinks = torch.linspace(-2, 3, q_RHK.shape[1]) if with_sinks else None
        out = native_tree_attention(q_RHK, keys, values, rows, scale=0.2, window=window, softcap=softcap, sinks=sinks)
        slots = slots_of(rows)
        seen_RN = visible(rows.prefix_R, rows.ancestors_R, len(slots), window=window)
        k, v = keys[:, slots].double(), values[:, slots].double()
        expected = tree_attention(q_RHK.double(), k, v, ~seen_RN, scale=0.2, softcap=softcap, sinks=sinks)
        torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=1e-5)


def test_rows_do_not_depend_on_company() -> None:
    """Alone, in a tree, and as the last token of a text that is already in the cache: the same bits."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(30):
        q_RHK, keys, values, rows = scene(rng)
        window = rng.choice([None, 6])
        out = native_tree_attention(q_RHK, keys, values, rows, scale=0.2, window=window)
        for row in range(len(q_RHK)):
            prefix, ancestors = int(rows.prefix_R[row]), int(rows.ancestors_R[row])
            path = [prefix + bit for bit in range(63) if ancestors >> bit & 1]
            slots = slots_of(rows)
            text = [*slots[:prefix], *(slots[place] for place in path)]
            alone = paged(text, [len(text) - 1], [1], len(text), 1)
            single = native_tree_attention(q_RHK[row : row + 1], keys, values, alone, scale=0.2, window=window)
            assert torch.equal(single[0], out[row])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    q_RHK = torch.randn(200, 6, 64, generator=torch.Generator().manual_seed(3))
    keys, values = torch.randn(2, 2, 256, 64, generator=torch.Generator().manual_seed(4))
    rows = paged(list(range(256)), list(range(200)), [1] * 200, 200, 1)
    before = torch.get_num_threads()
    outs = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            outs.append(native_tree_attention(q_RHK, keys, values, rows, scale=0.1))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outs)


def test_a_row_that_is_not_a_number_stays_one() -> None:
    q_RHK, keys, values, rows = scene(random.Random(5))
    q_RHK[0, 0, 0] = torch.nan
    out = native_tree_attention(q_RHK, keys, values, rows, scale=0.2)
    assert out[0, 0].isnan().all()
    assert not out[1:].isnan().any()


def test_what_it_serves() -> None:
    assert serves(64, torch.float32, "cpu")
    for size, dtype, device in [(60, torch.float32, "cpu"), (64, torch.bfloat16, "cpu"), (520, torch.float32, "cpu")]:
        assert not serves(size, dtype, device)
    assert not serves(64, torch.float32, "cuda")


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler"])
def test_without_a_working_compiler_torch_does_the_work(compiler: str, tmp_path: Path) -> None:
    code = (
        "import specdec, torch\n"
        "from specdec.kernels.native import library\n"
        "from specdec.kernels.tree_attention import serves\n"
        "assert library('tree_attention') is None and not serves(64, torch.float32, 'cpu')\n"
    )
    environment = {"SPECDEC_HOME": str(tmp_path), "PATH": "", "CC": compiler}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "runs in torch, slower" in run.stderr
