"""The text of one sequence as its tokens arrive: bytes to characters, and stop strings. Knows only tokens' bytes.

What is visible after a token depends on the tokens alone, not on how they were grouped, forked or retried.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from functools import lru_cache


class Detokenizer:
    """Turns token ids into text that is safe to show: whole characters that cannot belong to a stop string any more.

    The first stop string to be complete ends the text; of those that complete at the same character, the one that
    starts first (the longest). The text is cut before it, or after it with `include_stop`. Bytes that cannot become a
    character are shown as U+FFFD, one for each maximal subpart (Unicode 16, 3.9, as Python and Rust do).

    Stop strings are looked for in the text after the first `min_tokens` tokens only.
    `strip_space` drops one space at the very beginning: SentencePiece models of the Llama 2 kind put it there. Time is
    linear in the text whatever the stop strings are: the state is at most three bytes and a node of their automaton.
    """

    __slots__ = (
        "_closed",
        "_include_stop",
        "_node",
        "_pending",
        "_stops",
        "_strip_space",
        "_token_bytes",
        "_unstoppable",
        "matched",
    )

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        strip_space: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._token_bytes = token_bytes
        self._stops = _stop_automaton(stop)
        self._include_stop = include_stop
        self._strip_space = strip_space
        self._unstoppable = min_tokens  # tokens still to come whose text no stop string is looked for in
        self._pending = b""  # the beginning of a character
        self._node = 0  # spells what is held back: the longest end of the text that begins a stop string
        self._closed = False
        self.matched: str | None = None

    def push(self, token: int) -> str:
        """The text that `token` makes visible. `matched` is set once a stop string is complete; the token's text after
        it is dropped. Raises ValueError after a match or `close`."""
        if self._closed or self.matched is not None:
            raise ValueError(f"token {token} is pushed after the text has ended")
        data = self._pending + self._token_bytes(token)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        if self._unstoppable:
            self._unstoppable -= 1
            return self._begin(text)
        return self._show(self._begin(text))

    def close(self) -> str:
        """What was held back, at the end of the sequence: "" after a match. A beginning of a character becomes U+FFFD
        (which may complete a stop string that holds one: then `matched` is set)."""
        if self._closed or self.matched is not None:
            self._closed = True
            return ""
        self._closed = True
        text = self._show(self._begin(self._pending.decode("utf-8", "replace")))
        if self.matched is None:
            text += self._stops.spelling(self._node)
        self._pending, self._node = b"", 0
        return text

    def fork(self) -> Detokenizer:
        """An independent copy, in constant time and memory."""
        other = Detokenizer.__new__(Detokenizer)
        other._token_bytes = self._token_bytes
        other._stops = self._stops
        other._include_stop = self._include_stop
        other._strip_space = self._strip_space
        other._unstoppable = self._unstoppable
        other._pending = self._pending
        other._node = self._node
        other._closed = self._closed
        other.matched = self.matched
        return other

    def _begin(self, text: str) -> str:
        """The text without the one leading space that `strip_space` drops."""
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

    def _show(self, text: str) -> str:
        """The part of (what is held back + `text`) that is safe to show; the rest becomes the state."""
        stops = self._stops
        if not stops.strings:
            return text
        whole = stops.spelling(self._node) + text
        end = len(whole) - len(text)
        node = self._node
        for character in text:
            node = stops.follow(node, character)
            end += 1
            stop = stops.complete[node]
            if stop is not None:
                self.matched = stop
                self._node, self._pending = 0, b""
                return whole[: end if self._include_stop else end - len(stop)]
        self._node = node
        return whole[: end - stops.depth[node]]


class _StopAutomaton:
    """Aho and Corasick's automaton (1975) over the characters of the stop strings. Immutable, shared by forks.

    Node 0 is the root; each node spells the first `depth` characters of one of the strings.
    """

    __slots__ = ("_children", "_failure", "_first", "complete", "depth", "strings")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = strings
        self.depth = [0]
        self.complete: list[str | None] = [None]  # the longest stop string that ends where the node's spelling ends
        self._first = [0]  # the index of a string that begins with the node's spelling
        self._children: list[dict[str, int]] = [{}]
        self._failure = [0]  # the node of the longest proper end of the spelling that is in the trie
        for index, string in enumerate(strings):
            self._add(index, string)
        # Nodes of one depth are linked before the next: a failure is always shallower than its node.
        for node in sorted(range(1, len(self.depth)), key=self.depth.__getitem__):
            if self.complete[node] is None:
                self.complete[node] = self.complete[self._failure[node]]
            for character, child in self._children[node].items():
                self._failure[child] = self.follow(self._failure[node], character)

    def follow(self, node: int, character: str) -> int:
        """The node after one more character. Failures are paid by the steps down: constant on average."""
        while True:
            child = self._children[node].get(character)
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self._failure[node]

    def spelling(self, node: int) -> str:
        """The characters on the way to `node`."""
        return self.strings[self._first[node]][: self.depth[node]] if node else ""

    def _add(self, index: int, string: str) -> None:
        if not string:
            raise ValueError("a stop string is empty; it would match everywhere")
        node = 0
        for depth, character in enumerate(string, start=1):
            child = self._children[node].get(character)
            if child is None:
                child = len(self.depth)
                self._children[node][character] = child
                self._children.append({})
                self.depth.append(depth)
                self.complete.append(None)
                self._first.append(index)
                self._failure.append(0)
            node = child
        self.complete[node] = string


@lru_cache(maxsize=8)
def _stop_automaton(strings: tuple[str, ...]) -> _StopAutomaton:
    return _StopAutomaton(strings)
