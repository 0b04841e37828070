"""A real byte-level BPE tokenizer trained on a few lines: two end tokens, a special one, and logits wider than it."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from specdec.grammar.compile import Compiler
from specdec.grammar.llguidance import LlguidanceTokens
from specdec.tokenizer import Tokenizer as ProductTokenizer

PAD, END, END_OF_TURN = 0, 1, 2
END_IDS = (END, END_OF_TURN)
LINES = [
    '{"name": "Ada Lovelace", "age": 36, "tags": ["mathematics", "poetry"]}',
    '{"name":"Alan Turing","age":41,"tags":["running"]}',
    '{\n  "city": "Zürich",\n  "zip": 8001,\n  "open": true\n}',
    "the quick brown fox jumps over the lazy dog, twice, and then a third time",
    "true false null 0123456789 -1.5e10 1999-12-31T23:59:59Z ada@example.org",
]


@functools.cache
def small_tokenizer() -> Tokenizer:
    """About 450 tokens. `<tool>` is an added token that the file does not call special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=["<pad>", "<end>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES * 4, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])  # the last id
    return tokenizer


TOKENIZER_SIZE: int = small_tokenizer().get_vocab_size()
TOOL: int = TOKENIZER_SIZE - 1
VOCAB_SIZE = TOKENIZER_SIZE + 41
SPECIAL_IDS = frozenset({PAD, END, END_OF_TURN, TOOL})


def new_compiler() -> Compiler:
    """A compiler with an empty cache."""
    return Compiler(small_tokenizer().to_str(), VOCAB_SIZE, END_IDS, SPECIAL_IDS)


@functools.cache
def compiler() -> Compiler:
    """One compiler for all tests that do not look at its cache."""
    return new_compiler()


@functools.cache
def llguidance_tokens() -> LlguidanceTokens:
    """The tokens of that compiler, for grammars that it would refuse."""
    return LlguidanceTokens.load(small_tokenizer().to_str(), VOCAB_SIZE, END_IDS, SPECIAL_IDS)


def encode(text: str) -> list[int]:
    """The tokens of plain text."""
    ids: list[int] = small_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def decode(tokens: list[int]) -> str:
    """The text of tokens."""
    text: str = small_tokenizer().decode(tokens, skip_special_tokens=False)
    return text


def spell(token: int) -> bytes:
    """The bytes of one token; none for those that are no text."""
    return b"" if token in SPECIAL_IDS or token >= TOKENIZER_SIZE else _token_bytes()[token]


@functools.cache
def _token_bytes() -> tuple[bytes, ...]:
    return tuple(ProductTokenizer(small_tokenizer().to_str()).token_bytes_table())
