"""What rows of scores go through before anything is drawn from them, all at once where the logits are: penalties,
biases, bans, masks (docs/design.md, 3). A target's rows and a drafter's are all one here.

L rows, V vocabulary, N entries of lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.draws import Counted, Draws, Listed
from specdec.kernels.mask import mask_rows
from specdec.kernels.sample import GREEDY_BELOW
from specdec.kernels.sample_rows import add_rows, penalize_rows
from specdec.mask import TokenMask
from specdec.sampling import bans, is_penalized
from specdec.sequence import Sequence

# Of rows that nobody looks at: temperature, top-k, top-p and min-p; repetition, presence and frequency.
GREEDY = (0.0, 0.0, 1.0, 0.0)
UNPENALIZED = (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class RowsOf:
    """Rows of one text, from `first` on: the draft tokens that lead to each from its last known one."""

    seq: Sequence
    first: int
    paths: Seq[tuple[int, ...]]


def told(asked: Seq[RowsOf], mask: TokenMask) -> dict[str, NDArray[Any] | Tensor]:
    """All that a device must be told of the rows of `mask`, by name: how each is drawn, and what changes its scores,
    where anything does. Rows that nobody asked for are greedy ones. `mask` is filled."""
    arrays: dict[str, NDArray[Any] | Tensor] = {
        **_values(asked, mask.num_rows),
        **_penalties(asked, mask.num_rows),
        **_additions(asked, mask),
    }
    masked_L = mask.masked_L
    if masked_L.any():
        arrays |= {"masked": masked_L, "words": mask.stacked()}
    return arrays


def scored(logits_LV: Tensor, there: Mapping[str, Tensor], *, own: bool = False) -> Tensor:
    """The scores of the rows, by what `told` says, now on their device. A copy, where anything changes; the logits
    themselves if they are the caller's `own`."""
    scores_LV = logits_LV
    if not own and {"counts", "values", "words"} & there.keys():
        scores_LV = logits_LV.clone()
    if "counts" in there:
        counted = Counted(there["counted"], there["counts"], there["counted_starts"])
        penalize_rows(scores_LV, counted, there["repetition"], there["presence"], there["frequency"])
    if "values" in there:
        add_rows(scores_LV, Listed(there["listed"], there["values"], there["listed_begins"], there["listed_ends"]))
    if "words" in there:
        mask_rows(scores_LV, there["words"], there["masked"])
    return scores_LV


def rows_of(there: Mapping[str, Tensor], rows_L: Tensor) -> dict[str, Tensor]:
    """What `told` says, now on its device, as if it had been asked for the rows at `rows_L` (int64 `[L]`, there), in
    that order, some perhaps more than once. Of texts that are not penalized: lists of counts belong to one row."""
    assert "counts" not in there
    return {
        name: array if name in ("listed", "values") else array.index_select(0, rows_L) for name, array in there.items()
    }


def draws(there: Mapping[str, Tensor]) -> Draws:
    """How the rows are drawn, by what `told` says, now on their device."""
    return Draws(
        there["temperature"], there["top_k"], there["top_p"], there["min_p"], there["seeds"], there["positions"]
    )


def _values(asked: Seq[RowsOf], num_rows: int) -> dict[str, NDArray[Any]]:
    """How each row is drawn, under the names of `Draws`."""
    samplings = [one.seq.request.sampling for one in asked]
    values_4L = _spread(
        asked,
        num_rows,
        GREEDY,
        # Where fp32 would round up to where drawing begins, the request's own number decides.
        [(one.temperature * (one.temperature >= GREEDY_BELOW), one.top_k, one.top_p, one.min_p) for one in samplings],
    )
    rows = _rows(asked)
    keys_2L = np.zeros((2, num_rows), np.uint64)
    seeds_S = np.array([one.seq.seed % 2**64 for one in asked], np.uint64)
    keys_2L[0, rows] = np.repeat(seeds_S, [len(one.paths) for one in asked])
    keys_2L[1, rows] = [len(one.seq.tokens) + len(path) for one in asked for path in one.paths]
    seeds_L, positions_L = keys_2L.view(np.int64)
    return {
        "temperature": values_4L[0].astype(np.float32),
        "top_k": values_4L[1].astype(np.int32),
        "top_p": values_4L[2],
        "min_p": values_4L[3],
        "seeds": seeds_L,
        "positions": positions_L,
    }


