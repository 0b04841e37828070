"""Draft trees: bits, depths, paths, cuts and unions against definitions by brute force; what makes a tree unusable."""

from __future__ import annotations

import math
import random

import pytest

from specdec.tree import EMPTY, MAX_DRAFTS, DraftTree, chain, merge, root


def random_tree(rng: random.Random, num_drafts: int, vocab_size: int = 1000) -> DraftTree:
    """A well-formed tree under token 7: siblings differ, scores fall along every path."""
    tokens, parents, scores = [7], [-1], [1.0]
    used: set[tuple[int, int]] = set()
    while len(tokens) <= num_drafts:
        parent, token = rng.randrange(len(tokens)), rng.randrange(vocab_size)
        if (parent, token) not in used:
            used.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            scores.append(scores[parent] * rng.choice([1.0, 0.9, rng.random()]))
    return DraftTree(tuple(tokens), tuple(parents), tuple(scores), ("", *["t"] * num_drafts))


def token_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """For each node the tokens from below the root to it."""
    return [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def test_ancestors_and_depths_are_those_of_the_path(rng: random.Random) -> None:
    for _ in range(100):
        tree = random_tree(rng, rng.randrange(MAX_DRAFTS + 1))
        assert tree.problem(1000) is None
        children = tree.children()
        for node, (bits, depth) in enumerate(zip(tree.ancestors(), tree.depths(), strict=True)):
            line = [node]
            while line[-1] != 0:
                line.append(tree.parents[line[-1]])
            assert bits == sum(1 << member for member in line)
            assert 0 < bits < 2**63, "bit 63 is the sign"
            assert depth == len(line) - 1
            assert tree.path(node) == line[::-1][1:]
            assert children[node] == [other for other in range(len(tree)) if tree.parents[other] == node]


def test_keep_drops_what_hangs_below_a_dropped_node(rng: random.Random) -> None:
    for _ in range(100):
        tree = random_tree(rng, rng.randrange(30))
        wanted = {node for node in range(len(tree)) if rng.random() < 0.7}
        kept = tree.keep(wanted)
        nodes = [0, *(n for n in range(1, len(tree)) if set(tree.path(n)) <= wanted)]
        assert kept.problem(1000) is None
        assert token_paths(kept) == [token_paths(tree)[node] for node in nodes]
        assert kept.scores == tuple(tree.scores[node] for node in nodes)
        assert kept.sources == tuple(tree.sources[node] for node in nodes)


def test_keeping_all_is_the_tree_itself(rng: random.Random) -> None:
    tree = random_tree(rng, 20)
    assert tree.keep(range(21)) is tree
    assert tree.keep([]) == root(7)
    assert EMPTY.keep([]) is EMPTY
    assert EMPTY.within(5, 5) is EMPTY


def test_within_keeps_the_best_that_are_shallow_enough(rng: random.Random) -> None:
    for _ in range(100):
        tree = random_tree(rng, rng.randrange(40))
        max_nodes, max_depth = rng.randrange(-1, 20), rng.randrange(6)
        cut = tree.within(max_nodes, max_depth)
        assert cut.problem(1000) is None
        fitting = [node for node in range(1, len(tree)) if tree.depths()[node] <= max_depth]
        assert cut.num_drafts == min(max(0, max_nodes), len(fitting))
        assert max(cut.depths()) <= max_depth
        assert sorted(cut.scores[1:]) == sorted(tree.scores[node] for node in fitting)[len(fitting) - cut.num_drafts :]


def test_a_merge_is_the_union_of_the_paths(rng: random.Random) -> None:
    for _ in range(100):
        trees = [random_tree(rng, rng.randrange(20), vocab_size=4 + 30 * (i == 0)) for i in range(rng.randint(2, 4))]
        merged = merge(trees)
        assert merged.problem(1000) is None
        scores: dict[tuple[int, ...], float] = {}
        for tree in trees:
            for path, score in zip(token_paths(tree), tree.scores, strict=True):
                scores[path] = max(score, scores.get(path, 0.0))
        got = dict(zip(token_paths(merged), merged.scores, strict=True))
        if len(scores) <= MAX_DRAFTS + 1:
            assert got == scores
        else:
            assert len(got) == MAX_DRAFTS + 1
            assert sorted(got.values()) == sorted(scores.values())[-len(got) :]


def test_a_merge_names_the_first_source_and_drops_empty_trees() -> None:
    merged = merge([EMPTY, chain(7, [1, 2], "a", 0.5), chain(7, [1, 3], "b", 0.9), EMPTY])
    assert dict(zip(token_paths(merged), merged.sources, strict=True)) == {(): "", (1,): "a", (1, 2): "a", (1, 3): "b"}
    assert dict(zip(token_paths(merged), merged.scores, strict=True))[(1,)] == 0.9
    assert merge([]) is EMPTY
    assert merge([EMPTY, EMPTY]) is EMPTY
    only = chain(7, [1], "a")
    assert merge([EMPTY, only]) is only


def test_a_chain_is_cut_to_what_fits() -> None:
    tree = chain(7, range(100), "x", 0.5)
    assert tree.num_drafts == MAX_DRAFTS
    assert tree.problem(100) is None
    assert tree.depths() == list(range(MAX_DRAFTS + 1))
    assert tree.scores[3] == 0.125
    assert chain(7, [], "x") == root(7)
    assert (root(7).num_drafts, EMPTY.num_drafts, len(EMPTY)) == (0, 0, 0)


GOOD = DraftTree((7, 1, 2), (-1, 0, 1), (1.0, 0.5, 0.5), ("", "a", "a"))


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (GOOD, None),
        (EMPTY, None),
        (root(7), None),
        (DraftTree((7, 10), (-1, 0), (1.0, 0.5), ("", "a")), "token 10 is not in the vocabulary of 10"),
        (DraftTree((7, -1), (-1, 0), (1.0, 0.5), ("", "a")), "token -1 is not in the vocabulary"),
        (DraftTree((7, 1), (-1, 1), (1.0, 0.5), ("", "a")), "node 1 does not follow its parent 1"),
        (DraftTree((7, 1), (-1, -1), (1.0, 0.5), ("", "a")), "node 1 does not follow its parent -1"),
        (DraftTree((7, 1, 2), (-1, 2, 0), (1.0, 0.5, 0.5), ("", "a", "a")), "node 1 does not follow its parent 2"),
        (DraftTree((7, 1, 1), (-1, 0, 0), (1.0, 0.5, 0.5), ("", "a", "a")), "two children of node 0 are token 1"),
        (DraftTree((7,), (0,), (1.0,), ("",)), "node 0 is not a root"),
        (DraftTree((7, 1), (-1, 0), (1.0,), ("", "a")), "differ in length"),
        (DraftTree((7, 1), (-1, 0), (1.0, 0.5), ("",)), "differ in length"),
        (
            DraftTree((7, 1, 2), (-1, 0, 1), (1.0, 0.5, 0.6), ("", "a", "a")),
            "node 2 scores below 0 or above its parent",
        ),
        (DraftTree((7, 1), (-1, 0), (1.0, -0.1), ("", "a")), "node 1 scores below 0 or above its parent"),
        (DraftTree((7, 1), (-1, 0), (math.inf, 0.5), ("", "a")), "the root's score is no probability"),
        (DraftTree((7, 1), (-1, 0), (1.0, 0.5), ("", [])), "sources are not all strings"),  # type: ignore[arg-type]
        (DraftTree((7, 1), (-1, 0), (1.0, 0.5), (None, "a")), "sources are not all strings"),  # type: ignore[arg-type]
        (DraftTree((7, 1), (-1, 0), (1.0, math.nan), ("", "a")), "node 1 scores below 0 or above its parent"),
        (DraftTree(tuple(range(64)), tuple(range(-1, 63)), (1.0,) * 64, ("",) * 64), "63 drafts, at most 62 fit"),
    ],
)
def test_a_problem_is_told_in_words(tree: DraftTree, words: str | None) -> None:
    problem = tree.problem(10)
    assert problem is None if words is None else problem is not None and words in problem


def test_a_full_tree_fits_in_the_bits_of_an_int64() -> None:
    tree = chain(7, range(MAX_DRAFTS), "x")
    assert tree.problem(100) is None
    assert tree.ancestors()[-1] == 2**63 - 1
