"""A tokenizer with its end tokens, and a compiler of grammars for it, without the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as InnerTokenizer

from specdec.errors import ModelError
from specdec.grammar.compile import Compiler
from specdec.grammar.spelling import Spelling
from specdec.tokenizer import Tokenizer

BYTES = "byte"  # the name of the vocabulary that has a token for every byte, and nothing else


@dataclass(frozen=True)
class EvalVocabulary:
    """What an evaluation of grammars needs of a model. `size` is the width of the logits."""

    name: str
    tokenizer: Tokenizer
    size: int
    end_ids: tuple[int, ...]

    def compiler(self, remotes: Mapping[str, Any], backend: str = "auto") -> Compiler:
        """A compiler with an empty cache; `remotes` are the documents that references may point to."""
        special_ids = self.tokenizer.special_ids
        return Compiler(self.tokenizer.json, self.size, self.end_ids, special_ids, remotes=remotes, backend=backend)

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """The first token that spells each run of bytes."""
        ids: dict[bytes, int] = {}
        for token, spelled in enumerate(self.tokenizer.token_bytes_table()[: self.size]):
            if spelled:
                ids.setdefault(spelled, token)
        return ids

    @cached_property
    def spelling(self) -> Spelling:
        """How the strings of JSON are spelled with these tokens."""
        return Spelling.of(self.ids)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.ids))

    def encode(self, text: str) -> list[int]:
        """The tokenizer's own tokens of `text`, or, where those spell something else, the longest that fit from the
        left. Raises ValueError where the vocabulary cannot spell the text."""
        data = text.encode()
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if b"".join(map(self.tokenizer.token_bytes, tokens)) == data:
            return tokens
        tokens, place = [], 0
        while place < len(data):
            for length in range(min(self.longest, len(data) - place), 0, -1):
                token = self.ids.get(data[place : place + length])
                if token is not None:
                    tokens.append(token)
                    place += length
                    break
            else:
                raise ValueError(f"the vocabulary cannot spell byte 0x{data[place]:02x}")
        return tokens


def open_vocabulary(name: str) -> EvalVocabulary:
    """The vocabulary of "byte", of a tokenizer.json, or of a model (a name that `pull` knows, a folder, a .gguf file,
    a hub id). Raises `ModelError`."""
    if name == BYTES:
        return byte_vocabulary()
    if Path(name).suffix == ".json":
        tokenizer = Tokenizer.from_file(name)
        spelled = tokenizer.named_tokens.get("eos_token")
        end = next((token for token in sorted(tokenizer.special_ids) if tokenizer.token_text(token) == spelled), None)
        if end is None:
            raise ModelError(f"{name}: a tokenizer_config.json beside it must name the eos_token, a special token")
        return EvalVocabulary(Path(name).parent.name or name, tokenizer, tokenizer.vocab_size, (end,))
    from specdec.build import end_tokens, open_tokenizer
    from specdec.loader import open_checkpoint

    checkpoint = open_checkpoint(name)
    tokenizer = open_tokenizer(checkpoint)
    size = max(checkpoint.config.vocab_size, tokenizer.vocab_size)
    return EvalVocabulary(checkpoint.name, tokenizer, size, end_tokens(checkpoint, size))


@cache
def byte_vocabulary() -> EvalVocabulary:
    """256 tokens of one byte each, and one that ends the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = InnerTokenizer(models.BPE(vocab={piece: token for token, piece in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    tokenizer = Tokenizer(inner.to_str(), source="byte tokenizer")
    (end,) = tokenizer.special_ids
    return EvalVocabulary(BYTES, tokenizer, tokenizer.vocab_size, (end,))
