"""What a drafter's model keeps of the texts: keys and values in blocks that bear the numbers of the target's, and the
feature of each block's last token. Knows blocks and slots; knows no logits and no trees.

A row in slot s holds token s, and, for a model that takes features, the target's feature of token s - 1: so no block
depends on the next, and a prefix hit of the target's is one of the drafter's. R rows, D width of the features.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.batch import Batch, Rows
from specdec.drafters.forwards import Follow, Forwards, Model
from specdec.kv import KVCache, Pool
from specdec.protocols import LayerShape
from specdec.sequence import Sequence

CHUNK = 512  # rows of one forward that catches up
MAX_WAITING = 64  # features that wait for a drafter that is not asked


@dataclass(slots=True)
class Kept:
    """How far the rows of one text go: slots below `filled` hold true rows; None: what they stand on is gone, after a
    prefix hit on blocks that are not whole, or a step that was not observed.
    `waiting` are the features of the tokens from `filled` - 1 on, as far as the target has computed them; `hidden` is
    what the model made of the last row."""

    filled: int | None
    waiting: list[Tensor] = field(default_factory=list)
    hidden: Tensor | None = None

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting))


@dataclass(frozen=True, slots=True)
class News:
    """What one step of the target said of one text: `features` `[n, D]` of the tokens from `start` on (None for a model
    that takes none), which are now computed up to `end`. `wanted`: whether its drafter was asked for it."""

    seq: Sequence
    start: int
    end: int
    features: Tensor | None
    wanted: bool


class Memory:
    """Satisfies `recurrent.Context` for a model with attention `layers` of its own. `width` is that of the features
    that its rows take; 0 for one that takes only tokens. `capturable`: see `Forwards`. After Li et al., EAGLE (arXiv
    2401.15077): pairs of a feature and the token behind it."""

    def __init__(
        self, model: Model, layers: Seq[LayerShape], width: int, pool: Pool, *, capturable: bool = True
    ) -> None:
        self._pool = pool
        self._first = int(width > 0)
        self._cache = KVCache(layers, pool.num_blocks, pool.block_size, device=pool.device, dtype=pool.dtype)
        self._forwards = Forwards(model, self._cache, pool, width=width, first=self._first, capturable=capturable)
        self._features_BD = torch.zeros(pool.num_blocks, width, device=pool.device, dtype=pool.dtype)
        pool.own(self._cache)
        pool.own(self)
        self._names: dict[int, bytes] = {}  # of blocks whose rows and feature are whole, what they hold
        self._kept: dict[Sequence, Kept] = {}

    @property
    def num_kept(self) -> int:
        """Sequences for which something is kept."""
        return len(self._kept)

    @property
    def block_size(self) -> int:
        """See `recurrent.Context`."""
        return self._pool.block_size

    @property
    def num_bytes(self) -> int:
        """Of the features."""
        return self._features_BD.nbytes

    def resize(self, num_blocks: int) -> None:
        """See `InBlocks.resize`."""
        width = self._features_BD.shape[1]
        self._features_BD = torch.empty(0)
        self._features_BD = torch.zeros(num_blocks, width, device=self._pool.device, dtype=self._pool.dtype)

    def forget(self, seq: Sequence) -> None:
        """Release what is kept for a sequence."""
        self._kept.pop(seq, None)

    def observe(self, news: Seq[News]) -> None:
        """Fill the slots that the news allow. The last known token's too where its block stays with the sequence: so
        the next draft begins with what the model made of it."""
        due: list[tuple[Sequence, Kept, int, int]] = []
        for item in news:
            kept = self._kept.get(item.seq) or self._begin(item.seq, item.start)
            if kept.filled is None:
                continue
            if item.features is not None:
                overlap = kept.filled - 1 + kept.num_waiting - item.start
                if overlap < 0:  # a step went by unheard: the features in between are lost, and so is all behind them
                    self._kept[item.seq] = Kept(None)
                    continue
                kept.waiting.append(item.features[overlap:])
            kept.hidden = None
            if not item.wanted and not (item.features is not None and kept.num_waiting >= MAX_WAITING):
                if kept.waiting:
                    kept.waiting[-1] = kept.waiting[-1].clone()  # a view would keep what the whole step computed
                continue
            stays = item.end % self._pool.block_size != 0 and not item.seq.finished
            end = min(item.end + stays, len(item.seq.tokens))
            if end > kept.filled:
                due.append((item.seq, kept, kept.filled, end))
        self._fill(due)

    def catch_up(self, seqs: Seq[Sequence]) -> list[Tensor | None]:
        """What the model makes of the last known token of each sequence, `[D]`; None where a row before it is lost."""
        due = []
        for seq in seqs:
            kept = self._kept.get(seq)
            if kept is None and self._first == 0:
                kept = self._begin(seq, seq.num_computed)
            if kept is not None and kept.filled is not None:
                missing = len(seq.tokens) - kept.filled
                if missing > 0 and (self._first == 0 or kept.num_waiting == missing):
                    due.append((seq, kept, kept.filled, len(seq.tokens)))
        self._fill(due)
        return [self._last_hidden(seq) for seq in seqs]

    def _last_hidden(self, seq: Sequence) -> Tensor | None:
        kept = self._kept.get(seq)
        return kept.hidden if kept is not None and kept.filled == len(seq.tokens) else None

    def run(self, parts: Seq[Rows], features_RD: Tensor | None) -> Tensor:
        """Hidden states `[R, D]` of some rows, whose keys and values are written to their slots."""
        for rows in parts:
            self._overwritten(rows.blocks, rows.slots[0], rows.slots[-1] + 1)
        return self._forwards.run(Batch.of(parts, self._pool.block_size), features_RD)

    def follow(self, parts: Seq[Rows]) -> Follow | None:
        """See `recurrent.Context.follow`."""
        for rows in parts:
            self._overwritten(rows.blocks, rows.prefix[0] + 1, rows.slots[-1] + 1)
        return self._forwards.follow(Batch.of(parts, self._pool.block_size))

    def _overwritten(self, blocks: Seq[int], first: int, end: int) -> None:
        """Rows are written to the slots `first .. end - 1`: what their blocks held is lost."""
        size = self._pool.block_size
        for block in blocks[first // size : -(-end // size)] if end > first else []:
            self._names.pop(block, None)

    def _begin(self, seq: Sequence, start: int) -> Kept:
        """What is known of a text when it is first seen: the blocks of a prefix hit, where they are still whole."""
        size = self._pool.block_size
        count = start // size
        names = seq.block_names(count, size)
        whole = 0
        while whole < count and self._names.get(seq.blocks[whole]) == names[whole]:
            whole += 1
        kept = self._kept[seq] = Kept(self._first)
        if self._first == 0:
            kept.filled = whole * size
        elif start > 0:
            kept.filled = start if whole == count and start % size == 0 else None
            kept.waiting = [self._features_BD[seq.blocks[count - 1]][None]]
        return kept

    def _fill(self, due: Seq[tuple[Sequence, Kept, int, int]]) -> None:
        """Run the rows of slots `start .. end` of each text, in forwards of at most `CHUNK` rows."""
        left = list(due)
        while left:
            parts, features, taken, room = [], [], [], CHUNK
            for seq, kept, start, end in left:
                stop = min(end, start + room)
                if stop > start:
                    parts.append(Rows.known(seq.blocks, seq.tokens[start:stop], start))
                    if self._first:
                        kept.waiting = [torch.cat(kept.waiting)]
                        features.append(kept.waiting[0][: stop - start])
                    taken.append((seq, kept, start, stop))
                    room -= stop - start
            hidden_RD = self.run(parts, torch.cat(features) if features else None)
            row = 0
            for seq, kept, start, stop in taken:
                row += stop - start
                kept.hidden = hidden_RD[row - 1] if stop == len(seq.tokens) else None
                self._settle(seq, kept, stop)
            stops = {seq: stop for seq, _, _, stop in taken}
            left = [(seq, kept, stops.get(seq, start), end) for seq, kept, start, end in left]
            left = [item for item in left if item[2] < item[3]]

    def _settle(self, seq: Sequence, kept: Kept, filled: int) -> None:
        """Take in that the slots up to `filled` hold rows: note the blocks that are whole now."""
        size, start = self._pool.block_size, kept.filled
        assert start is not None
        whole = range(start // size, filled // size)
        if self._first:
            # waiting[0][i] is the feature of token start - 1 + i: a block is whole with that of its last token.
            (features_nD,) = kept.waiting
            num_features = start - 1 + len(features_nD)  # tokens whose features are known
            whole = range((start - 1) // size, min(filled, num_features) // size)
            for block in whole:
                self._features_BD[seq.blocks[block]] = features_nD[(block + 1) * size - start]
            rest = features_nD[filled - start :]
            kept.waiting = [rest.clone()] if len(rest) else []
        if whole:
            names = seq.block_names(whole.stop, size)
            for block in whole:
                self._names[seq.blocks[block]] = names[block]
        kept.filled = filled
