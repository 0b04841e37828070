"""Laws that every constraint obeys, whatever its backend."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.build import end_tokens, open_tokenizer
from specdec.errors import ConstraintError
from specdec.evals.structured import Times, replay_text
from specdec.evals.vocabulary import byte_vocabulary
from specdec.grammar.compile import Compiler
from specdec.grammar.llguidance import compile_llguidance
from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Lark, Regex, Spec
from specdec.grammar.walk import Matcher, MatcherFailed, TreeConstraint, Vocabulary
from specdec.loader import open_checkpoint
from specdec.mask import TokenMask
from specdec.protocols import Constraint
from specdec.tree import DraftTree, chain, merge, root
from tests.grammar.small_tokenizer import (
    END_IDS,
    PAD,
    SPECIAL_IDS,
    TOKENIZER_SIZE,
    VOCAB_SIZE,
    compiler,
    decode,
    encode,
    llguidance_tokens,
)

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]},
    {
        "type": "object",
        "properties": {"city": {"const": "Zürich"}, "zip": {"type": "integer", "minimum": 1000, "maximum": 9999}},
        "required": ["city", "zip"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    {"enum": ["red", "green", 3, None, {"a": [1, 2]}]},
    {"anyOf": [{"type": "integer", "minimum": -5, "maximum": 7}, {"type": "string", "maxLength": 6}]},
    {"type": "string", "pattern": "^[a-z]{2,8}@example\\.org$"},
    {"type": "string", "minLength": 3, "maxLength": 9},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "type": "object",
        "properties": {"value": {"type": "integer", "multipleOf": 3}, "tail": {"$ref": "#/$defs/node"}},
        "required": ["value"],
        "additionalProperties": False,
    },
    {
        "allOf": [
            {"properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
            {"type": "object", "properties": {"a": {"maximum": 12}, "b": {"type": "boolean"}}},
        ]
    },
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    {"type": "object", "additionalProperties": {"type": ["null", "object"]}, "propertyNames": {"pattern": "^[ab]*$"}},
]
EBNF = 'root ::= "{" pair ("," pair)* "}"\npair ::= [a-z]+ ":" ([0-9]+ | "true" | root)\n'
SPECS: list[Spec] = [
    *(JsonSchema(schema) for schema in SCHEMAS),
    JsonSchema(SCHEMAS[0], whitespace="compact"),
    JsonObject(),
    Regex(r"(the|a) quick( \w+){1,4}\."),
    Choice(["the lazy dog", "the lazy fox", "the", 'say "no"\n', "Zürich\\"]),
    Ebnf(EBNF),
    Lark('start: "[" item ("," item)* "]"\nitem: WORD | start\nWORD: /[a-z]{2,9}/'),
]


def start(spec: Spec) -> Constraint:
    return compiler().compile(spec).start()


def row_of(constraint: Constraint) -> NDArray[np.bool_]:
    """What may come next, by a mask of one row."""
    mask = TokenMask(1, VOCAB_SIZE)
    constraint.mask(root(0), 0, mask)
    row = mask.allowed(0)
    assert row is not None
    return row


def step(constraint: Constraint, rng: random.Random) -> int | None:
    """Advance by an allowed text token; None where only the end is allowed."""
    allowed = [int(t) for t in np.flatnonzero(row_of(constraint)) if t not in END_IDS]
    if not allowed:
        return None
    token = rng.choice(allowed)
    constraint.advance([token])
    return token


def grown_tree(spec: Spec, committed: list[int], rng: random.Random, max_drafts: int = 24) -> DraftTree:
    """A random tree: mostly tokens that the grammar allows, some that it does not, some ends."""
    tokens, parents = [0], [-1]
    paths: list[list[int]] = [[]]
    for _ in range(max_drafts):
        parent = rng.randrange(len(tokens)) if rng.random() < 0.5 else len(tokens) - 1
        token = rng.randrange(VOCAB_SIZE)
        if rng.random() < 0.85:
            copy = start(spec)
            try:
                copy.advance([*committed, *paths[parent]])
                token = rng.choice(np.flatnonzero(row_of(copy)).tolist())
            except ConstraintError:
                pass  # the parent itself is forbidden: any child will do
        if any(parents[i] == parent and tokens[i] == token for i in range(len(tokens))):
            continue
        tokens.append(token)
        parents.append(parent)
        paths.append([*paths[parent], token])
    scores = tuple(0.9 ** len(path) for path in paths)
    return DraftTree(tuple(tokens), tuple(parents), scores, ("", *["random"] * (len(tokens) - 1)))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_tree_walk_equals_advancing_a_copy_node_by_node(spec: Spec) -> None:
    for seed in range(3):
        print("seed", seed)
        rng = random.Random(seed)
        constraint, committed = start(spec), list[int]()
        for _ in range(6):
            tree = grown_tree(spec, committed, rng)
            kept = constraint.prune(tree)
            assert constraint.prune(kept) is kept

            # A node stays exactly if the row of its parent, from a copy, has its bit.
            rows: dict[tuple[int, ...], NDArray[np.bool_]] = {}
            paths = {0: list[int]()}
            for node in range(len(tree)):
                if node:
                    parent, token = tree.parents[node], tree.tokens[node]
                    if parent not in paths or (parent and tree.tokens[parent] in END_IDS):
                        continue
                    if not rows[tuple(paths[parent])][token]:
                        continue
                    paths[node] = [*paths[parent], token]
                    if token in END_IDS:
                        continue
                copy = start(spec)
                for token in [*committed, *paths[node]]:
                    copy.advance([token])
                rows[tuple(paths[node])] = row_of(copy)
            assert kept == tree.keep(paths)

            offset = rng.randrange(3)
            mask = TokenMask(offset + len(kept), VOCAB_SIZE)
            constraint.mask(kept, offset, mask)
            for node in range(len(kept)):
                path = tuple(kept.tokens[i] for i in kept.path(node))
                if kept.tokens[node] in END_IDS and node:
                    continue
                np.testing.assert_array_equal(mask.allowed(offset + node), rows[path])
            for row in range(offset):
                assert mask.words(row) is None

            walk = [kept.tokens[i] for i in kept.path(rng.randrange(len(kept)))]
            walk = [token for token in walk if token not in END_IDS]
            if rng.random() < 0.5 and walk:
                constraint.advance(walk)
                committed += walk
            elif (taken := step(constraint, rng)) is not None:
                committed.append(taken)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_masks_of_a_tree_that_nobody_pruned_are_the_same(spec: Spec) -> None:
    print("seed 1")
    tree = grown_tree(spec, [], random.Random(1))
    pruned = start(spec)
    kept = pruned.prune(tree)
    whole, part = TokenMask(len(tree), VOCAB_SIZE), TokenMask(len(kept), VOCAB_SIZE)
    start(spec).mask(tree, 0, whole)
    pruned.mask(kept, 0, part)
    places = {tuple(kept.tokens[i] for i in kept.path(node)): node for node in range(len(kept))}
    for node in range(len(tree)):
        words = whole.words(node)
        assert words is not None
        place = places.get(tuple(tree.tokens[i] for i in tree.path(node)))
        if place is None:
            assert not words.any()
        else:
            np.testing.assert_array_equal(words, part.words(place))


@pytest.mark.parametrize("whitespace", ["compact", "flexible"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_random_text_under_the_mask_finishes_as_a_valid_instance(schema: dict[str, Any], whitespace: str) -> None:
    spec = JsonSchema(schema, whitespace="compact" if whitespace == "compact" else "flexible")
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    finished = 0
    for seed in range(6):
        print("seed", seed)
        rng = random.Random(seed)
        constraint, tokens = start(spec), list[int]()
        for _ in range(400):
            row = row_of(constraint)
            assert row.any(), f"stuck after {decode(tokens)!r}"
            assert not row[TOKENIZER_SIZE:].any()
            assert len({bool(row[end]) for end in END_IDS}) == 1, "end tokens are allowed together"
            assert not any(row[special] for special in SPECIAL_IDS if special not in END_IDS)
            if row[END_IDS[0]] and rng.random() < 0.5:
                break
            # Short tokens would wander for long; those that close something end the text.
            closing = [t for t in np.flatnonzero(row).tolist() if t not in END_IDS and set(decode([t])) & set('}]",')]
            if (len(tokens) > 60 or rng.random() < 0.3) and closing:
                token = rng.choice(closing)
                constraint.advance([token])
            else:
                taken = step(constraint, rng)
                if taken is None:
                    break
                token = taken
            tokens.append(token)
        if row_of(constraint)[END_IDS[0]]:
            finished += 1
            text = decode(tokens)
            assert validator.is_valid(json.loads(text)), text
            if whitespace == "compact":
                assert not re.search(r"\s", re.sub(r'"(?:[^"\\]|\\.)*"', '""', text))
    assert finished >= 3


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_end_is_allowed_exactly_where_the_text_may_end(spec: Spec) -> None:
    """A text may end exactly if the same text, advanced whole from the beginning, may."""
    print("seed 5")
    rng = random.Random(5)
    constraint, tokens = start(spec), list[int]()
    for _ in range(40):
        whole = start(spec)
        whole.advance(tokens)
        np.testing.assert_array_equal(row_of(constraint), row_of(whole))
        token = step(constraint, rng)
        if token is None:
            break
        tokens.append(token)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Choice(["the lazy dog", "the lazy fox"]), "the lazy fox"),
        (JsonSchema({"enum": ["red"]}), '"red"'),
        (Regex("[0-9]{3}"), "123"),
        (Ebnf('root ::= "true" | "false"'), "true"),
        (JsonSchema({"type": "boolean"}), "false"),
    ],
    ids=str,
)
def test_after_a_complete_text_exactly_the_end_tokens_are_allowed(spec: Spec, text: str) -> None:
    constraint = start(spec)
    for token in encode(text):
        row = row_of(constraint)
        assert row[token]
        assert not any(row[end] for end in END_IDS)
        constraint.advance([token])
    assert set(np.flatnonzero(row_of(constraint)).tolist()) == set(END_IDS)
    assert constraint.forced() == ()
    # Drafts past the end go, except the end itself; what stands under an end goes too.
    tree = DraftTree((0, END_IDS[1], 40, 41, END_IDS[0]), (-1, 0, 0, 1, 0), (1.0,) * 5, ("",) * 5)
    assert constraint.prune(tree) == tree.keep([1, 4])
    mask = TokenMask(3, VOCAB_SIZE)
    constraint.mask(constraint.prune(tree), 0, mask)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_forced_tokens_are_legal_one_by_one_and_never_an_end(spec: Spec) -> None:
    for seed in range(4):
        print("seed", seed)
        rng = random.Random(seed)
        constraint = start(spec)
        for _ in range(30):
            forced = constraint.forced()
            assert constraint.prune(chain(0, forced[:62], "forced")).tokens[1:] == forced[:62]
            for token in forced:
                assert token not in END_IDS
                assert row_of(constraint)[token]
                constraint.advance([token])
            if step(constraint, rng) is None:
                break


def test_forced_text_is_what_the_schema_leaves_no_choice_about() -> None:
    constraint = start(JsonSchema(SCHEMAS[1], whitespace="compact"))
    text = decode(list(constraint.forced()))
    assert text
    assert '{"city":"Zürich","zip":'.startswith(text)
    # As the tokenizer writes it, up to a last token held back.
    assert encode('{"city":"Zürich","zip":1234}')[: len(constraint.forced())] == list(constraint.forced())


def test_forced_text_can_be_asked_between_masks_without_changing_them() -> None:
    spec = JsonSchema(SCHEMAS[1], whitespace="compact")
    constraint, plain = start(spec), start(spec)
    rng = random.Random(3)
    for _ in range(30):
        tree = chain(0, constraint.forced()[:62], "forced")
        assert constraint.prune(tree) == plain.prune(tree)
        constraint.forced()
        np.testing.assert_array_equal(row_of(constraint), row_of(plain))
        token = step(constraint, rng)
        if token is None:
            break
        plain.advance([token])


def test_special_tokens_are_not_text_even_where_everything_is() -> None:
    anything = start(Regex(r"(?s).*"))
    row = row_of(anything)
    assert not any(row[t] for t in SPECIAL_IDS if t not in END_IDS)
    assert not row[TOKENIZER_SIZE:].any()
    assert row[encode("the")[0]]
    with pytest.raises(ConstraintError):
        anything.advance([PAD])


@pytest.mark.parametrize("spec", [JsonSchema(SCHEMAS[0]), Ebnf(EBNF)], ids=["llguidance", "xgrammar"])
def test_an_illegal_token_raises_and_leaves_the_constraint_as_it_was(spec: Spec) -> None:
    constraint = start(spec)
    before = row_of(constraint)
    with pytest.raises(ConstraintError, match="cannot follow"):
        constraint.advance([encode("{")[0], encode("}")[0], encode("}")[0]])
    np.testing.assert_array_equal(row_of(constraint), before)
    constraint.advance(np.flatnonzero(before)[:1].tolist())


def test_an_empty_tree_and_an_empty_advance_change_nothing() -> None:
    constraint = start(SPECS[0])
    mask = TokenMask(2, VOCAB_SIZE)
    constraint.mask(DraftTree(), 0, mask)
    assert mask.words(0) is None
    assert constraint.prune(DraftTree()) == DraftTree()
    constraint.advance([])
    assert constraint.prune(root(3)) == root(3)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('{"a":1}', True),
        ('{ "a" : 1 }', True),
        ('{\n  "a": 1\n}', True),
        ('{\r\n\t\t"a": 1\n}', True),
        ("{\n" + " " * 40 + '"a":1}', True),
        ("{\n" + " " * 41 + '"a":1}', False),
        ('{  "a":1}', False),
        ('{\n\n"a":1}', False),
        (' {"a":1}', False),
    ],
)
def test_flexible_whitespace_is_bounded(text: str, allowed: bool) -> None:
    constraint = start(JsonSchema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}))

    def advance() -> bool:
        for token in encode(text):
            if not row_of(constraint)[token]:
                return False
            constraint.advance([token])
        return bool(row_of(constraint)[END_IDS[0]])

    # Where the opening is forced the tokens must be the canonical ones; encode writes them.
    assert advance() == allowed


@pytest.mark.parametrize(
    ("whitespace", "text", "allowed"),
    [
        ("compact", '{"a":1}', True),
        ("compact", '{ "a":1}', False),
        (" *", '{     "a"  :   1}', True),
        (" *", '{\n"a":1}', False),
        (r"(?: |\n){1,3}", '{ \n "a":1}', True),
        (r"[ \t]{2}", '{ "a":1}', False),
        (r"[ \t]{2}", '{ \t"a":1}', True),
    ],
)
def test_whitespace_may_be_any_run_of_blanks(whitespace: str, text: str, allowed: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    vocabulary = byte_vocabulary()
    grammar = vocabulary.compiler({}).compile(JsonSchema(schema, whitespace=whitespace))
    assert (replay_text(grammar, text, vocabulary, Times()).place is None) == allowed


ENDLESS = r"b*((a{1,300}){1,300}){1,300}"  # llguidance gives up after some 29 letters a


def endless() -> Constraint:
    """A grammar that a compiler would refuse, because a text under it fails."""
    return compile_llguidance(Regex(ENDLESS), llguidance_tokens(), "pattern").start()


def failing_depth() -> int:
    """How many letters a llguidance follows one by one before it gives up."""
    constraint = endless()
    letter = encode("a")
    for depth in range(200):
        try:
            row_of(constraint)
            constraint.advance(letter)
        except ConstraintError:
            return depth
    raise AssertionError("llguidance follows this pattern now; find another that it gives up on")


def test_a_backend_that_fails_on_a_draft_loses_the_branch_and_nothing_else() -> None:
    depth, (a, b) = failing_depth(), encode("a") + encode("b")
    chain_of_a = chain(0, [a] * (depth + 10), "test")
    tree = DraftTree(
        (*chain_of_a.tokens, b, b, a),
        (*chain_of_a.parents, 0, len(chain_of_a), len(chain_of_a)),
        (*chain_of_a.scores, 0.5, 0.25, 0.25),
        ("", *["test"] * (len(chain_of_a) + 2)),
    )
    constraint = endless()
    kept = constraint.prune(tree)
    survivors = kept.tokens.count(a)
    assert 1 < survivors <= depth + 1
    assert kept.tokens[-3:] == (b, b, a)

    mask = TokenMask(len(kept), VOCAB_SIZE)
    constraint.mask(kept, 0, mask)
    healthy = endless()
    np.testing.assert_array_equal(mask.allowed(0), row_of(healthy))
    healthy.advance([b])
    np.testing.assert_array_equal(mask.allowed(kept.tokens.index(b)), row_of(healthy))
    constraint.advance([b])
    np.testing.assert_array_equal(row_of(constraint), row_of(healthy))


def test_a_backend_that_fails_on_committed_tokens_raises() -> None:
    constraint = endless()
    for _ in range(failing_depth()):
        constraint.advance(encode("a"))
    with pytest.raises(ConstraintError, match="the grammar failed"):
        row_of(constraint)


def test_a_failure_on_committed_tokens_is_final_and_costs_one_rebuild() -> None:
    rebuilt = []

    class Broken:
        def fill(self, words_W: NDArray[np.int32], address: int) -> bool:
            raise MatcherFailed("too many items")

        def forced(self) -> list[int]:
            raise MatcherFailed("too many items")

        def consume(self, tokens: Seq[int]) -> None:
            """Goes anywhere."""

        def copy(self) -> Broken:
            return self

    def rebuild() -> Broken:
        rebuilt.append(True)
        return Broken()

    constraint = TreeConstraint(Broken, rebuild, Vocabulary.of(VOCAB_SIZE, range(3, VOCAB_SIZE), END_IDS))
    for ask in (constraint.forced, lambda: constraint.prune(chain(0, [5], "x")), lambda: row_of(constraint)):
        with pytest.raises(ConstraintError, match="the grammar failed: too many items"):
            ask()
    assert len(rebuilt) == 1


@pytest.mark.weights
def test_a_large_open_object_can_be_written_to_its_end() -> None:
    """Optional properties, other ones between them, and whitespace, with a vocabulary of the usual size: a step of
    llguidance looks at some 48,000 items."""
    checkpoint = open_checkpoint("smollm2-135m")
    tokenizer, vocab_size = open_tokenizer(checkpoint), checkpoint.config.vocab_size
    ends = end_tokens(checkpoint, vocab_size)
    text = '{ "p1": "abc", "p5": 17, "zz": {"k": [1, {"p1": "q"}]}, "a": "b"}'
    properties = {f"p{i}": {"type": ["string", "integer", "null"]} for i in range(1_700)}
    grammar = Compiler(tokenizer.json, vocab_size, ends, tokenizer.special_ids).compile(
        JsonSchema({"type": "object", "properties": properties})
    )
    constraint = grammar.start()
    for token in tokenizer.encode(text, add_special_tokens=False):
        mask = TokenMask(1, vocab_size)
        constraint.mask(root(0), 0, mask)
        row = mask.allowed(0)
        assert row is not None and row[token]
        constraint.advance([token])
    mask = TokenMask(1, vocab_size)
    constraint.mask(root(0), 0, mask)
    row = mask.allowed(0)
    assert row is not None and row[list(ends)].all()


def test_a_failure_in_one_text_does_not_reach_another() -> None:
    before = row_of(endless())
    neighbour = endless()
    failing_depth()
    np.testing.assert_array_equal(row_of(neighbour), before)
    np.testing.assert_array_equal(row_of(endless()), before)


def test_a_grammar_of_special_tokens_ends_where_only_they_could_follow() -> None:
    """Special tokens are not text, whatever a grammar says."""
    constraint = start(Lark('start: "a" <[0]> | "a" <pad> | "b"'))
    constraint.advance(encode("a"))
    assert not row_of(constraint).any()


def test_a_dead_end_in_a_tree_is_an_empty_row_and_harms_no_other() -> None:
    constraint = start(Lark('start: "a" <[0]> | "b" "c"'))
    a, b, c = encode("a")[0], encode("b")[0], encode("c")[0]
    tree = DraftTree((0, a, b, c, c), (-1, 0, 0, 1, 2), (1.0,) * 5, ("", *["test"] * 4))
    kept = constraint.prune(tree)
    assert kept.tokens == (0, a, b, c)  # the token after the dead end goes, the dead end itself stays
    mask = TokenMask(len(kept), VOCAB_SIZE)
    constraint.mask(kept, 0, mask)
    allowed = [row for row in map(mask.allowed, range(len(kept))) if row is not None]
    assert [int(row.sum()) for row in allowed] == [2, 0, 1, len(END_IDS)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_set_bit_means_that_the_token_is_taken(spec: Spec) -> None:
    print("seed 9")
    rng = random.Random(9)
    prefix: list[int] = []
    for _ in range(4):
        constraint = start(spec)
        constraint.advance(prefix)
        allowed = [int(t) for t in np.flatnonzero(row_of(constraint)) if t not in END_IDS]
        for token in rng.sample(allowed, min(12, len(allowed))):
            taken = start(spec)
            taken.advance([*prefix, token])
            assert constraint.prune(chain(0, [token], "test")).num_drafts == 1
        if not allowed:
            break
        prefix.append(rng.choice(allowed))


def test_where_no_text_can_follow_the_row_is_empty() -> None:
    """A rule without end is entered only to find that nothing finishes it: a dead end, not a failure."""
    constraint = start(Ebnf('root ::= "a" nothing | "b"\nnothing ::= nothing'))
    constraint.advance(encode("a"))
    assert not row_of(constraint).any()
    assert constraint.prune(chain(0, encode("b"), "test")) == root(0)


def test_a_bound_on_rows_cuts_drafts_and_changes_no_row() -> None:
    tokens = llguidance_tokens()
    grammar = compile_llguidance(Regex("[ab]*"), tokens, "pattern")

    def matcher() -> Matcher:
        return tokens.matcher(grammar.matcher.deep_copy())

    bounded = TreeConstraint(matcher, matcher, tokens.vocabulary, max_rows=3)
    letters = chain(0, encode("a") * 8, "test")
    kept = bounded.prune(letters)
    assert kept == letters.keep([0, 1, 2])
    mask = TokenMask(len(kept), VOCAB_SIZE)
    bounded.mask(kept, 0, mask)
    for node in range(len(kept)):
        np.testing.assert_array_equal(mask.allowed(node), row_of(grammar.start()))
    bounded.advance(encode("a") * 2)
    assert bounded.prune(letters) == letters.keep([0, 1, 2])


def test_a_text_without_drafts_copies_no_matcher() -> None:
    """A copy costs time in the length of the text: one a token would make long texts quadratic."""

    class Anything:
        def fill(self, words_W: NDArray[np.int32], address: int) -> bool:
            words_W[:] = -1
            return True

        def forced(self) -> list[int]:
            return []

        def consume(self, tokens: Seq[int]) -> None:
            consumed.extend(tokens)

        def copy(self) -> Anything:
            raise AssertionError("copied")

    consumed: list[int] = []
    constraint = TreeConstraint(Anything, Anything, Vocabulary.of(VOCAB_SIZE, range(3, VOCAB_SIZE), END_IDS))
    for token in (5, 6, 7):
        constraint.mask(chain(0, [], "x"), 0, TokenMask(1, VOCAB_SIZE))
        constraint.advance([token])
    assert consumed == [5, 6, 7]


def test_only_the_rows_that_a_walk_visits_are_worked_out() -> None:
    """And those of drafts that have drafts below them, to prune these."""
    filled: list[tuple[int, ...]] = []

    @dataclass
    class Counting:
        path: tuple[int, ...] = ()

        def fill(self, words_W: NDArray[np.int32], address: int) -> bool:
            filled.append(self.path)
            words_W[:] = -1
            return False

        def consume(self, tokens: Seq[int]) -> None:
            self.path += tuple(tokens)

        def copy(self) -> Counting:
            return Counting(self.path)

        def forced(self) -> Seq[int]:
            return []

    constraint = TreeConstraint(Counting, Counting, Vocabulary.of(VOCAB_SIZE, range(3, VOCAB_SIZE), END_IDS))
    leaves = [chain(0, [token], "x") for token in range(10, 70)]
    tree = constraint.prune(merge([chain(0, [5, 6], "x"), *leaves]))
    assert len(tree) == 63
    assert filled == [(), (5,)]
    mask = TokenMask(len(tree), VOCAB_SIZE)
    constraint.mask(tree, 0, mask)
    assert filled == [(), (5,)]
    visited = tree.tokens.index(42)
    assert mask.words(visited) is not None
    assert filled == [(), (5,), (42,)]
    constraint.advance([42])
    constraint.mask(chain(42, [], "x"), 0, TokenMask(1, VOCAB_SIZE))
    assert filled == [(), (5,), (42,), (42,)]
