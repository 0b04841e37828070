"""A runner without a model: its logits are a hash of exactly the tokens that a row may see, in their order.

A wrong slot, a stale key, a wrong ancestor or a wrong position gives other logits at once, and exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.batch import Batch
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.mask import TokenMask
from specdec.protocols import Drafter, Forward
from specdec.request import Request, Stopping
from specdec.sequence import Emission
from specdec.text import Detokenizer
from specdec.tree import DraftTree
from tests.masks import allow, blank


class HashRunner:
    """Keeps the token and the position of every slot, as a model would keep their keys."""

    def __init__(self, config: EngineConfig, vocab_size: int, spread: float = 2.0) -> None:
        self.vocab_size = vocab_size
        self.spread = spread
        self.block_size = config.block_size
        self.slots: list[tuple[int, int]] = [(-1, -1)] * (config.num_blocks * config.block_size)
        self.rows_seen: list[int] = []

    def forward(self, batch: Batch, taps: Seq[int] = ()) -> Forward:
        self.rows_seen.append(batch.num_rows)
        for token, position, slot in zip(
            batch.tokens_R.tolist(), batch.positions_R.tolist(), batch.slots_R.tolist(), strict=True
        ):
            self.slots[slot] = (token, position)
        rows = [self._logits(batch, row) for row in batch.logit_rows_L.tolist()]
        return Forward(torch.from_numpy(np.array(rows, np.float32).reshape(len(rows), self.vocab_size)))

    def _logits(self, batch: Batch, row: int) -> np.ndarray:
        index = next(i for i, (start, end) in enumerate(batch.rows_S) if start <= row < end)
        table = batch.tables_S[index]
        prefix, ancestors = int(batch.prefix_R[row]), int(batch.ancestors_R[row])
        seen = [*range(prefix), *(prefix + bit for bit in range(63) if ancestors >> bit & 1)]
        visible = [self.slots[table[j // self.block_size] * self.block_size + j % self.block_size] for j in seen]
        assert [position for _, position in visible] == list(range(int(batch.positions_R[row]) + 1))
        key = hash(tuple(token for token, _ in visible)) & (2**64 - 1)
        return np.random.Generator(np.random.PCG64(key)).standard_normal(self.vocab_size) * self.spread

    def move(self, sources: Seq[int], targets: Seq[int]) -> None:
        moved = [self.slots[source] for source in sources]
        for target, content in zip(targets, moved, strict=True):
            self.slots[target] = content


class BigramRunner:
    """The logits of a row are a line of a table, chosen by the row's own token: a law that can be written down."""

    def __init__(self, table_VV: NDArray[np.float32]) -> None:
        self.table_VV = torch.from_numpy(table_VV)
        self.vocab_size = len(table_VV)

    def forward(self, batch: Batch, taps: Seq[int] = ()) -> Forward:
        return Forward(self.table_VV[batch.tokens_R[batch.logit_rows_L]])

    def move(self, sources: Seq[int], targets: Seq[int]) -> None:
        """Nothing is kept in slots."""


class Automaton:
    """A grammar by a table: in each state the tokens that may follow and the states they lead to, from state 0 on.

    The text may end where `ends` says. `fail` is called with the name of each method and the number of tokens the text
    has: it may raise.
    """

    def __init__(
        self,
        edges: Mapping[int, Mapping[int, int]],
        ends: Mapping[int, Seq[int]],
        fail: Callable[[str, int], None] = lambda method, length: None,
    ) -> None:
        self.edges = edges
        self.ends = ends  # for some states the end tokens that are allowed there
        self.fail = fail

    def start(self) -> AutomatonState:
        return AutomatonState(self)


class AutomatonState:
    """Where one text stands in an `Automaton`."""

    def __init__(self, grammar: Automaton) -> None:
        self.grammar = grammar
        self.state = 0
        self.length = 0

    def prune(self, tree: DraftTree) -> DraftTree:
        self.grammar.fail("prune", self.length)
        states = self._states(tree)
        return tree.keep(node for node, state in enumerate(states) if state is not None)

    def mask(self, tree: DraftTree, first_row: int, mask: TokenMask) -> None:
        self.grammar.fail("mask", self.length)
        for node, state in enumerate(self._states(tree)):
            assert state is not None, "what prune forbids is not verified"
            words = blank(mask, first_row + node)
            allow(words, [*self.grammar.edges.get(state, ()), *self.grammar.ends.get(state, ())])

    def row(self, path: tuple[int, ...]) -> NDArray[np.int32]:
        words = np.zeros((1 << 16) // 32, np.int32)
        state = self._after(path)
        if state is not None:
            allow(words, [*self.grammar.edges.get(state, ()), *self.grammar.ends.get(state, ())])
        return words

    def forced(self, path: tuple[int, ...] = ()) -> tuple[int, ...]:
        self.grammar.fail("forced", self.length)
        tokens: list[int] = []
        state = self._after(path)
        while (
            state is not None
            and len(edges := self.grammar.edges.get(state, {})) == 1
            and not self.grammar.ends.get(state)
            and len(tokens) < 99
        ):
            ((token, state),) = edges.items()
            tokens.append(token)
        return tuple(tokens)

    def advance(self, tokens: Seq[int]) -> None:
        for token in tokens:
            self.grammar.fail("advance", self.length)
            self.state = self.grammar.edges[self.state][token]
            self.length += 1

    def finish(self) -> None:
        """Any text that ends where it may is right."""

    def _after(self, path: tuple[int, ...]) -> int | None:
        state: int | None = self.state
        for token in path:
            state = None if state is None else self.grammar.edges.get(state, {}).get(token)
        return state

    def _states(self, tree: DraftTree) -> list[int | None]:
        """The state behind each node; None where a token of its path is forbidden."""
        states: list[int | None] = [self.state]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            before = states[parent]
            states.append(None if before is None else self.grammar.edges.get(before, {}).get(token))
        return states


def letters(stopping: Stopping) -> Detokenizer:
    """Token v is the v-th lower-case letter (and so on through Unicode)."""
    return Detokenizer(
        lambda token: chr(97 + token).encode(),
        stop=stopping.stop,
        include_stop=stopping.include_stop,
        min_tokens=stopping.min_tokens,
    )


def hash_engine(config: EngineConfig, *drafters: Drafter, vocab_size: int = 24, end_tokens: Seq[int] = (0,)) -> Engine:
    """An engine over a `HashRunner`."""
    return Engine(HashRunner(config, vocab_size), drafters, config, new_text=letters, end_tokens=end_tokens)


def run(engine: Engine, requests: Seq[Request], *, check: bool = True) -> dict[tuple[str, int], list[Emission]]:
    """Step until all is done; the emissions of each sequence by (request id, index)."""
    for number, request in enumerate(requests):
        engine.add(request, f"r{number}")
    emissions: dict[tuple[str, int], list[Emission]] = {}
    while engine.has_work:
        for emission in engine.step():
            emissions.setdefault((emission.seq.request_id, emission.seq.index), []).append(emission)
        if check:
            engine.scheduler.pool.check(engine.scheduler.tables())
    return emissions


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a caller sees of a sequence."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    logprob_tokens: tuple[int, ...]


def texts(emissions: dict[tuple[str, int], list[Emission]]) -> dict[tuple[str, int], Outcome]:
    """What a caller sees of each sequence."""
    return {
        key: Outcome(
            tuple(token for emission in parts for token in emission.tokens),
            "".join(emission.text for emission in parts),
            parts[-1].finish_reason,
            parts[-1].stop_reason,
            tuple(logprob.token for emission in parts for logprob in emission.logprobs),
        )
        for key, parts in emissions.items()
    }
