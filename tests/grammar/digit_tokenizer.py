"""A byte-level BPE tokenizer with a token for every number of one, two and three digits, as many models have."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specdec.grammar.llguidance import LlguidanceTokens

END = 0


@functools.cache
def digit_tokens() -> LlguidanceTokens:
    """Its 1,357 tokens; the first ends a text."""
    vocabulary, merges = {"<end>": END}, list[tuple[str, str]]()
    for piece in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[piece] = len(vocabulary)
    for width in (2, 3):
        for number in range(10**width):
            digits = f"{number:0{width}d}"
            vocabulary[digits] = len(vocabulary)
            merges.append((digits[:-1], digits[-1]))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return LlguidanceTokens.load(tokenizer.to_str(), len(vocabulary), (END,), frozenset({END}))


def digit_token(digits: str) -> int:
    """The token that spells one, two or three digits."""
    return digit_tokens().table.ids[digits.encode()][0]
