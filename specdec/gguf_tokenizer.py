"""The `tokenizer.json` of a model whose vocabulary came in GGUF metadata. Knows no file and no tokenizer library.

GGUF keeps the pieces and names the rest: `model` says how pieces merge, `pre` how text is split before that (the names
and expressions are those of llama.cpp's src/llama-vocab.cpp and of the models' own tokenizer.json).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BLANK = "\u2581"  # how SentencePiece spells a space

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    return rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


def _cased_words(contraction: str, digits: str) -> str:
    return (
        rf"{_LEAD}{_UPPER}*{_LOWER}+{contraction}|{_LEAD}{_UPPER}+{_LOWER}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    )


@dataclass(frozen=True, slots=True)
class Split:
    """How text is cut before merging: by each expression in turn, then (`gpt2`) by the GPT-2 expression.

    `whole_words` takes a piece that is in the vocabulary without merging; `bos` is the default where the metadata does
    not say whether a text begins with the BOS token.
    """

    expressions: tuple[str, ...] = ()
    gpt2: bool = False
    digits: bool = False
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False


_GPT2 = Split(gpt2=True)
_DIGITS = Split(gpt2=True, digits=True)
_LLAMA3 = Split((_words(r"\p{N}{1,3}"),), whole_words=True, bos=True)
_LLAMA3_PLAIN = Split((_words(r"\p{N}{1,3}"),))
_QWEN2 = Split((_words(r"\p{N}"),), nfc=True)
_QWEN2_PLAIN = Split((_words(r"\p{N}"),))
_QWEN35 = Split(
    (rf"{_CONTRACTION}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}",),
    nfc=True,
)
_TEKKEN = Split((_cased_words("", r"\p{N}"),), whole_words=True, bos=True)
_GPT4O = Split((_cased_words(_CONTRACTION + "?", r"\p{N}{1,3}"),))
_DEEPSEEK3 = Split(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"""| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}""",
    )
)
_DEEPSEEK_CODER = Split(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"), digits=True
)

SPLITS: dict[str, Split] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais", "trillion", "gigachat", "a.x-4.0", "mellum", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3_PLAIN),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("stablelm2", "megrez", "hunyuan", "grok-2"), _QWEN2_PLAIN),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "deepseek-coder": _DEEPSEEK_CODER,
}


def tokenizer_json(metadata: Mapping[str, Any]) -> str:
    """The text of a `tokenizer.json` for GGUF tokenizer metadata (key names without `tokenizer.ggml.`).

    Reads tokens, token_type, merges, scores, model, pre, bos_token_id, eos_token_id, unknown_token_id, add_bos_token,
    add_eos_token and add_space_prefix. Raises ModelError, naming the key, for what is missing, inconsistent or unknown.
    """
    tokens = [str(token) for token in _required(metadata, "tokens")]
    types = [int(kind) for kind in metadata.get("token_type") or [NORMAL] * len(tokens)]
    if len(types) != len(tokens):
        raise ModelError(f"gguf token_type has {len(types)} entries, tokens has {len(tokens)}; they must agree")
    model = str(_required(metadata, "model"))
    if model == "gpt2":
        parts = _byte_level(metadata, tokens)
    elif model == "llama":
        parts = _sentencepiece(metadata, tokens, types)
    else:
        raise ModelError(f"gguf tokenizer model {model!r} is unknown; gpt2 and llama can be rebuilt")
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(tokens, types, blanks=model == "llama")),
        **parts,
    }
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


def gguf_named_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """How the tokens with a role are spelled: `bos_token`, `eos_token`, `unk_token`, `pad_token`, those that there are.

    Raises ModelError for an id that is no token's.
    """
    tokens = _required(metadata, "tokens")
    roles = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    keys = {f"{name}_token": f"{gguf_name}_token_id" for name, gguf_name in roles}
    return {
        name: str(_token(tokens, key, metadata[key])) for name, key in keys.items() if metadata.get(key) is not None
    }


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Byte-level BPE: pieces are spelled in the alphabet of 256 printable characters that stand for bytes."""
    name = str(_required(metadata, "pre"))
    split = SPLITS.get(name)
    if split is None:
        raise ModelError(f"gguf pre-tokenizer {name!r} is unknown; known are {', '.join(sorted(SPLITS))}")
    merges = []
    for merge in _required(metadata, "merges"):
        left, space, right = str(merge).partition(" ")
        if not (left and space and right):
            raise ModelError(f"gguf merges holds {merge!r}; each must be two pieces with a space between")
        merges.append((left, right))
    stages: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in split.expressions
    ]
    if split.digits:
        stages.append({"type": "Digits", "individual_digits": True})
    stages.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split.gpt2})
    return {
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": stages},
        "post_processor": _post_processor(metadata, tokens, bos=split.bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(tokens, merges, ignore_merges=split.whole_words),
    }


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> dict[str, Any]:
    """SentencePiece's BPE, which keeps scores where others keep merges."""
    tokens[:] = [
        BLANK * len(token) if kind == USER_DEFINED and token.strip(" ") == "" else token
        for token, kind in zip(tokens, types, strict=True)
    ]
    scores = metadata.get("scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"gguf scores must have one entry a token ({len(tokens)}); a llama tokenizer merges by them")
    unknown = metadata.get("unknown_token_id")
    prefix = bool(metadata.get("add_space_prefix", True))
    spell = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": BLANK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": BLANK}, spell]}
        if prefix
        else spell,
        "pre_tokenizer": None
        if prefix
        else {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": _post_processor(metadata, tokens, bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens,
            _merges_by_score(tokens, types, scores),
            unk_token=None if unknown is None else _token(tokens, "unknown_token_id", unknown),
            fuse_unk=True,
            byte_fallback=BYTE in types,
        ),
    }


