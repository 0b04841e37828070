"""The forced drafter proposes what the grammar leaves no choice about, within its grant."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from specdec.drafters.forced import ForcedDrafter
from specdec.errors import ConstraintError
from specdec.grammar.spec import JsonSchema
from specdec.mask import TokenMask
from specdec.protocols import Constraint
from specdec.sequence import Grant
from specdec.tree import EMPTY, DraftTree, root
from tests.drafters.sequences import new_sequence
from tests.grammar.small_tokenizer import VOCAB_SIZE, compiler, encode

CITY = JsonSchema({"type": "object", "properties": {"city": {"const": "Zürich"}}, "required": ["city"]}, "compact")


def city() -> Constraint:
    return compiler().compile(CITY).start()


def test_it_drafts_the_forced_chain() -> None:
    seq = new_sequence([3, 4], constraint=city())
    (tree,) = ForcedDrafter().draft([Grant(seq, known=2, drafts=62, depth=62)])
    assert tree.tokens == (4, *city().forced())
    assert len(tree) > 3
    assert tree.parents == tuple(range(-1, len(tree) - 1))
    assert set(tree.sources[1:]) == {"forced"}
    assert min(tree.scores) > 0.9
    assert tree.problem(VOCAB_SIZE) is None
    assert seq.constraint.prune(tree) == tree


@pytest.mark.parametrize(("drafts", "depth", "count"), [(2, 9, 2), (9, 3, 3), (0, 5, 0), (5, 0, 0)])
def test_it_keeps_to_its_grant(drafts: int, depth: int, count: int) -> None:
    seq = new_sequence([3, 4], constraint=city())
    (tree,) = ForcedDrafter().draft([Grant(seq, known=2, drafts=drafts, depth=depth)])
    assert tree.num_drafts == count


def test_away_from_the_frontier_there_is_no_tree() -> None:
    seq = new_sequence([3, 4, 5], constraint=city())
    assert ForcedDrafter().draft([Grant(seq, known=2, drafts=9, depth=9)]) == [EMPTY]


def test_where_the_grammar_leaves_a_choice_there_is_the_root_only() -> None:
    constraint = compiler().compile(JsonSchema({"type": "integer"})).start()
    seq = new_sequence([3, 4], constraint=constraint)
    assert ForcedDrafter().draft([Grant(seq, known=2, drafts=9, depth=9)]) == [root(4)]


def test_the_chain_follows_what_was_emitted() -> None:
    constraint, seen = city(), city().forced()
    constraint.advance(seen[:3])
    seq = new_sequence([3, *seen[:3]], constraint=constraint)
    (tree,) = ForcedDrafter().draft([Grant(seq, known=4, drafts=62, depth=62)])
    assert tree.tokens == seen[2:]
    assert encode('{"city')[0] == seen[0]


class Failing:
    """A constraint whose backend has failed."""

    def prune(self, tree: DraftTree) -> DraftTree:
        raise ConstraintError("the grammar failed")

    def mask(self, tree: DraftTree, first_row: int, mask: TokenMask) -> None:
        raise ConstraintError("the grammar failed")

    def forced(self) -> tuple[int, ...]:
        raise ConstraintError("the grammar failed")

    def advance(self, tokens: Seq[int]) -> None:
        raise ConstraintError("the grammar failed")

    def finish(self) -> None:
        """Any text that ends where it may is right."""


def test_a_grammar_that_fails_costs_no_other_sequence_its_drafts() -> None:
    grants = [Grant(new_sequence([3, 4], constraint=one), known=2, drafts=9, depth=9) for one in (Failing(), city())]
    trees = ForcedDrafter().draft(grants)
    assert trees[0] == root(4)
    assert trees[1].num_drafts > 1
