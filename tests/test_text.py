"""The detokenizer: characters over token borders, stop strings, forks, and linear time."""

from __future__ import annotations

import codecs
import random
import time
from collections.abc import Sequence

import pytest

from specdec.text import Detokenizer


def byte_token(token: int) -> bytes:
    return bytes([token])


def pieces(*parts: bytes | str) -> tuple[Detokenizer, list[int]]:
    """A vocabulary of exactly these parts, and their ids in order."""
    table = [part.encode() if isinstance(part, str) else part for part in parts]
    return Detokenizer(table.__getitem__), list(range(len(table)))


def shown(text: Detokenizer, tokens: Sequence[int]) -> list[str]:
    """What each push makes visible, up to and including a match, then what close gives."""
    out = []
    for token in tokens:
        out.append(text.push(token))
        if text.matched is not None:
            break
    return [*out, text.close()]


def reference(data: bytes, stops: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """The definition, by brute force: the first end of the text at which some stop string ends."""
    text = data.decode("utf-8", "replace")
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    "text", ["🙂", "👩‍👩‍👧‍👦", "日本語", "e\u0301a\u0323\u0302", "🇩🇪", "\x00\x7f", "a𝄞b", "नमस्ते", "\u2028\ufeff\ufffd"]
)
def test_a_character_is_shown_with_its_last_byte(text: str) -> None:
    out = shown(Detokenizer(byte_token), text.encode())
    assert "".join(out) == text
    seen = "".join(out[:-1])
    assert seen == text, "nothing is left for close"
    for count in range(len(text.encode())):
        whole = text.encode()[: count + 1].decode("utf-8", "ignore")
        assert "".join(out[: count + 1]) == whole


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"\xf0\x9f", b"\x99", b"\x82!"], ["", "", "🙂!", ""]),
        ([b"a\xe2\x82", b"b"], ["a", "\ufffdb", ""]),
        ([b"\xe2\x82", b""], ["", "", "\ufffd"]),
        ([b"\xff"], ["\ufffd", ""]),
        ([b"\xe0", b"\x80"], ["", "\ufffd\ufffd", ""]),
        ([b"\xed\xa0", b"\x80"], ["", "\ufffd\ufffd\ufffd", ""]),
        ([b"\xf0\x9f\x98", b"\xf0\x9f\x98\x80"], ["", "\ufffd😀", ""]),
        ([b"\xc3", b"\xa9\xc3"], ["", "é", "\ufffd"]),
        (["日".encode()[:1], "日".encode()[1:] + "本".encode()[:2], "本".encode()[2:]], ["", "日", "本", ""]),
        (["e", "\u0301"], ["e", "\u0301", ""]),
    ],
)
def test_bytes_wait_until_they_are_a_character_or_cannot_be(parts: list[bytes | str], expected: list[str]) -> None:
    text, tokens = pieces(*parts)
    assert shown(text, tokens) == expected


@pytest.mark.parametrize(
    ("stops", "parts", "expected", "matched"),
    [
        (("END",), ["a E", "N", "D b"], ["a ", "", "", ""], "END"),
        (("END",), ["a E", "N", "E", "x"], ["a ", "", "EN", "Ex", ""], None),
        (("END",), ["abEN"], ["ab", "EN"], None),
        (("\n\n",), ["a\n", "b\n", "\n"], ["a", "\nb", "", ""], "\n\n"),
        (("aab",), ["aa", "a", "a", "b"], ["", "a", "a", "", ""], "aab"),
        (("abcd", "bc"), ["ab", "c", "d"], ["", "a", ""], "bc"),
        (("bc", "abc"), ["xab", "c"], ["x", "", ""], "abc"),
        (("ab", "abab"), ["a", "bab"], ["", "", ""], "ab"),
        (("abcx", "bcy"), ["abc", "y"], ["", "a", ""], "bcy"),
        (("🙂",), [b"a\xf0\x9f", b"\x99\x82b"], ["a", "", ""], "🙂"),
        (("é", "日"), [b"x\xc3", b"\xa9\xe6"], ["x", "", ""], "é"),
        (("🙂!",), [b"\xf0\x9f\x99", b"\x82", b"?"], ["", "", "🙂?", ""], None),
        (("\ufffd",), [b"a\xe2", b"b"], ["a", "", ""], "\ufffd"),
        (("e\u0301",), ["ae", "\u0301"], ["a", "", ""], "e\u0301"),
    ],
)
def test_a_stop_string_is_cut_wherever_tokens_split_it(
    stops: tuple[str, ...], parts: list[bytes | str], expected: list[str], matched: str | None
) -> None:
    table = [part.encode() if isinstance(part, str) else part for part in parts]
    text = Detokenizer(table.__getitem__, stop=stops)
    assert shown(text, range(len(table))) == expected
    assert text.matched == matched


