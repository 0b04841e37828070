"""From options to drafters that are models, made for one target. Knows files through the loader only, and no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.drafters.draft_model import Borrowed, CausalHead
from specdec.drafters.memory import Memory, Pool
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.errors import ConfigError
from specdec.loader import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from specdec.drafters.grow import Growth
    from specdec.kv import KVCache
    from specdec.protocols import Model
    from specdec.tokenizer import Tokenizer

DRAFT_MODEL, LAYER_SKIP = "draft_model", "layer_skip"


@dataclass(frozen=True, slots=True)
class Target:
    """What is drafted for: its files, the loaded model, the cache it runs over, and the blocks of that cache.

    `load` gives a causal model the dtype and quantisation that this engine runs with, `open_tokenizer` finds a
    checkpoint's; `source` names the files of the drafter, None where there are none.
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


def draft_model(target: Target, argument: str) -> RecurrentDrafter:
    """A second causal model with the target's tokenizer. Raises `ConfigError` where the tokenizers differ, and
    `ModelError` for its files."""
    if target.source is None:
        raise ConfigError(f"drafter {DRAFT_MODEL} needs a model: name one with --draft-model")
    if argument:
        raise ConfigError(f"drafter {DRAFT_MODEL} takes no number, got {argument!r}")
    checkpoint = open_checkpoint(target.source)
    _same_tokens(target, checkpoint)
    size = min(len(target.tokenizer.token_bytes_table()), target.model.vocab_size)
    head = CausalHead(DRAFT_MODEL, target.load(checkpoint), target.model.vocab_size, num_tokens=size)
    memory = Memory(head.forward, head.layers, 0, target.pool)
    longest = checkpoint.config.max_position_embeddings
    return RecurrentDrafter(head, memory, target.model.vocab_size, target.growth, longest)


def layer_skip(target: Target, argument: str) -> RecurrentDrafter:
    """The target's own first layers and its head. `argument` says how many; two thirds if left out. Raises
    `ConfigError` for a number outside 1 to the target's."""
    count = len(target.model.layers)
    depth = (
        max(1, 2 * count // 3) if not argument else int(argument) if argument.isascii() and argument.isdigit() else 0
    )
    if not 1 <= depth <= count:
        raise ConfigError(f"drafter {LAYER_SKIP} takes 1 to {count} layers of this model, got {argument!r}")
    head = CausalHead(LAYER_SKIP, target.model, target.model.vocab_size, depth=depth)
    context = Borrowed(head, target.cache, target.pool.device)
    return RecurrentDrafter(head, context, target.model.vocab_size, target.growth)


def _same_tokens(target: Target, draft: Checkpoint) -> None:
    """Sizes say nothing: rows beyond the real vocabulary are padding, and equal sizes may hold other tokens."""
    ours, theirs = (one.token_bytes_table() for one in (target.tokenizer, target.open_tokenizer(draft)))
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
