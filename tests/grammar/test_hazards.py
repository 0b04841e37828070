"""What a backend may do behind our back, for every backend: bits that it does not keep, errors that it does not raise,
end tokens that it takes for text."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.errors import ConstraintError
from specdec.evals.vocabulary import byte_vocabulary
from specdec.grammar.llguidance import LlguidanceGrammar, LlguidanceMatcher, TaggedGrammar, compile_llguidance
from specdec.grammar.outlines import Automaton, AutomatonMatcher
from specdec.grammar.spec import Choice, Ebnf, JsonSchema, Lark, Regex, Spec, StructuralTag
from specdec.grammar.validated import ValidatedGrammar
from specdec.grammar.walk import Matcher, MatcherFailed, TreeConstraint, Vocabulary
from specdec.grammar.xgrammar import XgrammarGrammar
from specdec.protocols import Grammar
from specdec.tree import DraftTree
from tests.grammar.small_tokenizer import END_IDS, SPECIAL_IDS, TOKENIZER_SIZE, VOCAB_SIZE, encode, llguidance_tokens
from tests.grammar.test_backends import compiler
from tests.grammar.test_constraints import EBNF, ENDLESS, SCHEMAS

WORDS = Regex(r"(the|a) quick( \w+){1,4}\.|[0-9]+(\.[0-9]+)?|(?:ab)*é?")
OPTIONS = Choice(["the lazy dog", "the lazy fox", "the", 'say "no"\n', "Zürich\\"])
ANYTHING = Regex(r"(?s).*")
TAG = {"structures": [{"begin": "<f=a>", "schema": SCHEMAS[0], "end": "</f>"}], "triggers": ["<f="]}
CASES: list[tuple[str, Spec]] = [
    *((backend, spec) for backend in ("llguidance", "xgrammar", "outlines") for spec in (WORDS, OPTIONS, ANYTHING)),
    ("auto", JsonSchema(SCHEMAS[0])),
    ("auto", JsonSchema(SCHEMAS[12])),
    ("xgrammar", Ebnf(EBNF)),
    ("auto", Lark('start: "[" item ("," item)* "]"\nitem: WORD | start\nWORD: /[a-z]{2,9}/')),
    ("auto", StructuralTag(TAG)),
]
every_case = pytest.mark.parametrize(("backend", "spec"), CASES, ids=lambda value: str(value)[:40])


def bits(row_W: NDArray[np.int32] | None) -> list[int]:
    assert row_W is not None
    return [int(token) for token in np.flatnonzero(np.unpackbits(row_W.view(np.uint8), bitorder="little"))]


def reached(grammar: Grammar, rng: random.Random, most: int = 12) -> list[int]:
    """Tokens of a random text, whole or not, under the mask."""
    constraint, tokens = grammar.start(), list[int]()
    for _ in range(rng.randrange(most)):
        allowed = [token for token in bits(constraint.row(())) if token not in END_IDS]
        if not allowed:
            break
        tokens.append(rng.choice(allowed))
        constraint.advance(tokens[-1:])
    return tokens


def random_tree(grammar: Grammar, before: list[int], rng: random.Random) -> DraftTree:
    """A tree after the tokens `before`: mostly allowed tokens, some forbidden, some ends with tokens below them."""
    tokens, parents, paths = [0], [-1], [list[int]()]
    for _ in range(16):
        parent = rng.randrange(len(tokens))
        constraint = grammar.start()
        token = rng.choice([*END_IDS, rng.randrange(VOCAB_SIZE)])
        if rng.random() < 0.8 and not set(paths[parent]) & set(END_IDS):
            try:
                constraint.advance([*before, *paths[parent]])
                token = rng.choice(bits(constraint.row(())) or [token])
            except ConstraintError:
                pass  # below a forbidden token: any will do
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
            paths.append([*paths[parent], token])
    return DraftTree(tuple(tokens), tuple(parents), (1.0,) * len(tokens), ("", *["test"] * (len(tokens) - 1)))


@every_case
def test_every_bit_of_a_row_is_taken_and_nothing_else_by_prune(backend: str, spec: Spec) -> None:
    """In random states. Where a token is not in the row, `prune` cuts it, though the backend might go on with it."""
    grammar = compiler(backend).compile(spec)
    for seed in range(6):
        print("seed", seed)
        rng = random.Random(seed)
        before = reached(grammar, rng)
        constraint = grammar.start()
        constraint.advance(before)
        allowed = bits(constraint.row(()))
        for token in rng.sample(allowed, min(40, len(allowed))):
            if token not in END_IDS:
                taken = grammar.start()
                taken.advance(before)
                taken.advance([token])
                taken.row(())  # whatever may follow, the backend has not failed
        for first in range(0, VOCAB_SIZE, 62):
            tokens = (0, *range(first, min(first + 62, VOCAB_SIZE)))
            count = len(tokens)
            flat = DraftTree(tokens, (-1, *[0] * (count - 1)), (1.0,) * count, ("", *["test"] * (count - 1)))
            assert [*constraint.prune(flat).tokens[1:]] == [token for token in tokens[1:] if token in allowed]


@every_case
def test_a_child_stays_exactly_if_its_bit_is_set_in_the_row_of_its_parent(backend: str, spec: Spec) -> None:
    grammar = compiler(backend).compile(spec)
    for seed in range(4):
        print("seed", seed)
        rng = random.Random(seed)
        before = reached(grammar, rng)
        tree, constraint = random_tree(grammar, before, rng), grammar.start()
        constraint.advance(before)
        kept = [0]
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            if parent in kept and (parent == 0 or tree.tokens[parent] not in END_IDS):
                path = [tree.tokens[i] for i in tree.path(parent)]
                copy = grammar.start()
                copy.advance([*before, *path])
                if tree.tokens[node] in bits(copy.row(())):
                    kept.append(node)
        assert constraint.prune(tree) == tree.keep(kept)


@every_case
def test_specials_and_padding_are_no_text_and_the_ends_come_together(backend: str, spec: Spec) -> None:
    grammar = compiler(backend).compile(spec)
    for seed in range(8):
        print("seed", seed)
        constraint = grammar.start()
        constraint.advance(reached(grammar, random.Random(seed)))
        allowed = set(bits(constraint.row(())))
        assert not allowed & (SPECIAL_IDS - set(END_IDS))
        assert not allowed & set(range(TOKENIZER_SIZE, VOCAB_SIZE + 32))
        assert allowed & set(END_IDS) in (set(), set(END_IDS))
        for special in SPECIAL_IDS - set(END_IDS):
            with pytest.raises(ConstraintError):
                constraint.advance([special])


@dataclass
class Watched:
    """A matcher, and what it was given. No call may come back while the library is in its error state."""

    inner: Matcher
    in_error: Callable[[], bool]
    consumed: list[int] = field(default_factory=list)

    def fill(self, words_W: NDArray[np.int32], address: int) -> bool:
        may_end = self.inner.fill(words_W, address)
        assert not self.in_error() or not words_W.any()
        return may_end

    def consume(self, tokens: Seq[int]) -> None:
        self.consumed.extend(tokens)
        self.inner.consume(tokens)
        assert not self.in_error()

    def copy(self) -> Matcher:
        inner = self.inner.copy()
        in_error = inner._matcher.is_error if isinstance(inner, LlguidanceMatcher) else self.in_error
        return Watched(inner, in_error, self.consumed)

    def forced(self) -> Seq[int]:
        tokens = self.inner.forced()
        assert not self.in_error()
        return tokens


def watched(grammar: Any) -> tuple[Callable[[], TreeConstraint], list[int]]:
    """How to start a constraint over a grammar's matchers, and the tokens that these consume."""
    if isinstance(grammar, ValidatedGrammar | TaggedGrammar):
        grammar = grammar.grammar
    consumed: list[int] = []

    def matcher() -> Watched:
        if isinstance(grammar, LlguidanceGrammar):
            library = grammar.matcher.deep_copy()
            return Watched(grammar.tokens.matcher(library), library.is_error, consumed)
        inner: Matcher = AutomatonMatcher(grammar) if isinstance(grammar, Automaton) else grammar.matcher()
        return Watched(inner, lambda: False, consumed)

    vocabulary: Vocabulary
    if isinstance(grammar, LlguidanceGrammar):
        vocabulary = grammar.tokens.vocabulary
    elif isinstance(grammar, Automaton):
        vocabulary = grammar.vocabulary
    else:
        assert isinstance(grammar, XgrammarGrammar)
        vocabulary = grammar.vocabulary
    return lambda: TreeConstraint(matcher, matcher, vocabulary), consumed


