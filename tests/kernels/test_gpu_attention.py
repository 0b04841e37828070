"""Attention in Triton's interpreter against its reference in fp64, over shapes in which all pairs meet.

Every slot that nobody may see holds NaN. The interpreter warns where arithmetic meets it, as it is meant to here.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.kernels.gpu import attention
from specdec.kernels.gpu.attention import Tuning, paged_attention
from specdec.kernels.paged import PagedRows, Work
from specdec.kernels.tree_attention import native_tree_attention, serves, torch_attention
from specdec.kernels.work_list import ITEM_FIELDS, JOIN_FIELDS, Capacity
from tests.kernels.cover import pairwise

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

QUICK, LONG = Tuning(64, 32, 4, 1), Tuning(256, 32, 4, 1)  # few steps of the interpreter


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


def tree(kind: str, num_nodes: int, rng: random.Random) -> list[int]:
    """Ancestors of the nodes of a tree, its root the first."""
    ancestors = [1]
    for node in range(1, num_nodes):
        parent = {"chain": node - 1, "siblings": 0, "random": rng.randrange(node)}[kind]
        ancestors.append(ancestors[parent] | 1 << node)
    return ancestors


def sequence(context: int, num_rows: int, kind: str, rng: random.Random) -> tuple[list[int], list[int], int]:
    """Prefix and ancestors of each row, and how many slots they may see: `context` slots are in the cache already."""
    if kind == "prompt":
        return [*range(context, context + num_rows)], [1] * num_rows, context + num_rows
    if kind == "prompt and tree":
        known = (num_rows + 1) // 2
        nodes = tree("random", num_rows - known + 1, rng)
        root = context + known - 1
        return [*range(context, root), *[root] * len(nodes)], [1] * (known - 1) + nodes, context + num_rows
    if kind == "bit 62":  # the last nodes of a full tree, whose other rows are not asked again
        nodes = tree("chain", 63, rng)[-num_rows:]
        return [context] * num_rows, nodes, context + 63
    return [context] * num_rows, tree(kind, num_rows, rng), context + num_rows


class Scene:
    """Sequences over a cache of NaN, filled in the slots that they may see."""

    def __init__(
        self,
        parts: list[tuple[list[int], list[int], int]],
        rng: random.Random,
        *,
        groups: int,
        shared: int,
        head_size: int,
        block_size: int = 16,
        first: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        counts = [-(-length // block_size) for _, _, length in parts]
        blocks = rng.sample(range(1, sum(counts) + 4), sum(counts))
        tables = [[blocks.pop() for _ in range(count)] for count in counts]
        ends = np.cumsum([len(prefix) for prefix, _, _ in parts]).tolist()
        lengths = [length for _, _, length in parts]
        self.rows = PagedRows.of(
            tables,
            list(zip([0, *ends[:-1]], ends, strict=True)),
            lengths,
            torch.tensor([place for prefix, _, _ in parts for place in prefix]),
            torch.tensor([bits for _, ancestors, _ in parts for bits in ancestors]),
            block_size,
            first=first,
        )
        shape = (groups, (sum(counts) + 4) * block_size, head_size)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        self.slots = [
            [table[slot // block_size] * block_size + slot % block_size for slot in range(length)]
            for table, length in zip(tables, lengths, strict=True)
        ]
        for slots in self.slots:
            filled = slots[first:]
            self.keys[:, filled], self.values[:, filled] = torch.randn(2, groups, len(filled), head_size).to(dtype)
        wide = torch.randn(ends[-1], groups * shared + 2 * groups, head_size).to(dtype)
        self.scale = head_size**-0.5
        self.q_RHK = wide[:, : groups * shared]  # as it comes out of a fused projection

    def attend(self, tuning: Tuning | None = None, pieces: int | None = None, **options: Any) -> Tensor:
        """What Triton gives; cut into chunks of any length where a number of pieces is given."""
        rows = self.rows
        assert rows.layout is not None
        tuning = tuning or (LONG if rows.layout.longest > 500 else QUICK)
        if pieces is not None:
            key = (self.q_RHK.shape[1] // len(self.keys), self.q_RHK.shape[2])
            found = rows.layout.work_list(tile_rows=4, pieces=pieces, grain=7)
            rows = replace(rows, work={key: (Work.of(found, 4, "cpu"),)})
        return paged_attention(self.q_RHK, self.keys, self.values, rows, scale=self.scale, tuning=tuning, **options)

    def expected(self, **options: Any) -> Tensor:
        """The reference in fp64."""
        q, k, v = (tensor.double() for tensor in (self.q_RHK, self.keys, self.values))
        return torch_attention(q, k, v, replace(self.rows, hidden={}), scale=self.scale, **options)


CASES = pairwise(
    {
        "rows": [1, 3, 17],
        "context": [0, 1, 15, 16, 1000],
        "kind": ["prompt", "prompt and tree", "chain", "siblings", "random", "bit 62"],
        "groups": [1, 3],
        "shared": [1, 3, 8],
        "head_size": [16, 64, 80, 256],
        "block_size": [1, 16],
        "window": [None, 1, 20, 64, 5000],
        "first": [0, 1],
        "softcap": [None, 2.0],
        "sinks": [False, True],
        "others": [0, 1],
        "pieces": [None, 1, 9],
    }
)


@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_the_reference(case: dict[str, Any], rng: random.Random) -> None:
    context = max(case["context"], case["first"])
    parts = [sequence(context, case["rows"], case["kind"], rng)]
    for _ in range(case["others"]):
        parts.insert(rng.randint(0, 1), sequence(rng.randint(case["first"], 70), rng.randint(1, 5), "random", rng))
    if case["kind"] == "bit 62":
        case = case | {"window": None if case["window"] is None else case["window"] + 62}
    scene = Scene(
        parts,
        rng,
        groups=case["groups"],
        shared=case["shared"],
        head_size=case["head_size"],
        block_size=case["block_size"],
        first=case["first"],
    )
    sinks = torch.linspace(-1, 2, scene.q_RHK.shape[1]) if case["sinks"] else None
    options = {"window": case["window"], "softcap": case["softcap"], "sinks": sinks}
    got, expected = scene.attend(pieces=case["pieces"], **options), scene.expected(**options)
    assert expected.isfinite().all()
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_size", [16, 64, 128, 256])
@pytest.mark.parametrize("queries", [16, 64])
def test_every_tuning_gives_the_same(head_size: int, queries: int, rng: random.Random) -> None:
    """Those of fp16 and those of fp32, all in fp32 here."""
    parts = [sequence(37, queries // 4, "prompt and tree", rng), sequence(20, 2, "siblings", rng)]
    scene = Scene(parts, rng, groups=1, shared=4, head_size=head_size, block_size=4)
    tunings = {tuning for size in (2, 4) for tuning in attention.tunings(queries, head_size, size)}
    for tuning in tunings:
        got = scene.attend(tuning, softcap=2.0)
        torch.testing.assert_close(got.double(), scene.expected(softcap=2.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_size", [64, 112])
def test_half_precision_is_the_reference_rounded(dtype: torch.dtype, head_size: int, rng: random.Random) -> None:
    """fp16 rounds each weight and the sum to half a unit in the last place, 2^-11. bf16 is only how numbers are kept
    here, to one unit of the sum, 2^-7, as the interpreter truncates."""
    parts = [sequence(100, 5, "random", rng), sequence(33, 9, "prompt", rng)]
    scene = Scene(parts, rng, groups=2, shared=3, head_size=head_size, dtype=dtype)
    sinks = torch.randn(6, dtype=dtype)
    got, expected = scene.attend(pieces=5, sinks=sinks), scene.expected(sinks=sinks)
    assert got.dtype == dtype
    scene.values.abs_()
    rounding = 2.0**-11 * (scene.expected(sinks=sinks) + expected.abs())
    if dtype is torch.bfloat16:
        rounding = 2.0**-7 * expected.abs()
    assert ((got.double() - expected).abs() <= rounding + 1e-5).all()


# What is not finite


@pytest.mark.parametrize("backend", ["torch", "C", "Triton", "Triton in pieces"])
@pytest.mark.parametrize(
    "bad, softcap, with_sinks", [(torch.nan, None, False), (torch.inf, 2.0, True), (-torch.inf, None, True)]
)
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(
    backend: str, bad: float, softcap: float | None, with_sinks: bool, rng: random.Random
) -> None:
    if backend == "C" and not serves(16, torch.float32, "cpu"):
        pytest.skip("there is no C compiler here")
    parts = [sequence(50, 6, "siblings", rng), sequence(30, 5, "prompt", rng)]
    scene = Scene(parts, rng, groups=2, shared=2, head_size=16)
    options: dict[str, Any] = {"softcap": softcap, "sinks": torch.randn(4) if with_sinks else None}

    def attend() -> Tensor:
        if backend == "torch":
            rows = replace(scene.rows, hidden={})
            return torch_attention(scene.q_RHK, scene.keys, scene.values, rows, scale=scene.scale, **options)
        if backend == "C":
            return native_tree_attention(
                scene.q_RHK, scene.keys, scene.values, scene.rows, scale=scene.scale, **options
            )
        return scene.attend(pieces=3 if backend == "Triton in pieces" else None, **options)

    fine = attend()
    assert fine.isfinite().all()
    layout = scene.rows.layout
    assert layout is not None
    for index, slot, cache in (
        *((0, 49, scene.keys), (0, 53, scene.values), (0, 50, scene.keys)),
        *((1, 3, scene.values), (1, 32, scene.keys), (1, 34, scene.values)),
    ):
        stretch, place = layout.stretches[index], scene.slots[index][slot]
        sees_R = torch.zeros(len(fine), dtype=torch.bool)
        for row in range(stretch.first_row, stretch.end_row):
            offset = slot - int(layout.prefix_R[row])
            sees_R[row] = offset < 0 or bool(int(layout.ancestors_R[row]) >> offset & 1)
        assert sees_R.any()
        before, cache[1, place, 15] = cache[1, place, 15].clone(), bad
        got = attend()
        cache[1, place, 15] = before
        assert torch.equal(got[~sees_R], fine[~sees_R])
        assert torch.equal(got[:, :2], fine[:, :2]), "heads of another key head are not touched"
        hit = got[sees_R, 2:] if cache is scene.keys else got[sees_R, 2:, 15]
        assert not hit.isfinite().any()


# Work that is data


def test_one_launch_serves_any_batch_by_its_numbers_alone(rng: random.Random) -> None:
    """As a captured graph replays: the same tensors, filled anew, with items and rows to spare."""
    num_rows, pieces, tile_rows, block_size, groups, shared, head_size = 24, 6, 4, 8, 2, 3, 16
    capacity = Capacity.of(num_rows, tile_rows, pieces)
    items = torch.zeros(capacity.items, ITEM_FIELDS, dtype=torch.int32)
    joins = torch.zeros(capacity.joins, JOIN_FIELDS, dtype=torch.int32)
    static = PagedRows(
        torch.zeros(64, dtype=torch.int32),
        block_size,
        torch.zeros(num_rows, dtype=torch.int64),
        torch.ones(num_rows, dtype=torch.int64),
        work={(shared, head_size): (Work(items, joins, capacity.partials, tile_rows),)},
    )
    kinds = [[(60, 1)] * 3, [(200, 9), (0, 1)], [(0, 24)], [(3, 2), (90, 1), (17, 6)]]
    for sizes in kinds:
        parts = [sequence(context, count, rng.choice(["random", "prompt"]), rng) for context, count in sizes]
        scene = Scene(parts, rng, groups=groups, shared=shared, head_size=head_size, block_size=block_size)
        layout, count = scene.rows.layout, len(scene.q_RHK)
        assert layout is not None
        layout.work_list(tile_rows=tile_rows, pieces=pieces, grain=16).fill(items.numpy(), joins.numpy(), capacity)
        static.blocks_B[: len(scene.rows.blocks_B)] = scene.rows.blocks_B
        static.prefix_R[:count], static.ancestors_R[:count] = layout.prefix_R, layout.ancestors_R
        q_RHK = torch.full((num_rows, groups * shared, head_size), torch.nan)
        q_RHK[:count] = scene.q_RHK
        got = paged_attention(q_RHK, scene.keys, scene.values, static, scale=scene.scale, tuning=QUICK)
        torch.testing.assert_close(got[:count].double(), scene.expected(), rtol=1e-5, atol=1e-5)


def test_layers_that_no_work_was_cut_for_are_refused(rng: random.Random) -> None:
    scene = Scene([sequence(4, 2, "chain", rng)], rng, groups=1, shared=2, head_size=16)
    rows = replace(scene.rows, layout=None)
    with pytest.raises(ValueError, match=r"work must be cut for 2 queries a key head of size 16, got \[\]"):
        paged_attention(scene.q_RHK, scene.keys, scene.values, rows, scale=1.0)


@pytest.mark.parametrize("head_size, dtype", [(264, torch.float32), (64, torch.float64)])
def test_what_triton_cannot_do_is_refused(head_size: int, dtype: torch.dtype, rng: random.Random) -> None:
    scene = Scene([sequence(4, 2, "chain", rng)], rng, groups=1, shared=2, head_size=head_size, dtype=dtype)
    with pytest.raises(ValueError, match=f"in fp32, fp16 or bf16, got {head_size} in {dtype}"):
        paged_attention(scene.q_RHK, scene.keys, scene.values, scene.rows, scale=1.0)
