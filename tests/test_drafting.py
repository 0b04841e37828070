"""Several drafters propose one tree within the grant, and each learns what it asked for."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any, cast

import pytest

from specdec.build import drafter_names
from specdec.drafters.forced import ForcedDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.drafting import Drafting
from specdec.errors import ConfigError
from specdec.grammar.spec import JsonSchema
from specdec.metrics import Metrics
from specdec.protocols import Drafter
from specdec.request import Sampling, Speculative
from specdec.sequence import Grant
from specdec.tree import EMPTY, DraftTree, chain, root
from tests.drafters.sequences import new_sequence
from tests.drafters_for_tests import OracleDrafter, RandomDrafter, random_tree
from tests.grammar.small_tokenizer import VOCAB_SIZE, compiler, encode


def drafting(*drafters: Drafter, vocab_size: int = 30) -> Drafting:
    return Drafting(drafters, vocab_size, Metrics())


def test_the_union_holds_every_guess_once() -> None:
    record = '{"city":"Zürich","zip":8001}'
    schema = {
        "type": "object",
        "properties": {"city": {"const": "Zürich"}, "zip": {"type": "integer"}},
        "required": ["city", "zip"],
        "additionalProperties": False,
    }
    constraint = compiler().compile(JsonSchema(schema, "compact")).start()
    prompt = encode(record) + encode(" ") + encode(record)[:3]
    seq = new_sequence(prompt, constraint=constraint)
    forced = ForcedDrafter().draft([Grant(seq, len(prompt), 20, 20)])[0]
    copied = NgramDrafter().draft([Grant(seq, len(prompt), 20, 20)])[0]
    (tree,) = drafting(ForcedDrafter(), NgramDrafter(), vocab_size=VOCAB_SIZE).draft([Grant(seq, len(prompt), 62, 62)])
    assert tree.problem(VOCAB_SIZE) is None
    assert {"forced", "ngram"} == set(tree.sources[1:])
    assert max(forced.num_drafts, copied.num_drafts) < tree.num_drafts <= forced.num_drafts + copied.num_drafts


def test_the_union_keeps_to_the_grant_and_to_what_a_tree_may_be() -> None:
    for seed in range(50):
        print("seed", seed)
        rng = random.Random(seed)
        drafters = [RandomDrafter(seed + i, 30) for i in range(3)]
        seq = new_sequence([rng.randrange(30) for _ in range(5)])
        grant = Grant(seq, 5, rng.randint(0, 62), rng.randint(0, 8))
        (tree,) = drafting(*drafters).draft([grant])
        assert tree.problem(30) is None
        assert tree.num_drafts <= grant.drafts
        assert max(tree.depths()) <= grant.depth
        assert drafting(*drafters).draft([Grant(seq, 4, 9, 9), grant]) == [EMPTY, tree]


class Recorder:
    """A drafter that writes down what it is told."""

    names: tuple[str, ...] = ("recorder",)

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self.seen: list[Any] = []

    def draft(self, grants: Any) -> list[Any]:
        return [EMPTY for _ in grants]

    def observe(self, spans: Any, batch: Any, taps: Any, paths: Any) -> None:
        self.seen.append((spans, batch, taps, paths))

    def forget(self, seq: Any) -> None:
        self.seen.append(seq)


def test_each_drafter_observes_the_layers_it_asked_for() -> None:
    first, second = Recorder((9, 2)), Recorder((4, 2))
    both = drafting(first, second)
    assert both.taps == (2, 4, 9)
    taps = cast("Any", ["at 2", "at 4", "at 9"])
    both.observe([], cast("Any", "batch"), taps, [[1]])
    assert first.seen == [([], "batch", ["at 9", "at 2"], [[1]])]
    assert second.seen == [([], "batch", ["at 4", "at 2"], [[1]])]
    seq = new_sequence([1])
    both.forget(seq)
    assert first.seen[-1] is seq
    assert second.seen[-1] is seq


def test_random_trees_are_trees_of_every_shape() -> None:
    shapes = set()
    for seed in range(200):
        tree = random_tree(random.Random(seed), 3, 40, 62, 62)
        assert tree.problem(40) is None
        depth = max(tree.depths())
        shapes.add("root" if not tree.num_drafts else "chain" if depth == tree.num_drafts else "bush")
        shapes.add("deep" if depth > 20 else "wide" if tree.num_drafts > 20 else "small")
    assert shapes == {"root", "chain", "bush", "deep", "wide", "small"}


def test_the_oracle_knows_the_answer_unless_it_errs() -> None:
    truth: dict[tuple[int, ...], list[int]] = {(1, 2): list(range(10, 40))}
    seq = new_sequence([1, 2, 10, 11], num_prompt=2)
    grant = Grant(seq, 4, 62, 8)
    (right,) = OracleDrafter(truth, 50).draft([grant])
    assert right.tokens == (11, 12, 13, 14, 15, 16, 17, 18, 19)
    wrong = OracleDrafter(truth, 50, mistake_rate=1.0).draft([grant])[0]
    assert all(a != b for a, b in zip(wrong.tokens[1:], right.tokens[1:], strict=True))
    bushy = OracleDrafter(truth, 50, branch_rate=1.0).draft([grant])[0]
    assert bushy.num_drafts > 20
    assert bushy.problem(50) is None
    (unknown,) = OracleDrafter({}, 50).draft([grant])
    assert unknown.num_drafts == 0


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("forced,suffix", ("prediction", "forced", "suffix")),
        (" ngram ", ("prediction", "ngram")),
        ("ngram,ngram", ("prediction", "ngram")),
        ("prediction", ("prediction",)),
        ("suffix,prediction", ("prediction", "suffix")),
        ("none", ()),
        ("", ()),
    ],
)
def test_where_there_is_any_drafter_predictions_are_read_first(asked: str, names: tuple[str, ...]) -> None:
    assert drafter_names(asked) == names


@pytest.mark.parametrize("asked", ["psychic", "suffix,psychic", "none,ngram"])
def test_drafters_that_are_not_known_or_contradict_are_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match=r"^drafter "):
        drafter_names(asked)


def test_a_request_hears_of_the_drafters_that_it_names_only() -> None:
    asked: list[list[Grant]] = []

    class Counting:
        names: tuple[str, ...] = ("counting",)
        taps: tuple[int, ...] = ()

        def draft(self, grants: Seq[Grant]) -> list[DraftTree]:
            asked.append(list(grants))
            return [chain(grant.seq.tokens[-1], [9], "counting") for grant in grants]

        def observe(self, spans: Any, batch: Any, taps: Any, paths: Any) -> None:
            """Nothing is learned."""

        def forget(self, seq: Any) -> None:
            """Nothing is kept."""

    both = drafting(NgramDrafter(), Counting())
    assert both.names == ("ngram", "counting")
    tokens = [1, 2, 3, 1, 2]
    methods = (None, "ngram", "counting", "counting, ngram")
    grants = [
        Grant(new_sequence(tokens, sampling=Sampling(speculative=Speculative(method))), 5, 9, 9) for method in methods
    ]
    trees = both.draft(grants)
    assert [set(tree.sources[1:]) for tree in trees] == [
        {"ngram", "counting"}, {"ngram"}, {"counting"}, {"ngram", "counting"},
    ]  # fmt: skip
    assert asked == [[grants[0], grants[2], grants[3]]]
    both.draft([grants[1]])
    assert len(asked) == 1, "who is asked for nothing is not called"


def test_where_nobody_is_asked_there_is_the_root() -> None:
    """A request may name one drafter, and the policy not hear that one for a while."""
    tokens = [1, 2, 3, 1, 2]
    seq = new_sequence(tokens, sampling=Sampling(speculative=Speculative("ngram")))
    muted = frozenset(["ngram"])
    both = drafting(NgramDrafter(), RandomDrafter(1, 9))
    assert both.draft([Grant(seq, 5, 9, 9, muted=muted), Grant(seq, 4, 0, 0, muted=muted)]) == [root(2), EMPTY]