@every_case
def test_end_tokens_are_never_fed_to_a_backend(backend: str, spec: Spec) -> None:
    grammar = compiler(backend).compile(spec)
    begin, consumed = watched(grammar)
    for seed in range(6):
        print("seed", seed)
        rng = random.Random(seed)
        before = reached(grammar, rng)
        tree, constraint = random_tree(grammar, before, rng), begin()
        constraint.advance(before)
        for node in range(len(tree)):
            constraint.row(tuple(tree.tokens[i] for i in tree.path(node)))
        constraint.prune(tree)
        constraint.forced()
    assert not set(consumed) & set(END_IDS)


def test_no_call_comes_back_while_llguidance_is_in_its_error_state() -> None:
    """There every mask allows the end alone, and a text would end in silence."""
    grammar = compile_llguidance(Regex(ENDLESS), llguidance_tokens(), "pattern")
    assert isinstance(grammar, LlguidanceGrammar)
    begin, _ = watched(grammar)
    constraint, letter = begin(), encode("a")
    with pytest.raises(ConstraintError, match="the grammar failed"):
        for _ in range(200):
            constraint.row(())
            constraint.advance(letter)
    library = grammar.matcher.deep_copy()
    matcher = LlguidanceMatcher(library, grammar.tokens.vocabulary.text_words_W.size)
    words_W = np.zeros_like(grammar.tokens.vocabulary.text_words_W)
    with pytest.raises(MatcherFailed):
        for _ in range(200):
            matcher.fill(words_W, words_W.ctypes.data)
            matcher.consume(letter)
    assert library.is_error()
    calls: list[Callable[[], object]] = [
        lambda: matcher.fill(words_W, words_W.ctypes.data),
        lambda: matcher.consume(letter),
        matcher.copy,
        matcher.forced,
    ]
    for call in calls:
        with pytest.raises(MatcherFailed):
            call()


