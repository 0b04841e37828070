"""Who sees what, and attention over it: the visibility formula by brute force, the sums against torch's own in fp64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from specdec.kernels.paged import visible
from specdec.kernels.tree_attention import tree_attention
from specdec.tree import MAX_DRAFTS, DraftTree


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


def random_tree(rng: random.Random, num_drafts: int) -> DraftTree:
    likeness = rng.random()
    parents = [-1]
    for node in range(1, num_drafts + 1):
        parents.append(node - 1 if rng.random() < likeness else rng.randrange(node))
    count = len(parents)
    return DraftTree(tuple(range(count)), tuple(parents), (1.0,) * count, ("",) * count)


def seen_slots(tree: DraftTree, root: int, node: int, first: int, window: int | None) -> set[int]:
    """By the definition: the text before the root from slot `first` on, the root, and the node's path; of these what
    stands less than `window` positions back. Slots go by node, positions by depth."""
    position_of = {slot: slot for slot in range(first, root)}
    for depth, member in enumerate((0, *tree.path(node))):
        position_of[root + member] = root + depth
    own = root + len(tree.path(node))
    return {slot for slot, position in position_of.items() if window is None or own - position < window}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 8, 40, 1000])
def test_a_row_sees_its_text_and_its_path_within_the_window(first: int, window: int | None, rng: random.Random) -> None:
    for _ in range(20):
        known, tree = rng.randint(1, 6), random_tree(rng, rng.choice([0, 1, 5, 20, MAX_DRAFTS]))
        root = rng.choice([known - 1, known, rng.randint(known, 50)])
        num_slots = root + len(tree)
        # The known rows up to the root, then the drafts: as a batch lays them out.
        prefix = [*range(root - known + 1, root + 1), *[root] * tree.num_drafts]
        ancestors = [*[1] * known, *tree.ancestors()[1:]]
        got = visible(torch.tensor(prefix), torch.tensor(ancestors), num_slots, first=first, window=window)
        assert got.dtype == torch.bool
        assert got.shape == (known + tree.num_drafts, num_slots)
        for row in range(known + tree.num_drafts):
            if row < known:
                index = root - known + 1 + row
                slots = {slot for slot in range(first, index) if window is None or index - slot < window} | {index}
            else:
                slots = seen_slots(tree, root, row - known + 1, first, window)
            assert set(torch.nonzero(got[row]).flatten().tolist()) == slots


def test_siblings_never_see_each_other_and_everybody_sees_itself(rng: random.Random) -> None:
    tree = random_tree(rng, MAX_DRAFTS)
    got = visible(torch.full((63,), 9), torch.tensor(tree.ancestors()), 72)
    in_tree = got[:, 9:]
    assert in_tree.diagonal().all()
    assert not in_tree.triu(1).any(), "nobody sees what comes after it"
    for node in range(63):
        for other in range(63):
            assert bool(in_tree[node, other]) == (other in (0, node, *tree.path(node)))


def test_slots_past_the_bits_are_not_seen() -> None:
    """A table may be wider than the tree: slot prefix + 63 and beyond belong to nobody's ancestors."""
    got = visible(torch.tensor([0, 0]), torch.tensor([2**63 - 1, 1]), 200)
    assert got.sum(1).tolist() == [63, 1]


