"""Steps that a GPU captures, on a CPU: the same answers as without, whatever shares a number of rows, and nothing in
them that waits for the device or depends on what a batch holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.batch import Batch, Rows
from specdec.graphs import ROWS, GraphRunner
from specdec.kernels.device import interpreted
from specdec.protocols import Forward
from specdec.runner import TorchRunner
from specdec.staging import Staging
from tests.no_sync import no_sync
from tests.tiny import LLAMA, tiny_model

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 4, 40, 96
TAPS = (1,)


def text(blocks: Sequence[int], length: int, *, start: int = 0, asking: int = 1) -> Rows:
    """Consecutive tokens of a text; the last few ask for logits."""
    tokens = [(7 * place + blocks[0]) % VOCAB_SIZE for place in range(start, start + length)]
    known = Rows.known(blocks, tokens, start)
    return Rows(known.blocks, known.tokens, known.positions, known.slots, known.prefix, known.ancestors, asking)


def tree(blocks: Sequence[int], root: int, parents: Sequence[int]) -> Rows:
    """A tree under the slot `root`, all of whose nodes ask."""
    depths, ancestors = [0], [1]
    for node, parent in enumerate(parents, 1):
        depths.append(depths[parent] + 1)
        ancestors.append(ancestors[parent] | 1 << node)
    count = len(depths)
    tokens = [(11 * node + root) % VOCAB_SIZE for node in range(count)]
    slots = range(root, root + count)
    return Rows(blocks, tokens, [root + depth for depth in depths], slots, [root] * count, ancestors, count)


# One after the other, over one cache: prompts, then trees over them. The long chain takes Gemma's larger tiles.
STEPS: Mapping[str, Sequence[Rows]] = {
    "two prompts": [text([3, 5, 7, 8], 9), text([9, 2, 4, 6], 5)],
    "a root": [text([9, 2, 4, 6], 1, start=5)],
    "trees": [tree([3, 5, 7, 8], 9, [0, 0, 1]), tree([9, 2, 4, 6], 5, [0, 1, 2, 0])],
    "a chunk beside a root": [text([11, 12, 13], 6, asking=0), tree([3, 5, 7, 8], 9, [])],
    "a long chain": [tree([9, 2, 4, 6, 20, 21, 22, 23], 5, list(range(9)))],
    "the chunk's end": [text([11, 12, 13], 4, start=6)],
}


def runners(family: str, max_rows: int = 16) -> tuple[TorchRunner, GraphRunner]:
    """A plain runner, and one with steps over a cache of its own."""
    model = tiny_model(family, VOCAB_SIZE)
    plain, inner = (TorchRunner(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE) for _ in range(2))
    graphs = GraphRunner(inner, max_rows=max_rows, max_blocks=64, taps=TAPS)
    with interpreted():
        graphs.capture()
    return plain, graphs


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_step_that_is_padded_gives_what_the_plain_runner_gives(family: str) -> None:
    plain, graphs = runners(family)
    for name, parts in STEPS.items():
        batch = Batch.of(parts, BLOCK_SIZE)
        expected = plain.forward(batch, TAPS)
        with interpreted():
            found = graphs.forward(batch, TAPS)
        assert found.logits_LV.shape == expected.logits_LV.shape, name
        torch.testing.assert_close(found.logits_LV, expected.logits_LV, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.taps[0], expected.taps[0], atol=1e-4, rtol=1e-4)
        # Only the scrap block may hold what rows of nobody wrote.
        for mine, other in zip(graphs.cache.keys, plain.cache.keys, strict=True):
            torch.testing.assert_close(mine[:, BLOCK_SIZE:], other[:, BLOCK_SIZE:], atol=1e-4, rtol=1e-4)


def test_what_a_step_launches_waits_for_nothing_and_is_the_same_for_every_batch() -> None:
    _, graphs = runners("gemma3_text", max_rows=8)
    batches = [
        Batch.of([tree([9], 0, [0]), tree([10, 11, 12], 8, []), tree([4, 2], 3, [0, 1, 1])], BLOCK_SIZE),
        Batch.of([tree([block], 1, []) for block in range(1, 6)], BLOCK_SIZE),
        Batch.of([text([11, 12, 13], 7, asking=0), text([1], 1)], BLOCK_SIZE),
    ]
    launched = []
    for batch in batches:
        with torch.inference_mode(), interpreted():
            step = graphs.step_for(batch, TAPS)
            assert step is not None
            step.load(batch, {}, Staging("cpu"))
            with no_sync(), traced() as operations:
                step.launch()
        launched.append(operations)
    assert len(launched[0]) > 20
    assert launched[0] == launched[1] == launched[2]


def test_what_no_graph_was_made_for_is_run_as_it_is() -> None:
    _, graphs = runners("llama", max_rows=8)
    taken: list[int] = []
    inner = graphs._runner.forward

    def noted(batch: Batch, taps: Sequence[int] = ()) -> Forward:
        taken.append(batch.num_rows)
        return inner(batch, taps)

    graphs._runner.forward = noted  # type: ignore[method-assign]
    small, large = (Batch.of([text([3, 5, 7, 8], length)], BLOCK_SIZE) for length in (8, 9))
    full, long = (Batch.of([text(list(range(1, 33)), 1, start=127)] * count, BLOCK_SIZE) for count in (2, 3))
    with interpreted():
        for batch, taps in ((small, TAPS), (large, TAPS), (small, ()), (full, TAPS), (long, TAPS)):
            graphs.forward(batch, taps)
    assert taken == [9, 8, 3]  # too many rows; other taps; too long block tables


def test_rows_of_nobody_are_rows() -> None:
    batch = Batch.of([tree([3, 5], 2, [0, 0]), text([7], 1)], BLOCK_SIZE)
    padded = batch.padded(7)
    assert padded.num_rows == padded.num_logits == 7
    assert padded.tokens_R.tolist() == [*batch.tokens_R.tolist(), 0, 0, 0]
    assert padded.slots_R.tolist()[4:] == padded.prefix_R.tolist()[4:] == [0, 0, 0]
    assert padded.ancestors_R.tolist()[4:] == [1, 1, 1]
    assert padded.rows_S == ((0, 3), (3, 4), (4, 5), (5, 6), (6, 7))
    assert padded.tables_S[2:] == ((0,), (0,), (0,))
    assert batch.padded(4) is batch
    quiet = Batch.of([text([3, 5], 5, asking=2)], BLOCK_SIZE)
    assert quiet.padded(8).logit_rows_L.tolist() == [3, 4]


def test_numbers_of_rows_rise() -> None:
    assert list(ROWS) == sorted(set(ROWS))


def test_what_graphs_keep_is_as_wide_as_the_model_and_logits_outlast_the_next_forward() -> None:
    _, graphs = runners("llama")
    one, other = (Batch.of([text([3, 5, 7, 8], length)], BLOCK_SIZE) for length in (9, 7))
    with torch.inference_mode(), interpreted():
        step = graphs.step_for(one, TAPS)
        assert step is not None
        step.load(one, {}, Staging("cpu"))
        assert {tuple(out.shape) for out in step.launch()} == {(16, LLAMA["hidden_size"])}
        first = graphs.forward(one, TAPS).logits_LV
        kept = first.clone()
        graphs.forward(other, TAPS)
    assert torch.equal(first, kept)


def test_chunks_that_ask_for_nothing_read_no_head() -> None:
    _, graphs = runners("llama")
    with interpreted():
        forward = graphs.forward(Batch.of([text([3, 5, 7, 8], 9, asking=0)], BLOCK_SIZE), TAPS)
    assert forward.logits_LV.shape == (0, VOCAB_SIZE)
    assert forward.taps[0].shape[0] == 9


# What reaches torch's dispatcher


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        shapes = [tuple(value.shape) for value in (*args, out) if isinstance(value, Tensor)]
        self.operations.append((str(func), tuple(shapes)))
        return out


@contextmanager
def traced() -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """The operations inside, with the shapes of what they take and give."""
    with _Trace() as trace:
        yield trace.operations
