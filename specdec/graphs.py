"""Forwards that a GPU replays as captured graphs: one for each of a few numbers of rows, whatever the sequences, trees
and contexts of a batch. Knows no sequence, no tree and no policy.

R rows, L logits rows, D width, B blocks of all tables, W items of work, J joins.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.attention import PagedAttention
from specdec.batch import NOBODY, Batch
from specdec.kernels.gpu.attention import num_pieces, tile_sizes
from specdec.kernels.paged import Layout, PagedRows, Work
from specdec.kernels.work_list import ITEM_FIELDS, JOIN_FIELDS, Capacity
from specdec.protocols import Forward
from specdec.runner import TorchRunner, said
from specdec.staging import Staging, laid_out, room_for

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 513, 64))

Inputs = Mapping[str, Tensor]
# From a step's inputs, of which `tokens` and `positions` are int64 `[R]`, to what it computes, of R rows each.
Launch = Callable[[Inputs], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Tiles:
    """The part of a step's attention that one launch does: for layers of one kind (queries a key head, head size), the
    sequences with more than `fewer` rows, and at most `more` where that is not 0."""

    kind: tuple[int, int]
    rows: int
    fewer: int
    more: int
    pieces: int

    def capacity(self, num_rows: int) -> Capacity:
        """What a launch for batches of `num_rows` rows is made for."""
        return Capacity.of(num_rows, self.rows, self.pieces)

    def fill(self, layout: Layout, capacity: Capacity) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Its items `[W, ITEM_FIELDS]` and joins `[J, JOIN_FIELDS]` in a batch of that layout."""
        items = np.empty((capacity.items, ITEM_FIELDS), np.int32)
        joins = np.empty((capacity.joins, JOIN_FIELDS), np.int32)
        found = layout.work_list(tile_rows=self.rows, pieces=self.pieces, fewer=self.fewer, more=self.more)
        found.fill(items, joins, capacity)
        return items, joins


ROW_INPUTS = ("tokens", "positions", "slots", "prefix", "ancestors", "logit_rows")


def blank(num_rows: int, tiles: Sequence[Tiles], max_blocks: int) -> dict[str, Tensor]:
    """Inputs of the shapes and types of a step's, the block tables last and as long as they may be."""
    arrays = {name: torch.zeros(num_rows, dtype=torch.int64) for name in ROW_INPUTS}
    for index, part in enumerate(tiles):
        capacity = part.capacity(num_rows)
        arrays[f"items {index}"] = torch.zeros(capacity.items, ITEM_FIELDS, dtype=torch.int32)
        arrays[f"joins {index}"] = torch.zeros(capacity.joins, JOIN_FIELDS, dtype=torch.int32)
    return arrays | {"blocks": torch.zeros(max_blocks, dtype=torch.int32)}


