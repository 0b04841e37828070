"""The forwards of a drafter's model over a cache: replayed from captured graphs where there are any, else launched.

R rows, D width of the features. Knows no text and no logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.attention import PagedAttention
from specdec.batch import Batch
from specdec.protocols import Attend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.graphs import Steps
    from specdec.kv import KVCache, Pool

MOST_ROWS = 512

# Inputs of rows -> hidden states [R, D]
Follow = Callable[["Mapping[str, Tensor]"], Tensor]
# (tokens [R], features [R, D] or None, positions [R], attend) -> hidden states [R, D]
Model = Callable[[Tensor, Tensor | None, Tensor, Attend], Tensor]


class Forwards:
    """Of a model whose rows take features of `width`, or only tokens where that is 0, and see no slot below `first`.
    Graphs are captured with all others over `pool`; none of a model that is not `capturable`, as what it launches
    depends on what it computes."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        pool: Pool,
        *,
        width: int = 0,
        first: int = 0,
        capturable: bool = True,
    ) -> None:
        self._model = model
        self._attention = PagedAttention(cache, pool.device, first)
        self._steps: Steps | None = None
        if pool.captured_blocks and capturable:
            from specdec.graphs import Steps  # needs triton, which a CPU does without

            extra = {"features": torch.zeros(1, width, device=pool.device, dtype=pool.dtype)} if width else {}
            self._steps = Steps(
                self._attention, self._launch, max_rows=MOST_ROWS, max_blocks=pool.captured_blocks, extra=extra
            )
            pool.serve(self)

    @torch.inference_mode()
    def capture(self) -> None:
        """See `Captured`."""
        if self._steps is not None:
            self._steps.capture()

    def release(self) -> None:
        """See `Captured`."""
        if self._steps is not None:
            self._steps.release()

    def run(self, batch: Batch, features_RD: Tensor | None) -> Tensor:
        """Hidden states `[R, D]`."""
        step = None if self._steps is None else self._steps.find(batch)
        if self._steps is None or step is None:
            inputs = self._attention.plan(batch)
            return self._model(inputs["tokens"], features_RD, inputs["positions"], self._attention)
        (hidden_RD,) = self._steps.run(step, batch, {} if features_RD is None else {"features": features_RD})
        return hidden_RD[: batch.num_rows].clone()  # kept while later steps overwrite what the graph writes

    def follow(self, batch: Batch) -> Follow | None:
        """What runs the rows of `batch` time and again without waiting; None where that is not captured. The rows'
        inputs that it is given are on the device, by their names in `specdec.graphs`, `features` among them; the others
        stay as the batch has them. Hidden states are valid until the next run of any forward."""
        step = None if self._steps is None else self._steps.find(batch)
        if self._steps is None or step is None:
            return None
        again = self._steps.repeat(step, batch)

        def run(inputs: Mapping[str, Tensor]) -> Tensor:
            (hidden_RD,) = again(inputs)
            return hidden_RD[: batch.num_rows]

        return run

    def _launch(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (self._model(inputs["tokens"], inputs.get("features"), inputs["positions"], self._attention),)
