"""From options to drafters that are models, made for one target. Knows files through loaders only, and no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from specdec.drafters.ahead import MaskedVoice, MedusaVoice
from specdec.drafters.draft_model import Borrowed, CausalHead
from specdec.drafters.heads import Head, Target
from specdec.drafters.heads.checkpoint import DRAFT_MODEL, family_of, open_head
from specdec.drafters.heads.medusa import Medusa
from specdec.drafters.heads.mtp import Mtp
from specdec.drafters.heads.peagle import PEagle
from specdec.drafters.memory import Memory
from specdec.drafters.model_drafter import ModelDrafter, Voice
from specdec.drafters.recurrent import Recurrent
from specdec.errors import ConfigError
from specdec.loader import Checkpoint, find_folder, open_checkpoint

if TYPE_CHECKING:
    from specdec.drafters.grow import Growth
    from specdec.kv import KVCache, Pool
    from specdec.protocols import Model
    from specdec.tokenizer import Tokenizer

LAYER_SKIP, MTP = "layer_skip", "mtp"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a drafter that is a model is made for: the target's files, the loaded model, the cache it runs over, the
    blocks of that cache, and how trees grow.

    `load` gives a causal model the dtype and quantisation that this engine runs with, `open_tokenizer` finds a
    checkpoint's. `source` names the files of the drafter, None where there are none; `overrides` are knobs of its
    family.
    """

    checkpoint: Checkpoint
    model: Model
    cache: KVCache
    pool: Pool
    tokenizer: Tokenizer
    growth: Growth
    load: Callable[[Checkpoint], Model]
    open_tokenizer: Callable[[Checkpoint], Tokenizer]
    source: str | None = None
    overrides: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


def family(source: str) -> str:
    """What kind of drafter a folder, a .gguf file, a name that `specdec pull` knows or a hub id holds: a family of
    heads, or "draft_model". Raises `ModelError` for files that hold none."""
    folder = find_folder(source)
    return DRAFT_MODEL if folder is None else family_of(folder)


def draft_model(setup: Setup, argument: str) -> ModelDrafter:
    """A second causal model with the target's tokenizer. Raises `ConfigError` where the tokenizers differ, and
    `ModelError` for its files."""
    _no_number(DRAFT_MODEL, argument)
    if setup.source is None:
        raise ConfigError(f"drafter {DRAFT_MODEL} needs a model: name one with --draft-model")
    if setup.overrides:
        raise ConfigError(f"draft_overrides are for heads; a draft model has none, got {', '.join(setup.overrides)}")
    checkpoint = open_checkpoint(setup.source)
    _same_tokens(setup, checkpoint)
    vocab_size = setup.model.vocab_size
    num_tokens = min(len(setup.tokenizer.token_bytes_table()), vocab_size)
    head = CausalHead(DRAFT_MODEL, setup.load(checkpoint), vocab_size, num_tokens=num_tokens)
    longest = checkpoint.config.max_position_embeddings
    return ModelDrafter(voice_of(head, setup.pool, 0), vocab_size, setup.growth, longest)


def layer_skip(setup: Setup, argument: str) -> ModelDrafter:
    """The target's own first layers and its head. `argument` says how many; two thirds if left out. Raises
    `ConfigError` for a number outside 1 to the target's."""
    count = len(setup.model.layers)
    depth = max(1, 2 * count // 3)
    if argument:
        depth = int(argument) if argument.isascii() and argument.isdigit() and len(argument) < 5 else 0
    if not 1 <= depth <= count:
        raise ConfigError(f"drafter {LAYER_SKIP} takes 1 to {count} layers of this model, got {argument[:20]!r}")
    head = CausalHead(LAYER_SKIP, setup.model, setup.model.vocab_size, depth=depth)
    context = Borrowed(head, setup.cache, setup.pool)
    return ModelDrafter(Recurrent(head, context), setup.model.vocab_size, setup.growth)


def head(setup: Setup, argument: str) -> ModelDrafter:
    """A head over the target's hidden states: EAGLE, EAGLE-3, P-EAGLE, MTP, Medusa; from `source`, or, where there is
    none, from the target's own folder. Raises `ModelError` for its files and `ConfigError` for overrides."""
    _no_number("that is a head", argument)
    if setup.source is None:
        folder = Path(setup.checkpoint.path)
        if not folder.is_dir() or family_of(folder) != MTP:
            raise ConfigError(
                f"drafter {MTP}: the target {folder} holds no module for multi-token prediction; name the files of one "
                "with --draft-model"
            )
    else:
        found = find_folder(setup.source)
        if found is None or not found.is_dir():
            raise ConfigError(f"a drafter that is a head is a folder; {setup.source} is none")
        folder = found
    config = setup.checkpoint.config
    target = Target(
        len(setup.model.layers), config.hidden_size, setup.model.vocab_size, setup.model.embed, setup.model.logits
    )
    opened = open_head(folder, target, setup.overrides, device=setup.pool.device, dtype=setup.pool.dtype)
    return ModelDrafter(voice_of(opened, setup.pool, config.hidden_size), setup.model.vocab_size, setup.growth)


def voice_of(head: Head | Medusa, pool: Pool, hidden_size: int) -> Voice:
    """The voice of a head with rows of its own in the blocks of `pool`; `hidden_size` is the target's."""
    if isinstance(head, Medusa):
        return MedusaVoice(head)
    width = 0
    if head.taps:
        with torch.inference_mode():
            nothing = torch.zeros(1, hidden_size, device=pool.device, dtype=pool.dtype)
            width = head.features([nothing] * len(head.taps)).shape[1]
    capturable = not (isinstance(head, Mtp) and head.has_experts)
    memory = Memory(head.forward, head.layers, width, pool, capturable=capturable)
    return MaskedVoice(head, memory) if isinstance(head, PEagle) else Recurrent(head, memory)


def _no_number(name: str, argument: str) -> None:
    if argument:
        raise ConfigError(f"drafter {name} takes no number, got {argument!r}")


def _same_tokens(setup: Setup, draft: Checkpoint) -> None:
    """Sizes say nothing: rows beyond the real vocabulary are padding, and equal sizes may hold other tokens."""
    ours, theirs = (one.token_bytes_table() for one in (setup.tokenizer, setup.open_tokenizer(draft)))
    if ours == theirs:
        return
    if len(ours) != len(theirs):
        difference = f"{len(theirs)} tokens, and the target has {len(ours)}"
    else:
        token = next(token for token, one in enumerate(ours) if one != theirs[token])
        difference = f"token {token} is {theirs[token]!r}, and the target's is {ours[token]!r}"
    raise ConfigError(
        f"draft model {draft.path}: its tokenizer is not the target's ({difference}); a draft model must share it"
    )
