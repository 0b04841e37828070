"""Paged attention for one step: planned once from the batch, then called by every layer.

R rows, H query heads, G key-value heads, J = H + G, K head size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec.batch import Batch
from specdec.kernels.device import on_gpu
from specdec.kernels.norm_rope import Rotary, rotate_and_write
from specdec.kernels.paged import PagedRows, Work
from specdec.kernels.tree_attention import paged_attention
from specdec.kv import KVCache
from specdec.staging import Staging


class PagedAttention:
    """The `Attend` of a step: `plan` it, then hand it to the model.

    No row sees a slot below `first`: a drafter whose rows pair a token with the feature of the one before has none in
    slot 0.
    """

    def __init__(self, cache: KVCache, device: str, first: int = 0) -> None:
        self.cache = cache
        self.device = device
        self.first = first
        self._slots_R = torch.empty(0, dtype=torch.int64, device=device)
        self._staging = Staging(device)
        self.rows: PagedRows | None = None

    def plan(self, batch: Batch) -> Mapping[str, Tensor]:
        """Take in where this step's rows lie and what they see; `tokens`, `positions` and `logit_rows` of the batch are
        returned as they lie on the device.

        On a GPU all comes in one copy that nothing waits for, and with it the work of the layers, cut for the kinds of
        them that the last step had: only the first step's is cut when a layer asks.
        """
        found = PagedRows.of(
            batch.tables_S,
            batch.rows_S,
            batch.lengths_S,
            batch.prefix_R,
            batch.ancestors_R,
            self.cache.block_size,
            first=self.first,
        )
        inputs = {"tokens": batch.tokens_R, "positions": batch.positions_R, "logit_rows": batch.logit_rows_L}
        if on_gpu(self._slots_R):
            found, inputs = self._moved(found, inputs | {"slots": batch.slots_R})
            self._slots_R = inputs["slots"]
        else:
            self._slots_R = batch.slots_R
        self.rows = found
        return inputs

    def _moved(self, found: PagedRows, inputs: dict[str, Tensor]) -> tuple[PagedRows, dict[str, Tensor]]:
        """Both on the device, with the work of layers of the kinds that are known."""
        from specdec.kernels.gpu.attention import work_lists  # needs triton, which a CPU does without

        assert found.layout is not None
        inputs |= {"blocks": found.blocks_B, "prefix": found.prefix_R, "ancestors": found.ancestors_R}
        cut = {}
        for num_shared, head_size in self.rows.work if self.rows is not None else ():
            keys_GNK = min((keys for keys in self.cache.keys if keys.shape[-1] == head_size), key=len)
            cut[num_shared, head_size] = work_lists(found.layout, num_shared, keys_GNK)
            for index, (part, _) in enumerate(cut[num_shared, head_size]):
                name = f"{num_shared} by {head_size}, {index}"
                inputs |= {f"items of {name}": torch.from_numpy(part.items)}
                inputs |= {f"joins of {name}": torch.from_numpy(part.joins)}
        there = self._staging.move(inputs)
        work = {
            (num_shared, head_size): tuple(
                Work(
                    there[f"items of {num_shared} by {head_size}, {index}"],
                    there[f"joins of {num_shared} by {head_size}, {index}"],
                    part.num_partials,
                    tile_rows,
                )
                for index, (part, tile_rows) in enumerate(parts)
            )
            for (num_shared, head_size), parts in cut.items()
        }
        blocks_B, prefix_R, ancestors_R = there["blocks"], there["prefix"], there["ancestors"]
        moved = PagedRows(
            blocks_B, found.block_size, prefix_R, ancestors_R, found.first, layout=found.layout, work=work
        )
        return moved, there

    def place(self, slots_R: Tensor, rows: PagedRows) -> None:
        """What `plan` finds, as tensors that the caller keeps: those of a captured graph, whose numbers may change
        between its replays."""
        self._slots_R, self.rows = slots_R, rows

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
        """`[R, H, K]`; see `Attend` in `specdec/protocols.py`."""
        assert self.rows is not None, "attention is called before it is planned"
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        q_RHK = rotate_and_write(qk_RJK, v_RGK, rotary, keys, values, self._slots_R)
        return paged_attention(q_RHK, keys, values, self.rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
