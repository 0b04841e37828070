"""The block pool: random walks with `check()` after every operation, who is evicted first, and what hashes promise."""

from __future__ import annotations

import random
from itertools import count

import pytest

from specdec.blocks import SCRAP, BlockPool, block_hash, chain_start


def names_of(tokens: list[int], size: int, salt: str = "") -> list[bytes]:
    """The chain of hashes of the full blocks of `tokens`."""
    names = [chain_start(salt)]
    for start in range(0, len(tokens) - size + 1, size):
        names.append(block_hash(names[-1], tokens[start : start + size]))
    return names[1:]


def chain_of(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks taken and published for `tokens`, held."""
    names = names_of(tokens, pool.block_size)
    blocks = pool.take(len(names))
    assert blocks is not None
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name)
    return blocks


class Book:
    """A naive second set of books: the content of every findable block, and the order in which they age."""

    def __init__(self) -> None:
        self.found: dict[bytes, int] = {}
        self.aging: list[int] = []  # cached blocks, oldest first

    def forget(self, block: int) -> None:
        self.found = {name: other for name, other in self.found.items() if other != block}


@pytest.mark.parametrize("caching", [True, False])
def test_random_walks_keep_every_invariant(caching: bool) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(30):
        pool = BlockPool(rng.randint(2, 12), 4, caching=caching)
        book = Book()
        tables: list[tuple[list[int], list[bytes]]] = []  # blocks, and names published so far
        for _ in range(150):
            free, aging = pool.num_free, list(book.aging)
            match rng.choice(
                ["take", "take", "draft", "match", "publish", "publish", "release", "release", "withdraw"]
            ):
                case "take":
                    want = rng.randint(0, 4)
                    blocks = pool.take(want)
                    assert (blocks is None) == (want > free + len(aging))
                    if blocks is not None:
                        assert len(set(blocks)) == want
                        evicted, book.aging = aging[: max(0, want - free)], aging[max(0, want - free) :]
                        assert set(evicted) <= set(blocks), "the oldest go, and no more than needed"
                        for block in evicted:
                            book.forget(block)
                        tables.append((blocks, []))
                case "draft":
                    want = rng.randint(0, 4)
                    blocks = pool.take_free(want)
                    assert len(blocks) == min(want, free)
                    tables.append((blocks, []))
                case "match" if tables:
                    names = list(rng.choice(tables)[1])[: rng.randint(0, 5)]
                    blocks = pool.match(names)
                    known = [book.found.get(name) for name in names]
                    assert blocks == (known[: known.index(None)] if None in known else known)
                    pool.acquire(blocks)
                    book.aging = [block for block in book.aging if block not in blocks]
                    tables.append((blocks, names[: len(blocks)]))
                case "publish" if tables:
                    blocks, names = rng.choice(tables)
                    if len(names) < len(blocks):
                        parent = names[-1] if names else chain_start(rng.choice(["", "salt"]))
                        name = block_hash(parent, [rng.randrange(2)] * 4)
                        block = blocks[len(names)]
                        names.append(name)
                        pool.publish(block, name)
                        if caching and block not in book.found.values():
                            book.found.setdefault(name, block)
                case "release" if tables:
                    blocks, names = tables.pop(rng.randrange(len(tables)))
                    cut = rng.choice([0, rng.randint(0, len(blocks))])
                    pool.release(blocks[cut:])
                    held = {block for table, _ in tables for block in table}
                    for block in reversed(blocks[cut:]):
                        if block not in held and block in book.found.values():
                            book.aging.append(block)
                    if cut:
                        tables.append((blocks[:cut], names[:cut]))
                case "withdraw" if tables and rng.random() < 0.3:
                    blocks = rng.choice(tables)[0]
                    pool.withdraw(blocks)
                    for block in blocks:
                        book.forget(block)
            pool.check(table for table, _ in tables)
            assert list(pool._cached) == book.aging
            assert pool.num_available == pool.num_free + len(book.aging)
            assert pool.usage == pytest.approx(len({b for t, _ in tables for b in t}) / (pool.num_blocks - 1))
        for table, _ in tables:
            pool.release(table)
        pool.check([])
        assert pool.num_available == pool.num_blocks - 1
        assert pool.usage == 0.0


def test_the_tail_of_a_chain_ages_first() -> None:
    pool = BlockPool(7, 2)
    old, new = chain_of(pool, [1, 1, 2, 2, 3, 3]), chain_of(pool, [4, 4, 5, 5, 6, 6])
    pool.release(old)
    pool.release(new)
    order = []
    for _ in range(6):
        (taken,) = pool.take(1) or [SCRAP]
        order.append(taken)
    assert order == [*reversed(old), *reversed(new)]


def test_a_prefix_is_found_as_far_as_it_survives() -> None:
    pool = BlockPool(5, 2)
    tokens = [1, 1, 2, 2, 3, 3, 4, 4]
    blocks = chain_of(pool, tokens)
    pool.release(blocks)
    names = names_of(tokens, 2)
    for left in (4, 3, 2, 1):
        assert pool.match(names) == blocks[:left]
        assert pool.match(names[: left - 1]) == blocks[: left - 1]
        pool.take(1)
    assert pool.match(names) == []


def test_use_makes_a_chain_young_again() -> None:
    pool = BlockPool(5, 2)
    first, second = chain_of(pool, [1, 1, 2, 2]), chain_of(pool, [3, 3, 4, 4])
    pool.release(first)
    pool.release(second)
    found = pool.match(names_of([1, 1, 2, 2], 2))
    assert found == first
    pool.acquire(found)
    pool.release(found)
    taken = pool.take(2)
    assert taken is not None
    assert set(taken) == set(second)
    assert pool.match(names_of([1, 1, 2, 2], 2)) == first
    assert pool.match(names_of([3, 3, 4, 4], 2)) == []


def test_a_twin_stays_anonymous_and_goes_back_to_the_free() -> None:
    pool = BlockPool(5, 2)
    first, twin = chain_of(pool, [1, 1]), chain_of(pool, [1, 1])
    assert first != twin
    name = names_of([1, 1], 2)
    assert pool.match(name) == first
    pool.release(twin)
    assert pool.num_free == 3
    pool.check([first])
    pool.release(first)
    assert pool.match(name) == first
    pool.check([])


def test_a_withdrawn_block_is_found_no_more_and_is_free_once_nobody_holds_it() -> None:
    pool = BlockPool(5, 2)
    first = chain_of(pool, [1, 1, 2, 2])
    second = pool.match(names_of([1, 1, 2, 2], 2))
    pool.acquire(second)
    pool.withdraw(first)
    assert pool.match(names_of([1, 1, 2, 2], 2)) == []
    pool.release(first)
    pool.check([second])
    pool.release(second)
    assert pool.num_free == 4
    pool.check([])


def test_a_held_block_is_never_evicted_and_never_taken() -> None:
    pool = BlockPool(4, 2)
    held = chain_of(pool, [1, 1])
    pool.acquire(held)
    pool.release(held)
    assert pool.take(3) is None
    others = pool.take(2)
    assert others is not None
    assert not set(others) & set(held)
    assert SCRAP not in others
    pool.check([held, others])
    assert pool.match(names_of([1, 1], 2)) == held


def test_drafts_never_evict() -> None:
    pool = BlockPool(6, 2)
    cached = chain_of(pool, [1, 1, 2, 2, 3, 3])
    pool.release(cached)
    drafts = pool.take_free(5)
    assert len(drafts) == 2, "only what nobody could find"
    assert pool.take_free(5) == []
    assert pool.match(names_of([1, 1, 2, 2, 3, 3], 2)) == cached
    pool.check([drafts])


def test_nothing_is_found_without_caching() -> None:
    pool = BlockPool(5, 2, caching=False)
    blocks = chain_of(pool, [1, 1, 2, 2])
    assert pool.match(names_of([1, 1, 2, 2], 2)) == []
    pool.release(blocks)
    assert pool.num_free == 4
    pool.check([])


def test_a_name_tells_tokens_order_and_all_that_came_before() -> None:
    chains = [[1, 2, 3, 4], [2, 1, 3, 4], [1, 2, 4, 3], [3, 4, 1, 2], [1, 2, 1, 2], [256, 0, 1, 0], [0, 1, 256, 0]]
    names = [name for tokens in chains for name in names_of(tokens, 2)]
    firsts = {tuple(tokens[:2]) for tokens in chains}
    assert len(set(names)) == len(firsts) + len(chains)
    assert names_of([1, 2, 3, 4], 2)[0] == names_of([1, 2, 9, 9], 2)[0]


def test_salts_keep_prefixes_apart() -> None:
    salts = ["", "a", "b", "ab", "\0", "\0" * 8, "é", "a" * 16, "a" * 32]
    assert len({names_of([1, 2], 2, salt)[0] for salt in salts}) == len(salts)


def test_a_salt_that_spells_a_hash_does_not_reach_into_its_chain() -> None:
    """Whoever knows a prompt could otherwise read the cache behind it: the salt is the first parent of a chain."""
    for token in count():
        name = names_of([token], 1)[0]
        try:
            salt = name.decode()
        except UnicodeDecodeError:
            continue
        break
    assert names_of([5], 1, salt)[0] != names_of([token, 5], 1)[1]
    salt += "\5" + "\0" * 7  # and the same with the next block's tokens spelled out
    assert names_of([6], 1, salt)[0] != names_of([token, 5, 6], 1)[2]
