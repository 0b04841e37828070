"""The options of an engine, checked once. Sizes are in tokens, slots or rows; nothing here knows a model."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.errors import ConfigError
from specdec.tree import MAX_DRAFTS

# What each is at least: a context holds a token to go on from and one behind it.
SIZES = {"max_model_len": 2, "block_size": 1, "max_num_seqs": 1, "max_rows": 1, "max_waiting": 1}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`max_model_len` bounds prompt + output; `num_slots` is the KV pool in tokens; `max_rows` is what one forward may
    compute (known tokens and drafts together); `max_drafts` bounds the tree of one sequence.

    Raises `ConfigError` that names the option.
    """

    max_model_len: int
    num_slots: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_rows: int = 512
    max_drafts: int = 16
    max_waiting: int = 256
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in (*SIZES, "num_slots", "max_drafts"):
            if type(getattr(self, name)) is not int:
                raise ConfigError(f"{name} must be an integer, got {getattr(self, name)!r}")
        for name, least in SIZES.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.max_drafts <= MAX_DRAFTS:
            raise ConfigError(f"max_drafts must be between 0 and {MAX_DRAFTS}, got {self.max_drafts}")
        # One sequence alone must always fit with a full tree, or preemption could go round for ever.
        least_slots = self.max_model_len + MAX_DRAFTS + 2
        if self.num_slots < least_slots:
            raise ConfigError(
                f"num_slots (kv_cache_tokens) must be at least max_model_len + {MAX_DRAFTS + 2} = {least_slots}, "
                f"got {self.num_slots}: make it larger or max_model_len smaller"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the scrap block included."""
        return -(-self.num_slots // self.block_size) + 1