class Step:
    """What `launch` does for `num_rows` rows, over tensors that stay where they are, and the graph that was captured of
    it. `extra` are further inputs, by name: what each holds of one row, `[1, ...]`, zeros.

    `memory` (uint8) is where all others lie. Steps may share it, as each brings its batch before it runs."""

    def __init__(
        self,
        attention: PagedAttention,
        launch: Launch,
        num_rows: int,
        tiles: Sequence[Tiles],
        max_blocks: int,
        extra: Inputs,
        memory: Tensor,
    ) -> None:
        self._attention, self._launch, self._tiles = attention, launch, tiles
        self._num_rows, self._block_size = num_rows, attention.cache.block_size
        self._memory = memory
        self._extra = {name: row.repeat(num_rows, *[1] * (row.ndim - 1)) for name, row in extra.items()}
        self.inputs: Inputs = laid_out(memory, blank(num_rows, tiles, max_blocks)) | self._extra
        self._rows = self._paged_rows()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def capture(self, staging: Staging, pool: Any) -> None:
        """Run once, so that all is compiled, and capture. A CPU captures nothing."""
        if not self._memory.is_cuda:
            return
        self.load(NOBODY, {}, staging)
        self.launch()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._outputs = self.launch()

    def load(self, batch: Batch, extra: Inputs, staging: Staging) -> None:
        """Bring a batch of at most `num_rows` rows to the inputs, without waiting. `extra` are on the device."""
        staging.move(self._arrays(batch.padded(self._num_rows)), self._memory)
        for name, value in extra.items():
            self._extra[name][: len(value)].copy_(value)

    def replay(self) -> tuple[Tensor, ...]:
        """What comes of the inputs; in rows of nobody, anything."""
        if self._graph is None:
            return self.launch()
        self._graph.replay()
        return self._outputs

    def launch(self) -> tuple[Tensor, ...]:
        """What is captured: nothing in it waits for the device, nor depends on what the inputs hold."""
        self._attention.place(self.inputs["slots"], self._rows)
        return self._launch(self.inputs)

    def _arrays(self, batch: Batch) -> dict[str, Tensor]:
        """The inputs, the block tables last: all but these have the same shape for every batch."""
        found = PagedRows.of(
            batch.tables_S, batch.rows_S, batch.lengths_S, batch.prefix_R, batch.ancestors_R, self._block_size
        )
        assert found.layout is not None
        logit_rows_R = torch.zeros(self._num_rows, dtype=torch.int64)
        logit_rows_R[: batch.num_logits] = batch.logit_rows_L
        rows = (batch.tokens_R, batch.positions_R, batch.slots_R, batch.prefix_R, batch.ancestors_R, logit_rows_R)
        arrays = dict(zip(ROW_INPUTS, rows, strict=True))
        for index, part in enumerate(self._tiles):
            items, joins = part.fill(found.layout, part.capacity(self._num_rows))
            arrays |= {f"items {index}": torch.from_numpy(items), f"joins {index}": torch.from_numpy(joins)}
        return arrays | {"blocks": found.blocks_B}

    def _paged_rows(self) -> PagedRows:
        inputs, work = self.inputs, dict[tuple[int, int], tuple[Work, ...]]()
        for index, part in enumerate(self._tiles):
            partials = part.capacity(self._num_rows).partials
            made = Work(inputs[f"items {index}"], inputs[f"joins {index}"], partials, part.rows)
            work[part.kind] = (*work.get(part.kind, ()), made)
        return PagedRows(
            inputs["blocks"],
            self._block_size,
            inputs["prefix"],
            inputs["ancestors"],
            self._attention.first,
            work=work,
        )


class Steps:
    """All steps of one forward over one cache, in two kinds: with large tiles of attention, for sequences with many
    rows, and without. On a CPU, where nothing can be captured, they are run each time: so they can be proved in the
    interpreter. `max_blocks` is the length of all block tables of a batch at most; rows of nobody come on top."""

    def __init__(
        self, attention: PagedAttention, launch: Launch, *, max_rows: int, max_blocks: int, extra: Inputs | None = None
    ) -> None:
        self._attention, self._launch = attention, launch
        self._max_blocks, self._extra = max_blocks, extra or {}
        self._rows = [count for count in ROWS if count <= max_rows]
        # What is repeated comes apart, so that it waits for no copy behind forwards that were asked for just before.
        self._staging, self._apart = Staging(attention.device), Staging(attention.device)
        self._tiles: list[Tiles] = []
        self._few = 0  # rows of a sequence that small tiles take
        self._made: dict[tuple[int, bool], Step] = {}
        self._graph_pool: Any = None
        self._memory = torch.empty(0, dtype=torch.uint8)  # of the inputs of whichever step runs

    def capture(self) -> None:
        """Make all of them now, the largest first: they share memory. What the cache holds in the scrap block is
        overwritten. Raises torch.OutOfMemoryError where there is too little."""
        begin = time.monotonic()
        self._prepare()
        for num_rows in reversed(self._rows):
            for is_wide in (False, True):
                if not is_wide or num_rows > self._few:
                    self._step(num_rows, is_wide)
        logger.info("captured %d graphs in %.1f s", len(self._made), time.monotonic() - begin)

    def release(self) -> None:
        """Let go of what was captured, with the memory that it took: it knows where the cache lay."""
        self._made, self._tiles, self._graph_pool = {}, [], None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def find(self, batch: Batch) -> Step | None:
        """The step that a batch is padded to, made now where it was not yet; None for one that is too large for any."""
        place = bisect_left(self._rows, batch.num_rows)
        if place == len(self._rows) or sum(map(len, batch.tables_S)) > self._max_blocks:
            return None
        self._prepare()
        return self._step(self._rows[place], max(end - first for first, end in batch.rows_S) > self._few)

    def run(self, step: Step, batch: Batch, extra: Inputs | None = None) -> tuple[Tensor, ...]:
        """What comes of a batch, `[R, ...]` each and perhaps more rows: valid until the next run."""
        step.load(batch, extra or {}, self._staging)
        return step.replay()

    def repeat(self, step: Step, batch: Batch) -> Callable[[Inputs], tuple[Tensor, ...]]:
        """What runs a batch that is brought now, each time with other numbers in some inputs of its rows: these are on
        the device. The last it saw of a block table's slots is `batch`'s to say; rows may see fewer."""
        step.load(batch, {}, self._apart)

        def run(inputs: Inputs) -> tuple[Tensor, ...]:
            for name, value in inputs.items():
                step.inputs[name][: len(value)].copy_(value)
            return step.replay()

        return run

    def _step(self, num_rows: int, is_wide: bool) -> Step:
        if (num_rows, is_wide) not in self._made:
            tiles = [part for part in self._tiles if is_wide or part.more]
            room = self._max_blocks + num_rows
            step = Step(self._attention, self._launch, num_rows, tiles, room, self._extra, self._memory)
            step.capture(self._staging, self._graph_pool)
            self._made[num_rows, is_wide] = step
        return self._made[num_rows, is_wide]

    def _prepare(self) -> None:
        """Find out in what tiles the attention of the layers is done, by running them once."""
        if self._tiles:
            return
        device, cache = self._attention.device, self._attention.cache
        if device != "cpu":
            self._graph_pool = torch.cuda.graph_pool_handle()
        self._attention.plan(NOBODY)
        alone = {"tokens": NOBODY.tokens_R.to(device), "positions": NOBODY.positions_R.to(device)}
        self._launch(alone | dict(self._extra))
        assert self._attention.rows is not None
        for num_shared, head_size in self._attention.rows.work:
            layers = [keys for keys in cache.keys if keys.shape[-1] == head_size]
            pieces = num_pieces(layers[0].device, min(map(len, layers)))
            few, many = tile_sizes(num_shared, head_size, layers[0].element_size())
            kind = (num_shared, head_size)
            self._tiles += [Tiles(kind, few, 0, few, pieces), Tiles(kind, many, few, 0, pieces)]
        self._few = min(part.more for part in self._tiles if part.more)
        room = room_for(blank(self._rows[-1], self._tiles, self._max_blocks + self._rows[-1]))
        self._memory = torch.zeros(room, dtype=torch.uint8, device=device)


