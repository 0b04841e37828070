"""Characters that a vocabulary has no tokens for are written as escapes, and all else as ever."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as InnerTokenizer

from specdec.evals.structured import Times, replay_text
from specdec.evals.vocabulary import EvalVocabulary, byte_vocabulary, open_vocabulary
from specdec.grammar.patterns import PatternRefused, content_expression
from specdec.grammar.spec import JsonSchema
from specdec.grammar.spelling import PLAIN, Spelling, escapes
from specdec.tokenizer import Tokenizer
from tests.grammar import schema_pairs
from tests.grammar.schema_law import Seen, Writer, check_law

BYTES = [bytes([byte]) for byte in range(256)]


@cache
def poor_vocabulary() -> EvalVocabulary:
    """A token for every byte but 0xC3 (À to ÿ), 0xF0 (the first planes above the BMP), 0x7F and 0x04."""
    lost = {0xC3, 0xF0, 0x7F, 0x04}
    table = _byte_pieces()
    vocab = {table[byte]: place for place, byte in enumerate(byte for byte in range(256) if byte not in lost)}
    inner = InnerTokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    tokenizer = Tokenizer(inner.to_str(), source="poor tokenizer")
    (end,) = tokenizer.special_ids
    return EvalVocabulary("poor", tokenizer, tokenizer.vocab_size, (end,))


def _byte_pieces() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    pieces = {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(rest)}
    return [pieces[byte] for byte in range(256)]


def test_escapes_match_the_characters_of_their_ranges_and_no_others() -> None:
    seed = 7
    print(f"seed {seed}")
    random_ = random.Random(seed)
    edges = [0x7F, 0x80, 0xFF, 0x100, 0xFFFF, 0x10000, 0x103FF, 0x10400, 0x3FFFF, 0x40000, 0x10FFFF]
    for _ in range(200):
        around = (random_.choice(edges) + random_.randint(-3, 3) * random_.choice((0, 1, 700)) for _ in "ab")
        first, last = sorted(min(max(code, 0x20), 0x10FFFF) for code in around)
        if last >= 0xD800 and first < 0xE000:
            continue
        expression = re.compile("|".join(escapes([(first, last)])))
        for code in {first, last, first - 1, last + 1, (first + last) // 2, random_.choice(edges)}:
            if 0x20 <= code <= 0x10FFFF and not 0xD800 <= code < 0xE000:
                text = json.dumps(chr(code))[1:-1] if code > 0x7E else f"\\u{code:04x}"
                text = f"\\u{code:04x}" if code == 0x7F else text
                assert bool(expression.fullmatch(text)) == (first <= code <= last), (first, last, code)


@pytest.mark.parametrize(
    ("tokens", "ranges"),
    [
        (BYTES, ()),
        (BYTES[:0xC0], ((0x80, 0xD7FF), (0xE000, 0x10FFFF))),
        ([token for token in BYTES if token[0] not in b"\x04\x16\xc0\xf1\xf2\xff"], ((0x40000, 0xBFFFF),)),
        ([token for token in BYTES if token[0] not in b'\x7f~"'], ((0x7E, 0x7F),)),
        ([*(token for token in BYTES if token[0] != 0xC3), "é".encode()], ((0xC0, 0xE8), (0xEA, 0xFF))),
        ([token for token in BYTES if token[0] not in b"u\xc3"], ()),  # then no escape can be written either
    ],
)
def test_what_has_no_tokens_is_found(tokens: list[bytes], ranges: tuple[tuple[int, int], ...]) -> None:
    assert Spelling.of(tokens).ranges == ranges


def test_a_vocabulary_of_all_bytes_changes_nothing() -> None:
    assert byte_vocabulary().spelling is PLAIN
    assert content_expression("^é.$", Spelling()) == content_expression("^é.$")


@pytest.mark.parametrize(
    ("schema", "text", "good"),
    [
        ({"type": "string"}, '"\\u00e4\\ud83d\\ude00\\u007f"', True),
        ({"type": "string"}, '"Ω\u20ac"', True),  # these have tokens
        ({"type": "string"}, '"\\u20ac"', False),
        ({"type": "string"}, '"\\u00E4"', False),
        ({"type": "string"}, '"\\ud83d"', False),
        ({"type": "string"}, '"\\ude00\\ud83d"', False),
        ({"type": "string"}, '"\\ud8c0\\udc00"', False),  # U+40000 has tokens
        ({"type": "string", "maxLength": 1}, '"\\ud83d\\ude00"', True),
        ({"type": "string", "maxLength": 1}, '"\\u00e4\\u00e4"', False),
        ({"const": "ä"}, '"\\u00e4"', True),
        ({"enum": ["😀", "Ω"]}, '"\\ud83d\\ude00"', True),
        ({"type": "string", "pattern": "^[à-ÿ]$"}, '"\\u00e4"', True),
        ({"type": "string", "pattern": "^[à-Ω]$"}, '"\\u00ff"', True),
        ({"type": "string", "pattern": "^[à-Ω]$"}, '"Ω"', True),
        ({"type": "string", "pattern": "^[à-ÿ]$"}, '"\\u00c0"', False),
        ({"type": "string", "pattern": r"^\p{L}$"}, '"\\u00e4"', True),
        ({"type": "string", "pattern": r"^\p{L}$"}, '"\\u00d7"', False),  # a sign
        ({"type": "string", "pattern": r"^\P{L}$"}, '"\\u00d7"', True),
        ({"type": "string", "pattern": r"^[^\p{L}]$"}, '"\\u00e4"', False),
        ({"type": "string", "not": {"pattern": "ä"}}, '"x\\u00e4"', False),
        ({"type": "string", "not": {"pattern": "ä"}}, '"x\\u00e5"', True),
        ({"type": "object", "properties": {"ä": {"type": "null"}}}, '{"\\u00e4":null}', True),
        ({"type": "object", "properties": {"ä": {"type": "null"}}}, '{"\\u00e4":1}', False),
    ],
    ids=str,
)
def test_what_has_no_tokens_is_an_escape_and_means_the_same(schema: Any, text: str, good: bool) -> None:
    vocabulary = poor_vocabulary()
    grammar = Writer(vocabulary).compiler.compile(JsonSchema(schema, "compact"))
    assert (replay_text(grammar, text, vocabulary, Times()).place is None) == good
    if good:
        assert vocabulary.tokenizer.decode(vocabulary.encode(text)) == text
        assert vocabulary.spelling.respelled(json.dumps(json.loads(text), ensure_ascii=False)).replace(" ", "") == text


def test_the_law_of_schemas_holds_for_a_vocabulary_that_lacks_bytes() -> None:
    seed = 5
    print(f"seed {seed}")
    seen, writer = Seen(), Writer(poor_vocabulary())
    for number in range(40):
        random_ = random.Random(f"{seed} {number}")
        instance = schema_pairs.value(random_, 2)
        schema = schema_pairs.Maker(random_).whole(instance, 1)
        check_law(schema, [instance, *(schema_pairs.variant(random_, instance) for _ in range(4))], seen, writer=writer)
    assert seen.valid > 40
    assert seen.walked > 40


def test_a_property_that_is_not_known_of_such_characters_is_refused() -> None:
    with pytest.raises(PatternRefused, match="Alphabetic"):
        content_expression(r"^\p{Alphabetic}$", poor_vocabulary().spelling)
    assert content_expression(r"^\p{Alphabetic}$", Spelling(((0x40000, 0xBFFFF),)))  # none of these is a letter


@pytest.mark.weights
def test_the_real_vocabulary_writes_what_it_has_no_tokens_for() -> None:
    vocabulary = open_vocabulary("smollm2-135m")
    assert vocabulary.spelling.ranges == ((0x40000, 0xBFFFF),)
    grammar = vocabulary.compiler({}).compile(JsonSchema({"const": "é\U00040000😀\x04"}, "compact"))
    text = '"é\\ud8c0\\udc00😀\\u0004"'
    assert replay_text(grammar, text, vocabulary, Times()).place is None
    assert vocabulary.tokenizer.decode(vocabulary.encode(text)) == text