def test_include_stop_cuts_after_the_stop_string() -> None:
    text = Detokenizer([b"one E", b"ND two"].__getitem__, stop=("END",), include_stop=True)
    assert shown(text, [0, 1]) == ["one ", "END", ""]


def test_the_end_of_the_sequence_can_complete_a_stop_string() -> None:
    text = Detokenizer([b"a\xe2"].__getitem__, stop=("\ufffd",))
    assert (text.push(0), text.close(), text.matched) == ("a", "", "\ufffd")


def test_one_leading_space_is_stripped_from_the_text_and_no_other() -> None:
    table = [b"", b" a", b" ", b"\xe2\x82\xac"]
    for tokens, expected in [([0, 1, 1], "a a"), ([2, 1], " a"), ([3, 1], "€ a"), ([2], ""), ([], "")]:
        text = Detokenizer(table.__getitem__, strip_space=True)
        assert "".join(shown(text, tokens)) == expected


def test_random_texts_agree_with_the_definition_token_by_token() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    alphabet = [*"abc", "é", "🙂", "\ufffd"]
    for _ in range(400):
        stops = tuple("".join(rng.choices(alphabet, k=rng.randint(1, 5))) for _ in range(rng.randint(0, 4)))
        data = "".join(rng.choices(alphabet, k=rng.randint(0, 30))).encode()
        if rng.random() < 0.5:
            data = bytes(rng.choice([byte, rng.randrange(256)]) for byte in data)
        cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randint(0, 6)))
        table = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        include_stop = rng.random() < 0.5
        text = Detokenizer(table.__getitem__, stop=stops, include_stop=include_stop)
        out = shown(text, range(len(table)))
        assert ("".join(out), text.matched) == reference(data, stops, include_stop)
        # Nothing is held without need: what is hidden begins a stop string or a character.
        for count in range(len(out) - 2):
            # Up to three bytes may still become a character; Python waits for the third after ED A0 to ED BF too.
            seen, used = codecs.utf_8_decode(b"".join(table[: count + 1]), "replace", False)
            assert sum(map(len, table[: count + 1])) - used <= 3
            visible = "".join(out[: count + 1])
            assert seen.startswith(visible)
            assert any(stop.startswith(seen[len(visible) :]) for stop in ("", *stops))


def test_forks_show_what_the_sequence_itself_shows() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(100):
        data = bytes(rng.choice("aab🙂".encode()) for _ in range(40))
        straight = Detokenizer(byte_token, stop=("aabb", "b🙂"))
        forked = straight.fork()
        expected = shown(straight, data)
        out = []
        for index, byte in enumerate(data):
            branch = forked.fork()
            for other in rng.choices(data, k=3):  # a guess that is thrown away
                if branch.matched is None:
                    branch.push(other)
            forked = forked.fork()
            out.append(forked.push(byte))
            assert out[-1] == expected[index]
            if forked.matched is not None:
                break
        assert [*out, forked.close()] == expected
        assert forked.matched == straight.matched


def test_nothing_follows_the_end() -> None:
    text = Detokenizer(byte_token, stop=("b",))
    text.push(ord("b"))
    fork = text.fork()
    with pytest.raises(ValueError, match="token 97 is pushed after the text has ended"):
        text.push(97)
    assert text.close() == ""
    with pytest.raises(ValueError, match="ended"):
        fork.push(97)
    closed = Detokenizer(byte_token)
    assert closed.close() == closed.close() == ""
    with pytest.raises(ValueError, match="ended"):
        closed.push(97)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(byte_token, stop=("a", ""))


def test_time_is_linear_for_hostile_stop_strings() -> None:
    stops = tuple("a" * (1023 - index) + "b" * (index + 1) for index in range(16))
    assert all(len(stop) == 1024 for stop in stops)

    def seconds(count: int) -> float:
        text = Detokenizer([b"aaaa", b"c"].__getitem__, stop=stops)
        start = time.process_time()
        for index in range(count):
            text.fork().push(0)
            text.push(int(index % 500 == 499))
        return time.process_time() - start

    seconds(100)
    short, long = seconds(2_000), seconds(16_000)
    assert long < 30 * short, f"8 times the tokens took {long / short:.1f} times as long"
    assert long < 5, f"16,000 tokens took {long:.1f} s"