def _merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, in the order in which SentencePiece would: by the score of the whole,
    the longer left part first. User-defined pieces come before all others: SentencePiece never takes them apart."""
    known = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER_DEFINED)}
    order = [index for index, kind in enumerate(types) if kind in (NORMAL, USER_DEFINED)]
    order.sort(key=lambda index: (types[index] != USER_DEFINED, -scores[index] if types[index] == NORMAL else 0, index))
    merges = []
    for index in order:
        token = tokens[index]
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                merges.append((left, right))
    return merges


def _bpe(
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    for left, right in merges:
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"gguf merges joins {left!r} and {right!r}, but not all three pieces are in tokens")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def _added_tokens(tokens: Sequence[str], types: Sequence[int], *, blanks: bool) -> Iterable[dict[str, Any]]:
    """Pieces that are cut out of a text before anything else. Runs of blanks are left to the merges (`blanks`)."""
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (UNKNOWN, CONTROL) or (kind == USER_DEFINED and not (blanks and token.strip(BLANK) == "")):
            yield {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }


def _post_processor(metadata: Mapping[str, Any], tokens: Sequence[str], *, bos: bool) -> dict[str, Any] | None:
    """What puts BOS before a text and EOS after it, where the metadata asks for them (`bos` where it is silent)."""
    ends: list[tuple[str, int] | None] = []
    for key, flag, default in (("bos_token_id", "add_bos_token", bos), ("eos_token_id", "add_eos_token", False)):
        token = metadata.get(key)
        wanted = metadata.get(flag)
        if wanted is None:
            wanted = default and token is not None
        if wanted and token is None:
            raise ModelError(f"gguf {flag} is true but {key} is missing")
        ends.append((_token(tokens, key, token), int(token)) if wanted and token is not None else None)
    if ends == [None, None]:
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        inner: dict[str, Any] = {"Sequence": {"id": sequence, "type_id": type_id}}
        special = [None if end is None else {"SpecialToken": {"id": end[0], "type_id": type_id}} for end in ends]
        return [part for part in (special[0], inner, special[1]) if part is not None]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {end[0]: {"id": end[0], "ids": [end[1]], "tokens": [end[0]]} for end in ends if end},
    }


def _token(tokens: Sequence[str], key: str, value: object) -> str:
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise ModelError(f"gguf {key} is {value!r}; it must be an id below {len(tokens)}")
    return tokens[value]


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(key)
    if value is None or value == "" or value == []:
        raise ModelError(f"gguf metadata has no tokenizer.ggml.{key}; the tokenizer cannot be rebuilt without it")
    return value
