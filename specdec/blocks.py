"""The paged pool of KV blocks: who holds which, which prefixes are cached, which is evicted next. Integers only.

Block 0 is the scrap block: it pads block tables and is never handed out. A block is in exactly one place: held (its
count of references is above zero), cached (nobody holds it, its content can be found by hash), or free.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

SCRAP = 0


def chain_start(salt: str) -> bytes:
    """The first parent of a chain. Longer than a block's name, so no salt can pass for the inside of another chain."""
    return hashlib.blake2b(salt.encode(), digest_size=32).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block: a digest of its tokens and of all before it. `parent` names the block before, or is
    `chain_start` of the salt."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """`num_blocks` blocks of `block_size` slots, block 0 included. Without `caching`, nothing is found by hash."""

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, SCRAP, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first: evicted first
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks without content: what drafts may take."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that known tokens may take: free ones, and cached ones by eviction."""
        return len(self._free) + len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the pool that is held, 0 to 1."""
        return 1.0 - self.num_available / max(1, self.num_blocks - 1)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of a chain of hashes. Takes no reference."""
        blocks = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """Take one more reference to each of some matched blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def take(self, count: int) -> list[int] | None:
        """`count` blocks for known tokens, evicting the least recently used cached ones; None if there are too few."""
        if count > self.num_available:
            return None
        while len(self._free) < count:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
            self._free.append(block)
        return self.take_free(count)

    def take_free(self, count: int) -> list[int]:
        """Up to `count` free blocks, for drafts: nothing is evicted for a guess."""
        blocks = [self._free.pop() for _ in range(min(count, len(self._free)))]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def publish(self, block: int, name: bytes) -> None:
        """Make a held, full block findable. The first block of a content keeps the name; a twin stays anonymous."""
        if self.caching and name not in self._block_of and block not in self._hash_of:
            self._block_of[name] = block
            self._hash_of[block] = name

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Make held blocks anonymous: nobody else finds what they hold, and they are free once they are given back."""
        for block in blocks:
            name = self._hash_of.pop(block, None)
            if name is not None:
                del self._block_of[name]

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block of a sequence, in table order.

        The last blocks of a chain age first: a prefix is worth more than what follows it.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert every invariant, given the block tables of all sequences that hold blocks. For tests."""
        held = Counter(block for table in tables for block in table)
        assert SCRAP not in held and SCRAP not in self._free and SCRAP not in self._cached
        for block in range(1, self.num_blocks):
            places = (held[block] > 0) + (block in self._cached) + (block in self._free)
            assert places == 1, f"block {block} is in {places} places"
            assert self._references[block] == held[block], f"block {block}: {self._references[block]} != {held[block]}"
        assert len(set(self._free)) == len(self._free)
        assert all(block in self._hash_of for block in self._cached)
        assert {name: block for block, name in self._hash_of.items()} == self._block_of