DEPENDENT = JsonSchema(
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "integer"}},
        "dependentSchemas": {"a": {"required": ["b"], "properties": {"b": {"minimum": 5, "maximum": 9}}}},
        "additionalProperties": False,
    }
)


def difference_from_a_fresh_constraint(grammar: Grammar, seed: int) -> str | None:
    """Ask one constraint for rows behind many paths, in a random order; the first that a fresh one would not give."""
    rng = random.Random(seed)
    vocabulary = byte_vocabulary()
    constraint, committed = grammar.start(), list[int]()
    for _ in range(14):
        paths: list[tuple[int, ...]] = [()]
        for _ in range(rng.randrange(25)):
            path = rng.choice(paths[-4:] if rng.random() < 0.5 else paths)
            if rng.random() < 0.35:
                paths.append(path + constraint.forced(path))
            else:
                allowed = [token for token in bits(constraint.row(path)) if token not in vocabulary.end_ids]
                paths += [(*path, rng.choice(allowed))] if allowed else []
            asked = rng.choice(paths)
            fresh = grammar.start()
            fresh.advance([*committed, *asked])
            row_W, fresh_W = constraint.row(asked), fresh.row(())
            if row_W is None or fresh_W is None or not np.array_equal(row_W, fresh_W):
                return f"after {committed} and {asked}"
        allowed = [token for token in bits(constraint.row(())) if token not in vocabulary.end_ids]
        if not allowed:
            break
        committed.append(rng.choice(allowed))
        constraint.advance(committed[-1:])
    return None


@pytest.mark.parametrize("first", [0, pytest.param(40, marks=pytest.mark.slow)])
def test_rows_do_not_depend_on_what_was_asked_before(first: int) -> None:
    """llguidance's matcher fills a wrong row now and then once it has rolled back: drafts would change the text."""
    grammar = byte_vocabulary().compiler({}).compile(DEPENDENT)
    for seed in range(first, 40 if first == 0 else 1500):
        assert difference_from_a_fresh_constraint(grammar, seed) is None, f"seed {seed}"