class GraphRunner:
    """Satisfies `Runner`, with what a `TorchRunner` holds, and `Captured`: forwards with these `taps` are captured.
    Before they are, and for batches and taps that none was made for, the forward is the other runner's.

    The head is launched behind a graph: what a graph writes is kept for good, and of logits for each number of rows
    that would be gigabytes. So it reads no row that does not ask, either."""

    def __init__(self, runner: TorchRunner, *, max_rows: int, max_blocks: int, taps: Sequence[int] = ()) -> None:
        self.vocab_size, self.model, self.cache = runner.vocab_size, runner.model, runner.cache
        self._runner = runner
        self._max_rows, self._max_blocks = max_rows, max_blocks
        self._taps = tuple(taps)
        self._steps: Steps | None = None

    @torch.inference_mode()
    def capture(self) -> None:
        """See `Captured` and `Steps.capture`: the forward at each number of rows."""
        model, attention, taps = self.model, self._runner.attention, self._taps

        def launch(inputs: Inputs) -> tuple[Tensor, ...]:
            hidden_RD, tapped = model.forward(inputs["tokens"], inputs["positions"], attention, taps)
            return hidden_RD, *tapped

        self._steps = Steps(attention, launch, max_rows=self._max_rows, max_blocks=self._max_blocks)
        self._steps.capture()

    def release(self) -> None:
        """See `Captured`."""
        self._steps = None

    @torch.inference_mode()
    def forward(self, batch: Batch, taps: Sequence[int] = ()) -> Forward:
        """See `Runner` in `specdec/protocols.py`."""
        step = self.step_for(batch, taps)
        if self._steps is None or step is None:
            return self._runner.forward(batch, taps)
        hidden_RD, *tapped = self._steps.run(step, batch)
        # Taps are kept by drafters while later steps overwrite what the graph writes.
        taps_RD = [tap_RD[: batch.num_rows].clone() for tap_RD in tapped]
        logit_rows_L = step.inputs["logit_rows"][: batch.num_logits]
        return said(self.model, batch, hidden_RD[: batch.num_rows], taps_RD, logit_rows_L)

    def step_for(self, batch: Batch, taps: Sequence[int] = ()) -> Step | None:
        """The step that a forward replays, if any."""
        if self._steps is None or tuple(taps) != self._taps:
            return None
        return self._steps.find(batch)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Runner` in `specdec/protocols.py`."""
        self._runner.move(sources, targets)
