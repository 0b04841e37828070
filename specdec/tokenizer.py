"""Text to token ids and back, over a `tokenizer.json`. Knows no model and no chat.

Special tokens are known to the inner tokenizer under unguessable names only. So text never becomes a special token by
itself; where a caller asks for it, their spellings are found first and replaced by those names.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from specdec.errors import InvalidRequest, ModelError
from specdec.gguf_tokenizer import gguf_named_tokens, tokenizer_json
from specdec.text import Detokenizer

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 28
CONTINUED = 8  # tokens before a text that may say how it is spelled
_CACHE_VERSION = 1  # of what `tokenizer_json` writes; part of the cache key


class Tokenizer:
    """One vocabulary with its rules. Immutable, shared by threads; long texts are encoded without the GIL.

    `vocab_size` is the largest id plus one (a model's own may be larger), `special_ids` the control tokens, `prefix`
    what `encode` puts before a text, `json` the text of the `tokenizer.json`, `named_tokens` how the tokens with a role
    are spelled (`bos_token`, `eos_token`, ...).
    """

    def __init__(
        self, text: str, *, named_tokens: Mapping[str, str] | None = None, source: str = "tokenizer.json"
    ) -> None:
        """Raises ModelError, naming `source`, for a text that is not a tokenizer or is of a kind that is not known."""
        self.json = text
        try:
            whole = json.loads(text)
            vocab = _vocabulary(whole)
            added = [(token["content"], int(token["id"]), bool(token["special"])) for token in whole["added_tokens"]]
            self._spelling = {token: content for content, token, special in added if special}
            self._spell_bytes, self._strip_space = _decoder(whole["decoder"], source)
            self._names = _rename(whole, self._spelling)
            self._inner = tokenizers.Tokenizer.from_str(json.dumps(whole, ensure_ascii=False, separators=(",", ":")))
        except ModelError:
            raise
        except Exception as error:  # the library raises bare Exception for what it cannot parse
            raise ModelError(f"{source}: not a tokenizer that can be read: {error!r}") from error
        for token, name in self._names.items():
            if self._inner.token_to_id(name) != token:
                raise ModelError(f"{source}: special token {self._spelling[token]!r} does not get its id {token}")
        self.special_ids = frozenset(self._spelling)
        self._ids = vocab | {content: token for content, token, _ in added}
        self.vocab_size = max(self._ids.values(), default=-1) + 1
        self._added = [(content, token) for content, token, _ in added]
        self.prefix = self._find_prefix()
        self.named_tokens = dict(named_tokens or {})
        if self.prefix:
            self.named_tokens.setdefault("bos_token", self.token_text(self.prefix[0]))

    @classmethod
    def from_file(cls, path: Path | str) -> Tokenizer:
        """From a `tokenizer.json`; a `tokenizer_config.json` beside it says which tokens have a role.

        Raises ModelError, naming the file, if one of them is missing, too large or unreadable.
        """
        path = Path(path)
        text = _read(path)
        config_path = path.with_name("tokenizer_config.json")
        named_tokens = _named_in_config(config_path) if config_path.exists() else {}
        return cls(text, named_tokens=named_tokens, source=str(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], cache: Path | None = None) -> Tokenizer:
        """From GGUF tokenizer metadata (see `gguf_tokenizer`). With `cache`, a folder, the rebuilt `tokenizer.json` is
        kept there under the hash of the metadata. Raises ModelError, naming the key, for what cannot be rebuilt."""
        named_tokens = gguf_named_tokens(metadata)
        if cache is None:
            return cls(tokenizer_json(metadata), named_tokens=named_tokens, source="gguf tokenizer")
        path = cache / f"{_fingerprint(metadata)}.json"
        if path.exists():
            try:
                return cls(_read(path), named_tokens=named_tokens, source=str(path))
            except ModelError as error:
                logger.warning("rebuilding a damaged tokenizer: %s", error)
        text = tokenizer_json(metadata)
        tokenizer = cls(text, named_tokens=named_tokens, source="gguf tokenizer")
        cache.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of `text`. `add_special_tokens` adds what the tokenizer puts around a text (BOS); `parse_special`
        turns spellings of special tokens into these, else they are ordinary text.

        Raises InvalidRequest naming `prompt` for what is not a string or holds half of a surrogate pair.
        """
        return self.encode_parts([(text, parse_special)], add_special_tokens=add_special_tokens)

    def encode_parts(self, parts: Iterable[tuple[str, bool]], *, add_special_tokens: bool = False) -> list[int]:
        """The ids of the parts' joined text; spellings of special tokens are parsed only inside parts marked True.

        Raises InvalidRequest as `encode`.
        """
        whole = "".join(self._marked(_text(text)) if parse_special else _text(text) for text, parse_special in parts)
        ids: list[int] = self._inner.encode_batch_fast([whole], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_after(self, before: Sequence[int], text: str) -> list[int]:
        """The ids of `text` where it goes on after the ids `before`, as a model would write it there: nothing is put
        before it. Special tokens are not parsed.

        Raises InvalidRequest as `encode`.
        """
        end: list[int] = []
        for token in before[-CONTINUED:]:
            end = [] if token in self.special_ids else [*end, token]
        whole = self._encode_bare(self._joined(end).decode("utf-8", "replace") + _text(text))
        # Where the border of the two would be merged: `before` is written already.
        return whole[len(end) :] if whole[: len(end)] == end else self._encode_bare(text)

    def _encode_bare(self, text: str) -> list[int]:
        """The ids of `text` without the space that some tokenizers put before it."""
        ids = self.encode_parts([(text, False)])
        if self._joined(ids) != text.encode():
            lead = self.encode_parts([("\n", False)])
            led = self.encode_parts([("\n" + text, False)])
            if led[: len(lead)] == lead and self._joined(led[len(lead) :]) == text.encode():
                return led[len(lead) :]
        return ids

    def _joined(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))

    def special_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Where `text` spells special tokens: (start, end, id), in characters, leftmost and longest first.

        Raises InvalidRequest as `encode`.
        """
        encoding = self._finder.encode_batch([_text(text)], add_special_tokens=False)[0]
        found = [(start, end, self._added[index - 1][1]) for index, (start, end) in _spans(encoding) if index > 0]
        return [span for span in found if span[2] in self.special_ids]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, as a `detokenizer` at the start of a text shows it: invalid UTF-8 becomes U+FFFD.

        Special tokens are left out, or spelled where `skip_special` is False. Raises ValueError for a negative id.
        """
        if skip_special:
            data = b"".join(map(self.token_bytes, ids))
        else:
            data = b"".join(
                self._spelling[token].encode() if token in self._spelling else self.token_bytes(token) for token in ids
            )
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strip_space else text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` adds to a text: none for a special token, nor for an id that no token has (models pad
        their vocabulary). Raises ValueError for a negative id."""
        if token < 0:
            raise ValueError(f"token id {token} is negative")
        table = self.token_bytes_table()
        return table[token] if token < len(table) else b""

    def token_text(self, token: int) -> str:
        """`token` as reports show it: special tokens as they are spelled, bytes that are no character as U+FFFD."""
        spelling = self._spelling.get(token)
        return spelling if spelling is not None else self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes_table(self) -> list[bytes]:
        """`token_bytes` of every id below `vocab_size`. One list, shared: do not change it."""
        return self._bytes

    def detokenizer(
        self,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        *,
        min_tokens: int = 0,
        at_start: bool = False,
    ) -> Detokenizer:
        """A fresh detokenizer; no stop string counts within `min_tokens` tokens.

        `at_start` says that its text begins a text (as for `decode`) and does not continue a prompt: tokenizers of the
        Llama 2 kind then drop the space that they put before it.
        """
        return Detokenizer(
            self.token_bytes,
            stop=stop,
            include_stop=include_stop,
            strip_space=at_start and self._strip_space,
            min_tokens=min_tokens,
        )

    @cached_property
    def _bytes(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        literal = {content for content, _ in self._added}
        for piece, token in self._ids.items():
            if token not in self._spelling:
                table[token] = self._spell_bytes(piece, piece in literal)
        return table

    @cached_property
    def _finder(self) -> tokenizers.Tokenizer:
        """Finds the spellings of added tokens, in linear time: token i + 1 is added token i, token 0 any other text."""
        finder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
        finder.add_tokens([tokenizers.AddedToken(content, normalized=False) for content, _ in self._added])
        return finder

    def _marked(self, text: str) -> str:
        """`text` with the special tokens that it spells under their inner names."""
        pieces, place = [], 0
        for start, end, token in self.special_spans(text):
            pieces += [text[place:start], self._names[token]]
            place = end
        return "".join([*pieces, text[place:]])

    def _find_prefix(self) -> tuple[int, ...]:
        bare = self.encode("a", add_special_tokens=False)
        whole = self.encode("a")
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return tuple(whole[:start])
        return ()


def _spans(encoding: tokenizers.Encoding) -> Iterable[tuple[int, tuple[int, int]]]:
    return zip(encoding.ids, encoding.offsets, strict=True)


def _text(text: object) -> str:
    if not isinstance(text, str):
        raise InvalidRequest("prompt", f"must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise InvalidRequest(
            "prompt", f"holds half of a surrogate pair ({half}) at character {error.start}; it must be valid Unicode"
        ) from None
    return text


def _vocabulary(whole: Mapping[str, Any]) -> dict[str, int]:
    """Pieces of the model part of a `tokenizer.json`: a mapping, or (Unigram) a list of pieces with scores."""
    vocab = whole["model"]["vocab"]
    if isinstance(vocab, list):
        return {piece: token for token, (piece, _) in enumerate(vocab)}
    return dict(vocab)


def _rename(whole: dict[str, Any], spelling: Mapping[int, str]) -> dict[int, str]:
    """Give each special token of a parsed `tokenizer.json` a name that no text can hold; returns the names by id."""
    nonce = secrets.token_hex(16)
    names = {token: f"<{nonce}-{token}>" for token in spelling}
    renamed = {content: names[token] for token, content in spelling.items()}
    for added in whole["added_tokens"]:
        if added["special"]:
            added["content"] = renamed[added["content"]]
            added["single_word"] = False
    model = whole["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {renamed.get(piece, piece): token for piece, token in model["vocab"].items()}
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    return names


class _ByteLevel:
    """Bytes of a piece in GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._byte = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

    def __call__(self, piece: str, literal: bool) -> bytes:
        if not literal:
            try:
                return bytes(map(self._byte.__getitem__, piece))
            except KeyError:
                pass  # a piece outside the alphabet is plain text, as for the tokenizer's own decoder
        return piece.encode()


class _Spelled:
    """Bytes of a piece that is text with some characters respelled, or (`bytes_too`) `<0xNN>` for one byte."""

    def __init__(self, replacements: Sequence[tuple[str, str]], bytes_too: bool) -> None:
        self._replacements = replacements
        self._bytes = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if bytes_too else {}

    def __call__(self, piece: str, literal: bool) -> bytes:
        byte = self._bytes.get(piece)
        if byte is not None:
            return byte
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def _decoder(decoder: Mapping[str, Any] | None, source: str) -> tuple[_ByteLevel | _Spelled, bool]:
    """How pieces spell bytes, and whether a text loses a leading space. Raises ModelError for an unknown decoder."""
    if decoder is None:
        raise ModelError(f"{source}: no decoder; one is needed to turn tokens into text")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    replacements: list[tuple[str, str]] = []
    bytes_too = strip_space = byte_level = False
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "ByteFallback":
            bytes_too = True
        elif kind == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            replacements.append((step["replacement"], " "))
            strip_space = step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            strip_space = True
        elif kind != "Fuse":
            raise ModelError(
                f"{source}: decoder {json.dumps(step)} is not known; byte-level and SentencePiece ones are"
            )
    if byte_level and len(steps) > 1:
        raise ModelError(f"{source}: a ByteLevel decoder must stand alone, found {len(steps)} steps")
    return (_ByteLevel() if byte_level else _Spelled(replacements, bytes_too)), strip_space


def _named_in_config(path: Path) -> dict[str, str]:
    """The tokens with a role in a `tokenizer_config.json`: all keys `..._token` that hold a spelling."""
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: must hold an object, got {type(config).__name__}")
    named = {}
    for key, value in config.items():
        spelling = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(spelling, str):
            named[key] = spelling
    return named


def _fingerprint(metadata: Mapping[str, Any]) -> str:
    """A hash of all that `tokenizer_json` reads."""
    keys = sorted(key for key in metadata if key != "chat_template")
    described = json.dumps([_CACHE_VERSION, *((key, metadata[key]) for key in keys)], default=list)
    return hashlib.sha256(described.encode()).hexdigest()


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ModelError(f"{path}: {size} bytes; a tokenizer has at most {MAX_FILE_BYTES}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
