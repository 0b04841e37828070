"""What a checker of the JSON text takes away from the rows of a grammar. Only tokens that may complete something it
looks at are tried, and what tokens have in common is tried once. W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from specdec.grammar.checker import Checker
from specdec.grammar.json_text import JsonText, Kind, Place, decoded
from specdec.grammar.lark import Freedom
from specdec.grammar.rules import Canonical
from specdec.grammar.token_table import NO_REST, SPECIAL_REST, TokenTable, among, row_of, tokens_of, without
from specdec.grammar.words import Words

MOST = Freedom(open_keys=True, tight_keys=True, tight_items=True, tight_values=True)
MANY = 256  # tokens of which hardly all lead to nothing
LAST_ITEMS = 3  # of an array, for which all that may follow is tried
MAX_COMPARED = 256  # containers that are there already: of more, few are like each other
SMALL = 16  # tokens of a row which are all tried
FEW = 8  # tokens that are tried one by one before all are at once
NUMBER_BYTES = b"-+.0123456789eE"
LETTERS = b"abcdefghijklmnopqrstuvwxyz"
BLANKS = b" \t\r\n"
_NO_WORDS = Words()


class Narrowing:
    """Forbids what `checker`, at the beginning of a text, forbids. Shared by all texts of a grammar."""

    __slots__ = ("_blanks_W", "_freedom", "_nothing_W", "_outlines", "_start", "_table")

    def __init__(
        self, table: TokenTable, checker: Checker, freedom: Freedom = MOST, *, needs_blanks: bool = False
    ) -> None:
        """`freedom` is what the grammar leaves to texts; blanks lead nowhere unless it `needs_blanks`."""
        self._nothing_W = np.zeros_like(table.blank_words_W)
        self._blanks_W = self._nothing_W if needs_blanks else table.blank_words_W
        self._table = table
        self._outlines = table.outlines
        self._start = JsonText(checker)
        self._freedom = freedom

    def start(self) -> JsonText:
        """The empty text."""
        return self._start

    def after(self, text: JsonText, token: int) -> JsonText | None:
        """The text with a token behind it; None where the checker forbids it."""
        return text.after(self._table.spelled[token])

    def reach(self, text: JsonText, tokens: Iterable[int]) -> int:
        """How many of `tokens` may follow, one after the other."""
        count = 0
        for token in tokens:
            following = self.after(text, token)
            if following is None:
                break
            text = following
            count += 1
        return count

    def goes_on(self, words_W: NDArray[np.int32], text: JsonText) -> bool:
        """Whether one of the first tokens of a row, not narrowed yet, is allowed and no suspect: most often one is."""
        checker = _checker(text)
        if self._looks_for_copies(checker) and (_is_nearly_full(checker) or _is_copy(checker)):
            return False
        kinds, is_tight = self._refusable(text), self._is_tight(text)
        ends: dict[bytes, Words | None] = {}
        for token in tokens_of(words_W & ~self._table.end_words_W & ~self._blanks(text))[:FEW].tolist():
            if not self.may_follow(text, token) or (is_tight and self._is_repeating(text, token, ends)):
                continue
            if not (kinds and self._is_astray(text, token, kinds)) and not self._is_copying(text, token):
                return True
        return False

    def is_known_to_lead_on(self, text: JsonText, token: int) -> bool:
        """Whether one that ends this string as `token` does has been seen to lead on."""
        return self._ending(text, token) in _checker(text).leading_on

    def leads_on(self, text: JsonText, token: int) -> None:
        """Keep that a suspect leads on. Where what a string holds decides what may follow, a like one may not: then a
        text may run into a dead end."""
        ending = self._ending(text, token)
        if ending is not None:
            _checker(text).leading_on.add(ending)

    def _ending(self, text: JsonText, token: int) -> int | None:
        """What is said behind a string that a token ends, where that is all that matters; None for other tokens."""
        checker = _checker(text)
        if text.place is not Place.STRING or text.escaped or _is_nearly_full(checker):
            return None
        if checker.outer is not None and checker.outer.records:  # a container that closes is compared as a whole
            return None
        place = self._outlines.rest_V.item(token)
        return place if place >= 0 and not self._outlines.texts[place].endswith((b'"', b"0")) else None

    def _is_repeating(self, text: JsonText, token: int, ends: dict[bytes, Words | None]) -> bool:
        """Whether a token is on the way to a key or an item that is there already."""
        if text.place is Place.KEY or text.place is Place.STRING:
            data = self._table.spelled[token]
            if _used(text).any_begins(_beginning(text) + data):
                return True
            if text.place is Place.KEY or b'"' not in data:
                return False
        return self._leads_to_used(text, token, ends)

    def _is_tight(self, text: JsonText) -> bool:
        """Whether there may be few keys or items that are new, where the text is."""
        layout = _checker(text).layout
        if layout.possible is not None:
            return False  # the keys that are left are known
        is_tight = self._freedom.tight_items or self._freedom.tight_values
        return self._freedom.tight_keys if layout.is_object else layout.unique and is_tight

    def suspects(self, words_W: NDArray[np.int32], text: JsonText) -> list[int]:
        """Those of the tokens of a narrowed row that may lead to where nothing is allowed."""
        found = dict.fromkeys((*self._repeating(words_W, text), *self._astray(words_W, text)))
        found |= dict.fromkeys(self._copying(words_W, text))
        return list(found)

    def num_leading_on(self, words_W: NDArray[np.int32], text: JsonText) -> int:
        """How many tokens of the row after `text` there are beside blanks between values."""
        return int(np.bitwise_count((words_W & ~self._blanks(text)).view(np.uint32)).sum())

    def _blanks(self, text: JsonText) -> NDArray[np.int32]:
        """The tokens of blanks that say nothing where the text is: none in a string, whose content they are."""
        in_string = text.place is Place.KEY or text.place is Place.STRING
        return self._nothing_W if in_string else self._blanks_W

    def _refusable(self, text: JsonText) -> list[Kind]:
        """The kinds of scalars of which some may not end, where the text is in one or may come to one."""
        if not self._freedom.tight_values or text.place is Place.KEY or text.place is Place.LITERAL:
            return []
        kinds = [kind for kind in (Kind.NUMBER, Kind.STRING) if _checker(text).may_refuse(kind)]
        own = {Place.NUMBER: Kind.NUMBER, Place.STRING: Kind.STRING}.get(text.place)
        return kinds if own is None or own in kinds else []

    def _astray(self, words_W: NDArray[np.int32], text: JsonText) -> Iterator[int]:
        """The tokens that go on with a scalar which may not end as it stands, where some may not end at all."""
        kinds = self._refusable(text)
        tokens = tokens_of(words_W).tolist() if kinds else []
        if len(tokens) <= (SMALL if text.place is Place.STRING else MANY):
            yield from (token for token in tokens if self._is_astray(text, token, kinds))

    def _is_astray(self, text: JsonText, token: int, kinds: list[Kind]) -> bool:
        after = self.after(text, token) if self._table.spelled[token] else None
        if after is None or after.open != text.open:
            return False
        if after.place is Place.NUMBER:
            seen = Kind.NUMBER not in kinds or _checker(after).knows_numbers
            return not seen and not (after.raw[-1:].isdigit() and after.ended() is not None)
        return after.place is Place.STRING and Kind.STRING in kinds

    def _copying(self, words_W: NDArray[np.int32], text: JsonText) -> Iterator[int]:
        """The tokens inside a container, or that open one, which may become like one that is there already."""
        checker = _checker(text)
        if not self._looks_for_copies(checker):
            return
        is_inside = _is_nearly_full(checker) or _is_copy(checker)
        if not is_inside and (text.place is not Place.BETWEEN or not checker.containers):
            return  # no token can be one: most rows end here
        tokens = tokens_of(words_W & ~self._blanks(text)).tolist()
        if len(tokens) <= SMALL and is_inside:
            yield from sorted(tokens, key=lambda token: self._table.spelled[token][:1] not in b"}]")
        elif len(tokens) <= MANY:
            yield from (token for token in tokens if self._is_copying(text, token))

    def _looks_for_copies(self, checker: Checker) -> bool:
        return self._freedom.tight_values and checker.outer is not None

    def _is_copying(self, text: JsonText, token: int) -> bool:
        """Whether a token opens a container that is, so far, like one that is there already."""
        checker = _checker(text)
        if not self._freedom.tight_values or text.place is not Place.BETWEEN or not checker.containers:
            return False
        after = self.after(text, token)
        return after is not None and len(after.open) > len(text.open) and _is_copy(_checker(after))

    def _repeating(self, words_W: NDArray[np.int32], text: JsonText) -> list[int]:
        """The tokens on the way to a key or an item that is there already."""
        if not self._is_tight(text):
            return []
        found: dict[int, None] = {}
        if text.place is Place.KEY or text.place is Place.STRING:
            found.update(dict.fromkeys(self._towards(words_W, text)))
            words_W = words_W & self._table.with_quotes_NW[0]
        if text.place is not Place.KEY:
            tokens = tokens_of(words_W).tolist()
            ends: dict[bytes, Words | None] = {}
            for token in tokens if len(tokens) <= MANY else ():
                if self._leads_to_used(text, token, ends):
                    found[token] = None
        return list(found)

    def _leads_to_used(self, text: JsonText, token: int, ends: dict[bytes, Words | None]) -> bool:
        """Whether a token ends on the way to a key or item that is there already. `ends` are kept for the next token:
        the beginnings of tokens with the strings that they may lead to, None where they lead to none."""
        data = self._table.spelled[token]
        outlines = self._outlines
        quote, short, inside = b"", data, b""
        if text.place is Place.STRING and not text.escaped and outlines.rest_V[token] >= 0:
            quote, data = b'"', data[len(outlines.contents[token]) + 1 :]
            short = outlines.texts[outlines.rest_V[token]]
        elif text.place is Place.BETWEEN:
            short = outlines.texts[outlines.between_V[token]]
            if short.endswith(b"0"):  # a number goes on: it matters how it begins
                short = data
        if short is not data and short.endswith(b'"'):
            inside = data.lstrip(BLANKS)[len(short) :]
        short = quote + short
        if short not in ends:
            after = text.after(short) if short else None
            ends[short] = None
            if after is not None and after.open == text.open and _may_run_out(after):
                is_string = after.place is Place.KEY or after.place is Place.STRING
                ends[short] = _used(after) if is_string else _NO_WORDS
        used = ends[short]
        return used is not None and (not inside or used.any_begins(inside))

    def _towards(self, words_W: NDArray[np.int32], text: JsonText) -> Iterator[int]:
        """The tokens of a row that go on with what the text is in as what is there already does."""
        beginning, used = _beginning(text), _used(text)
        tokens = tokens_of(words_W)
        if len(tokens) <= MANY:
            yield from (token for token in tokens.tolist() if used.any_begins(beginning + self._table.spelled[token]))
            return
        for step in used.steps(beginning, self._table.longest):
            for token in self._table.ids.get(step, ()):
                if words_W[token >> 5] >> (token & 31) & 1:
                    yield token

    def narrow(self, words_W: NDArray[np.int32], text: JsonText) -> None:
        """Clear the bits of `words_W`, a row of the grammar after `text`, that the checker forbids."""
        end_words_W = self._table.end_words_W
        if text.place is Place.NUMBER and not text.open and (words_W & end_words_W).any() and text.ended() is None:
            words_W &= ~end_words_W
        if text.place is Place.KEY or text.place is Place.BETWEEN:
            self._narrow_keys(words_W, text)
        candidates_W = self._candidates(words_W, text)
        if not candidates_W.any():  # so it is inside most strings
            return
        in_string = text.place is Place.KEY or text.place is Place.STRING
        alike = self._if_it_ends(text) if in_string and not text.escaped else None
        if alike is not None:
            self._narrow_endings(words_W, candidates_W, text, alike)
            return
        tokens_N = among(self._outlines.quoted_N, candidates_W) if in_string else tokens_of(candidates_W)
        if len(tokens_N):
            refused_N = self._refused(text, tokens_N)
            if len(refused_N):
                without(words_W, refused_N)

    def _narrow_keys(self, words_W: NDArray[np.int32], text: JsonText) -> None:
        """Clear the bits of tokens that begin a key, or go on with one, where none is left that begins so."""
        outlines = self._outlines
        if text.place is Place.KEY:
            if _checker(text).layout.possible is None:
                return
            tokens = tokens_of(words_W & ~self._table.with_quotes_NW[0]).tolist()
        elif self._freedom.any_order:
            tokens = [
                token
                for token in among(outlines.quoted_N, words_W).tolist()
                if outlines.opens_T[outlines.between_V[token]]
            ]
        else:
            return
        refused = []
        for token in tokens if len(tokens) <= MANY else ():
            after = text.after(self._table.spelled[token])
            if after is not None and after.place is Place.KEY and not _checker(after).has_key_left(_beginning(after)):
                refused.append(token)
        if refused:
            without(words_W, np.array(refused))

    def _narrow_endings(
        self, words_W: NDArray[np.int32], candidates_W: NDArray[np.int32], text: JsonText, alike: Checker
    ) -> None:
        """Clear the bits of candidates that the checker forbids, where it is `alike` however a string ends. What has
        been tried for one row of the string need not be tried for the next."""
        outlines = self._outlines
        tried_W, refused_W = alike.rows or (np.zeros_like(words_W), np.zeros_like(words_W))
        new_W = candidates_W & ~tried_W
        if new_W.any():
            tokens_N = among(outlines.quoted_N, new_W)
            tokens_N = tokens_N[outlines.rest_V[tokens_N] >= 0]
            refused_N = self._refused_by(outlines.rest_V, alike, _between(alike, text), tokens_N)
            tried_W = tried_W | new_W
            refused_W = refused_W | row_of(refused_N, len(words_W))
            alike.rows = (tried_W, refused_W)
        words_W &= ~(refused_W & candidates_W)
        special_N = self._refused_one_by_one(text, among(outlines.special_N, candidates_W).tolist())
        if len(special_N):
            without(words_W, special_N)

    def _candidates(self, words_W: NDArray[np.int32], text: JsonText) -> NDArray[np.int32]:
        """The tokens of a row that the checker may forbid."""
        checker, table = _checker(text), self._table
        in_string = text.place is Place.KEY or text.place is Place.STRING
        if not checker.is_idle:
            able_W = table.with_quotes_NW[0] if in_string else ~table.end_words_W
        else:
            # Only a key that comes again matters, or the end of all that is idle.
            able_W = table.with_quotes_NW[_quotes_to_a_key(text, checker) - 1]
            if checker.is_watched:
                closing_W = table.with_closing_W
                able_W = able_W | (closing_W & table.with_quotes_NW[0] if in_string else closing_W)
        candidates_W: NDArray[np.int32] = words_W & able_W
        return candidates_W

    def _refused(self, text: JsonText, tokens_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of some tokens that the checker forbids."""
        checker, outlines = _checker(text), self._outlines
        if text.place is Place.BETWEEN:
            refused_N = self._refused_by(outlines.between_V, checker, text, tokens_N)
            if not checker.looks_at_multiples:
                return refused_N
            numbers_N = tokens_N[outlines.number_T[outlines.between_V[tokens_N]]]
            rest = np.setdiff1d(numbers_N, refused_N).tolist()
            return np.concatenate((refused_N, self._refused_one_by_one(text, rest)))
        if text.place is Place.NUMBER or text.place is Place.LITERAL:
            goes_on = NUMBER_BYTES if text.place is Place.NUMBER else LETTERS
            alone = np.array([self._table.spelled[token][0] not in goes_on for token in tokens_N.tolist()])
            is_whole = text.place is Place.LITERAL or text.raw[-1:].isdigit()
            ended = text.ended() if is_whole else None
            if ended is None:
                refused_N = tokens_N[alone]
            else:
                refused_N = self._refused_by(outlines.between_V, _checker(ended), ended, tokens_N[alone])
            others = tokens_N[~alone].tolist()
            if text.place is Place.LITERAL or not checker.looks_at_multiples:
                others = [token for token in others if self._table.spelled[token].strip(goes_on)]
            return np.concatenate((refused_N, self._refused_one_by_one(text, others)))
        if text.escaped:
            return self._refused_one_by_one(text, tokens_N.tolist())
        rest_N = outlines.rest_V[tokens_N]
        special_N = rest_N == SPECIAL_REST
        if checker.outer is not None and checker.outer.records:  # a container that closes is compared as a whole
            special_N |= outlines.closing_T[rest_N]
        special_N &= rest_N != NO_REST
        plain_N = ~special_N & (rest_N != NO_REST)
        refused = [self._refused_one_by_one(text, tokens_N[special_N].tolist())]
        by_content: dict[bytes, list[int]] = {}
        for token in tokens_N[plain_N].tolist():
            by_content.setdefault(outlines.contents[token], []).append(token)
        for content, tokens in by_content.items():
            value = decoded((text.raw + content).decode())
            after = checker.key_like(value) if text.place is Place.KEY else checker.scalar_like(value)
            if after is None:
                refused.append(np.array(tokens))
            else:
                refused.append(self._refused_by(outlines.rest_V, after, _between(after, text), np.array(tokens)))
        return np.concatenate(refused)

    def _refused_by(
        self, texts_V: NDArray[np.int32], checker: Checker, text: JsonText, tokens_N: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Those of some tokens that the checker forbids by the outlines that `texts_V` gives them behind `text`."""
        places_N = texts_V[tokens_N]
        refused = []
        for place in np.flatnonzero(np.bincount(places_N)).tolist() if len(tokens_N) else ():
            key = (self._outlines.texts[place], text.key_next)
            if key not in checker.answers:
                checker.answers[key] = not key[0] or text.after(key[0]) is not None
            if not checker.answers[key]:
                refused.append(place)
        return tokens_N[np.isin(places_N, refused)] if refused else tokens_N[:0]

    def _refused_one_by_one(self, text: JsonText, tokens: Iterable[int]) -> NDArray[np.int64]:
        return np.array([token for token in tokens if not self.may_follow(text, token)], np.int64)

    def may_follow(self, text: JsonText, token: int) -> bool:
        """Whether the checker allows a token that the grammar allows; the end of a text is one without bytes."""
        if not self._table.spelled[token]:
            return text.place is not Place.NUMBER or bool(text.open) or text.ended() is not None
        after = self.after(text, token)
        if after is not None and after.place is Place.KEY:
            return _checker(after).has_key_left(_beginning(after))
        if after is None or after.place is not Place.NUMBER:
            return after is not None
        known = len(text.raw) if text.place is Place.NUMBER else 0
        return _checker(after).may_begin(after.raw.decode(), known)

    def _if_it_ends(self, text: JsonText) -> Checker | None:
        """The checker when the key or string that the text is in has ended, where it does not matter how."""
        checker = _checker(text)
        if checker.outer is not None and checker.outer.records:  # a container that closes is compared as a whole
            return None
        if text.place is Place.STRING:
            if checker.layout.unique and _used(text).any_begins(_beginning(text)):
                return None
            return checker.any_string()
        if any(words.any_begins(_beginning(text)) for words in (checker.key_words, checker.layout.named_words)):
            return None
        return checker.any_key()


def _between(checker: Checker, text: JsonText) -> JsonText:
    """The text behind the key or string that `text` is in."""
    return JsonText(checker, Place.BETWEEN, b"", text.open)


def _quotes_to_a_key(text: JsonText, checker: Checker) -> int:
    """With how many quotes a token may complete a key that is there already."""
    if text.place is Place.KEY:
        return 1 if checker.key_words.any_begins(_beginning(text)) else 3
    return 3 if text.place is Place.STRING else 2


def _checker(text: JsonText) -> Checker:
    assert isinstance(text.watcher, Checker)
    return text.watcher


def _is_nearly_full(checker: Checker) -> bool:
    """Whether what is open is among the last items of an array of which it matters what they are."""
    while checker.outer is not None:
        layout = checker.layout
        left = (most - checker.count for most in layout.most if most is not None)
        if (layout.unique or layout.counting) and any(items <= LAST_ITEMS for items in left):
            return True
        checker = checker.outer
    return False


def _is_copy(checker: Checker) -> bool:
    """Whether what is open is inside an item that is, so far, like one which is there already and must not repeat."""
    path = []
    while not checker.layout.unique:
        if checker.outer is None or not checker.outer.records:
            return False
        path.append(checker)
        checker = checker.outer
    values = list(checker.containers) if path and len(checker.containers) <= MAX_COMPARED else []
    for container in reversed(path):
        values = [inner for value in values for inner in _like(value, container)]
    return bool(values)


def _like(value: Canonical, container: Checker) -> Iterator[Canonical]:
    """Where the beginning of a container is like a value: what that has next, or None where it has no more."""
    if not isinstance(value, tuple) or (len(value) == 1 and value[0] != "["):
        return
    bracket, *items = value
    so_far = container.recorded()
    if bracket == "{" and container.layout.is_object:
        there = dict(items[0])
        if so_far[1] <= items[0]:
            yield there.get(container.name) if container.links is not None else None
    elif bracket == "[" and not container.layout.is_object and so_far == value[: len(so_far)]:
        yield value[len(so_far)] if len(so_far) < len(value) else None


def _may_run_out(text: JsonText) -> bool:
    """Whether nothing may be left for the key or item that the text is in, or that a comma asks for."""
    checker = _checker(text)
    if text.place is Place.BETWEEN:
        return checker.more and (text.key_next or bool(checker.seen))
    return _used(text).any_begins(_beginning(text))


def _used(text: JsonText) -> Words:
    """The keys, strings or numbers that what the text is in must differ from."""
    checker = _checker(text)
    if text.place is Place.KEY:
        return checker.key_words
    return checker.strings if text.place is Place.STRING else checker.numbers


def _beginning(text: JsonText) -> bytes:
    return text.raw if text.place is Place.NUMBER else text.so_far().encode(errors="surrogatepass")