def softmax_by_hand(
    q_RHK: Tensor,
    k_GNK: Tensor,
    v_GNK: Tensor,
    seen_RN: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One row, one head at a time, over the slots that are seen and no others."""
    out_RHK = torch.zeros_like(q_RHK)
    for row, seen_N in enumerate(seen_RN):
        for head in range(q_RHK.shape[1]):
            group = head * k_GNK.shape[0] // q_RHK.shape[1]
            scores_N = k_GNK[group, seen_N] @ q_RHK[row, head] * scale
            if softcap is not None:
                scores_N = softcap * torch.tanh(scores_N / softcap)
            weights_N = scores_N.exp()
            total = weights_N.sum() + (0.0 if sinks is None else sinks[head].exp())
            out_RHK[row, head] = weights_N / total @ v_GNK[group, seen_N]
    return out_RHK


SHAPES = [  # rows, slots, query heads, key heads, head size
    (1, 1, 1, 1, 1),
    (1, 17, 9, 3, 5),
    (3, 3, 4, 4, 8),
    (7, 33, 6, 1, 3),
    (8, 257, 9, 3, 64),
    (63, 100, 4, 2, 16),
]


def case(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, num_slots, num_heads, num_groups, head_size = shape
    q_RHK = torch.randn(num_rows, num_heads, head_size, dtype=dtype)
    k_GNK, v_GNK = (torch.randn(num_groups, num_slots, head_size, dtype=dtype) for _ in range(2))
    seen_RN = torch.rand(num_rows, num_slots) < 0.6
    seen_RN[:, 0] = True
    return q_RHK, k_GNK, v_GNK, seen_RN


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_torchs_own(shape: tuple[int, ...], rng: random.Random) -> None:
    q_RHK, k_GNK, v_GNK, seen_RN = case(shape, torch.float64)
    scale = rng.random()
    for mask in (~seen_RN, None):
        expected = torch.nn.functional.scaled_dot_product_attention(
            q_RHK.transpose(0, 1), k_GNK, v_GNK, attn_mask=None if mask is None else ~mask, scale=scale, enable_gqa=True
        ).transpose(0, 1)
        got = tree_attention(q_RHK, k_GNK, v_GNK, mask, scale=scale)
        assert got.shape == q_RHK.shape
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_softcap_and_sinks_are_their_definitions(
    shape: tuple[int, ...], softcap: float | None, with_sinks: bool, rng: random.Random
) -> None:
    q_RHK, k_GNK, v_GNK, seen_RN = case(shape, torch.float64)
    sinks = torch.randn(shape[2], dtype=torch.float64) if with_sinks else None
    got = tree_attention(q_RHK, k_GNK, v_GNK, ~seen_RN, scale=0.3, softcap=softcap, sinks=sinks)
    expected = softmax_by_hand(q_RHK, k_GNK, v_GNK, seen_RN, 0.3, softcap, sinks)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_is_fp64_rounded(shape: tuple[int, ...], rng: random.Random) -> None:
    q_RHK, k_GNK, v_GNK, seen_RN = case(shape, torch.float32)
    got = tree_attention(q_RHK, k_GNK, v_GNK, ~seen_RN, scale=0.2, softcap=20.0)
    exact = tree_attention(q_RHK.double(), k_GNK.double(), v_GNK.double(), ~seen_RN, scale=0.2, softcap=20.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)


def test_a_row_does_not_depend_on_the_others(rng: random.Random) -> None:
    """Neither on the rows beside it, nor on what the slots that it does not see hold."""
    for shape in SHAPES:
        q_RHK, k_GNK, v_GNK, seen_RN = case(shape, torch.float64)
        together = tree_attention(q_RHK, k_GNK, v_GNK, ~seen_RN, scale=0.3)
        for row in {0, shape[0] // 2, shape[0] - 1}:
            own = seen_RN[row : row + 1]
            unseen = ~own[0]
            keys, values = k_GNK.clone(), v_GNK.clone()
            keys[:, unseen], values[:, unseen] = 1e6 * torch.randn(2, *keys[:, unseen].shape, dtype=torch.float64)
            alone = tree_attention(q_RHK[row : row + 1], keys, values, ~own, scale=0.3)
            torch.testing.assert_close(alone[0], together[row], rtol=1e-12, atol=1e-12)


def test_strided_views_of_queries_and_cache_are_read_as_they_are(rng: random.Random) -> None:
    """Queries come out of a fused projection, keys out of a paged cache: neither is contiguous."""
    fused = torch.randn(5, 3 * 6 * 8, dtype=torch.float64)
    q_RHK = fused[:, : 6 * 8].view(5, 6, 8)
    cache = torch.randn(2, 64, 8, dtype=torch.float64)
    k_GNK, v_GNK = cache[:, 3:20], cache[:, 20:37]
    got = tree_attention(q_RHK, k_GNK, v_GNK, None, scale=0.3)
    expected = tree_attention(q_RHK.contiguous(), k_GNK.contiguous(), v_GNK.contiguous(), None, scale=0.3)
    assert torch.equal(got, expected)
    assert torch.equal(fused[:, : 6 * 8].view(5, 6, 8), q_RHK), "nothing is changed in place"
