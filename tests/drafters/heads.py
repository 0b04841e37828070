"""Drafters that are models, for tests: tiny ones, and what each must say by a dense recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.config import EngineConfig
from specdec.drafters.draft_model import Borrowed, CausalHead
from specdec.drafters.grow import Growth
from specdec.drafters.heads import Head
from specdec.drafters.heads.medusa import Medusa
from specdec.drafters.heads.peagle import PEagle
from specdec.drafters.model_drafter import ModelDrafter, Voice
from specdec.drafters.open import voice_of
from specdec.drafters.recurrent import Recurrent
from specdec.drafters.survival import Draws
from specdec.engine import Engine
from specdec.kernels.norm_rope import rotary_table
from specdec.kv import Pool
from specdec.protocols import Attend, Drafter, LayerShape, Model
from specdec.request import Stopping
from specdec.runner import TorchRunner
from specdec.text import Detokenizer
from tests.models.dense import Dense


class PairHead:
    """A one-layer head that takes features of three places of the target; every part of it matters to its logits."""

    name: str = "pair"
    taps: tuple[int, ...]
    targets: Tensor | None

    def __init__(self, target: Model, width: int, taps: tuple[int, ...], targets: Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        self.taps = taps
        self.targets = targets
        self.layers: Seq[LayerShape] = [LayerShape(2, 16)]
        self._target = target
        size = target.vocab_size if targets is None else len(targets)

        def random(*shape: int) -> Tensor:
            drawn: Tensor = torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
            return drawn

        self._fuse = random(width, width * len(taps))
        self._mix = random(width, 2 * width)
        self._q, self._k, self._v = random(64, width) * 2, random(32, width) * 2, random(32, width)
        self._o, self._head = random(width, 64), random(size, width) * 2
        self._frequencies = 1.0 / 100.0 ** (torch.arange(8) / 8)

    def features(self, taps: Seq[Tensor]) -> Tensor:
        return torch.cat([*taps], 1) @ self._fuse.T

    def forward(self, tokens_R: Tensor, features_RD: Tensor | None, positions_R: Tensor, attend: Attend) -> Tensor:
        assert features_RD is not None
        x_RD = torch.tanh(torch.cat([self._target.embed(tokens_R), features_RD], 1) @ self._mix.T)
        rotary = rotary_table(positions_R, self._frequencies)
        q, k, v = ((x_RD @ weight.T).view(len(x_RD), -1, 16) for weight in (self._q, self._k, self._v))
        out_RHK = attend(0, torch.cat((q, k), 1), v, rotary, scale=0.25)
        return x_RD + out_RHK.flatten(1) @ self._o.T

    def logits(self, hidden_LD: Tensor) -> Tensor:
        return hidden_LD @ self._head.T


@torch.inference_mode()
def dense_draft(head: Head | Medusa, target: Model, tokens: list[int], path: tuple[int, ...]) -> Tensor:
    """The head's logits `[V]` behind `path`, from nothing but the tokens and dense features of the target."""
    if isinstance(head, Medusa):
        _, (hidden_RD,) = target.forward(torch.tensor(tokens), torch.arange(len(tokens)), Dense(), head.taps)
        return head.logits(hidden_RD[-2:-1], len(path))[0]
    if not head.taps:
        both = torch.tensor([*tokens, *path])
        hidden_RD = head.forward(both, None, torch.arange(len(both)), Dense())
        return head.logits(hidden_RD[-1:])[0]
    known = torch.tensor(tokens)
    _, taps = target.forward(known, torch.arange(len(known)), Dense(), head.taps)
    features_RD = head.features(taps)[:-1]
    rows = known[1:]
    if isinstance(head, PEagle):
        rows = torch.cat([rows, torch.full((len(path),), head.mask_token)])
        features_RD = torch.cat([features_RD, head.mask_features().expand(len(path), -1)])
        path = ()
    while True:
        hidden_RD = head.forward(rows, features_RD, torch.arange(1, len(rows) + 1), Dense())
        if not path:
            return head.logits(hidden_RD[-1:])[0]
        rows = torch.cat([rows, torch.tensor(path[:1])])
        features_RD = torch.cat([features_RD, hidden_RD[-1:]])
        path = path[1:]


@dataclass
class Seen:
    """One row of logits that a drafter guessed from."""

    tokens: list[int]
    path: tuple[int, ...]
    logits_V: Tensor = field(repr=False)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Seen]]:
    """Everything that drafters guess from, as it comes."""
    seen: list[Seen] = []
    guess = Draws.guess

    def watching(self: Draws, logits_V: Any, path: tuple[int, ...], *rest: Any) -> Any:
        seen.append(Seen(list(self.seq.tokens), path, torch.from_numpy(logits_V.copy())))
        return guess(self, logits_V, path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Draws, "guess", watching)
        yield seen


def causal(model: Model, name: str = "draft_model", depth: int | None = None) -> CausalHead:
    return CausalHead(name, model, model.vocab_size, depth=depth)


def engine_with(
    target: Model,
    head: Head | Medusa,
    config: EngineConfig,
    *,
    token_bytes: list[bytes],
    end_tokens: tuple[int, ...],
    growth: Growth | None = None,
    max_length: int | None = None,
    captured_blocks: int = 0,
    beside: Callable[[ModelDrafter], Seq[Drafter]] = lambda drafter: [drafter],
) -> Engine:
    """An engine whose drafter grows from `head`: with a memory of its own, or in the target's cache ("layer_skip")."""
    runner = TorchRunner(target, num_blocks=config.num_blocks, block_size=config.block_size)
    pool = Pool(config.num_blocks, config.block_size, "cpu", torch.float32, captured_blocks=captured_blocks)
    if isinstance(head, CausalHead) and head.name == "layer_skip":
        voice: Voice = Recurrent(head, Borrowed(head, runner.cache, pool))
    else:
        voice = voice_of(head, pool, target.embed(torch.zeros(1, dtype=torch.int64)).shape[1])
    drafter = ModelDrafter(voice, target.vocab_size, growth, max_length)

    def new_text(stopping: Stopping) -> Detokenizer:
        return Detokenizer(token_bytes.__getitem__, stop=stopping.stop, min_tokens=stopping.min_tokens)

    return Engine(runner, beside(drafter), config, new_text=new_text, end_tokens=end_tokens)


def without_drafts(config: EngineConfig) -> EngineConfig:
    """The same engine, root-only."""
    return replace(config, max_drafts=0)