def _penalties(asked: Seq[RowsOf], num_rows: int) -> dict[str, NDArray[Any]]:
    """Penalties, and lists of `Counted`, where any row is penalized."""
    asked = [one for one in asked if one.paths and is_penalized(one.seq.request.sampling)]
    if not asked:
        return {}
    lists: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]] = {}
    for one in asked:
        counts = one.seq.counts()
        for row, path in enumerate(one.paths, one.first):
            lists[row] = counts.after(path)
    samplings = [one.seq.request.sampling for one in asked]
    values_3L = _spread(
        asked,
        num_rows,
        UNPENALIZED,
        [(one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in samplings],
    ).astype(np.float32)
    tokens, counts_N = zip(*(lists[row] for row in sorted(lists)), strict=True)
    return {
        "counted": np.concatenate(tokens),
        "counts": np.concatenate(counts_N),
        "counted_starts": _starts(num_rows, {row: len(ids) for row, (ids, _) in lists.items()}),
        "repetition": values_3L[0],
        "presence": values_3L[1],
        "frequency": values_3L[2],
    }


def _additions(asked: Seq[RowsOf], mask: TokenMask) -> dict[str, NDArray[Any]]:
    """Lists of `Listed`, where any row has a bias or a ban: a token that has both is banned."""
    lists: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}
    masked_L = mask.masked_L
    for one in asked:
        bias, stopping = one.seq.request.sampling.logit_bias, one.seq.request.stopping
        if not bias and not stopping.ignore_eos and one.seq.num_output >= stopping.min_tokens:
            continue
        biased = _pairs(bias)
        for row, path in enumerate(one.paths, one.first):
            constrained = bool(masked_L[row])
            banned = bans(one.seq, len(path), constrained)
            if banned and constrained and mask.allows_only(row, banned):
                banned = []  # the grammar is complete
            if bias or banned:
                lists[row] = _pairs({**bias, **dict.fromkeys(banned, -np.inf)}) if banned else biased
    if not lists:
        return {}
    tokens, values = zip(*(lists[row] for row in sorted(lists)), strict=True)
    starts = _starts(mask.num_rows, {row: len(ids) for row, (ids, _) in lists.items()})
    return {
        "listed": np.concatenate(tokens),
        "values": np.concatenate(values),
        "listed_begins": starts[:-1],
        "listed_ends": starts[1:],
    }


def _pairs(added: Mapping[int, float]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    count = len(added)
    return np.fromiter(added.keys(), np.int32, count), np.fromiter(added.values(), np.float32, count)


def _rows(asked: Seq[RowsOf]) -> list[int]:
    """All rows that are asked for, text by text."""
    return [row for one in asked for row in range(one.first, one.first + len(one.paths))]


def _spread(
    asked: Seq[RowsOf], num_rows: int, neutral: tuple[float, ...], values: Seq[tuple[float, ...]]
) -> NDArray[np.float64]:
    """Each text's values at its rows, `neutral` ones at rows of nobody: `[len(neutral), L]`."""
    spread = np.repeat(np.array(neutral)[:, None], num_rows, 1)
    spread[:, _rows(asked)] = np.repeat(np.array(values), [len(one.paths) for one in asked], 0).T
    return spread


def _starts(num_rows: int, lengths: Mapping[int, int]) -> NDArray[np.int32]:
    """Where the list of each row begins, and where the last ends."""
    lengths_L = np.zeros(num_rows + 1, np.int64)
    for row, length in lengths.items():
        lengths_L[row + 1] = length
    return lengths_L.cumsum().astype(np.int32)
