"""The forced drafter proposes what the grammar leaves no choice about, within its grant."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.drafters.forced import ForcedDrafter
from specdec.errors import ConstraintError
from specdec.free import FREE_TEXT
from specdec.grammar.spec import JsonSchema
from specdec.mask import TokenMask
from specdec.protocols import Constraint
from specdec.sequence import Grant, Sequence, Span
from specdec.tree import EMPTY, DraftTree, root
from tests.drafters.sequences import new_sequence
from tests.grammar.small_tokenizer import VOCAB_SIZE, compiler, encode, spell

if TYPE_CHECKING:
    from specdec.batch import Batch

CITY = JsonSchema({"type": "object", "properties": {"city": {"const": "Zürich"}}, "required": ["city"]}, "compact")


def city() -> Constraint:
    return compiler().compile(CITY).start()


def test_it_drafts_the_forced_chain() -> None:
    seq = new_sequence([3, 4], constraint=city())
    (tree,) = ForcedDrafter().draft([Grant(seq, known=2, drafts=62, depth=62)])
    forced = city().forced()
    assert len(forced) > 3
    assert tree.tokens[: len(forced) + 1] == (4, *forced)
    assert tree.parents[: len(forced) + 1] == tuple(range(-1, len(forced)))
    assert set(tree.sources[1 : len(forced) + 1]) == {"forced"}
    assert min(tree.scores[: len(forced) + 1]) > 0.9
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


def test_where_the_grammar_leaves_many_choices_there_is_the_root_only() -> None:
    constraint = compiler().compile(JsonSchema({"type": "string"})).start()
    constraint.advance(encode('"'))
    seq = new_sequence([3, 4], constraint=constraint)
    assert ForcedDrafter().draft([Grant(seq, known=2, drafts=9, depth=9)]) == [root(4)]


def test_the_chain_follows_what_was_emitted() -> None:
    constraint, seen = city(), city().forced()
    constraint.advance(seen[:3])
    seq = new_sequence([3, *seen[:3]], constraint=constraint)
    (tree,) = ForcedDrafter().draft([Grant(seq, known=4, drafts=62, depth=62)])
    assert tree.tokens[: len(seen) - 2] == seen[2:]
    assert encode('{"city')[0] == seen[0]


COLOUR = JsonSchema({"type": "array", "items": {"enum": ["red", "green", "grey"]}, "minItems": 9}, "compact")


def written(drafter: ForcedDrafter, spec: JsonSchema, text: str, *, salt: str = "") -> Sequence:
    """A sequence that wrote `text` under `spec`, token by token, with the drafter asked and told each time."""
    seq = new_sequence([3], constraint=compiler().compile(spec).start(), salt=salt)
    for token in encode(text):
        tree = drafted(drafter, seq)
        span = Span(seq, 1, tree, 0, 0, len(seq.tokens) - 1)
        seq.constraint.advance([token])
        seq.tokens.append(token)
        drafter.observe([span], cast("Batch", None), (), [()])
    return seq


def drafted(drafter: ForcedDrafter, seq: Sequence) -> DraftTree:
    (tree,) = drafter.draft([Grant(seq, known=len(seq.tokens), drafts=62, depth=62)])
    assert tree.problem(VOCAB_SIZE) is None
    assert seq.constraint.prune(tree) == tree
    return tree


def guesses(tree: DraftTree) -> dict[str, float]:
    """The text behind each node, with its score."""
    return {
        b"".join(spell(tree.tokens[at]) for at in tree.path(node)).decode(errors="replace"): tree.scores[node]
        for node in range(1, len(tree))
    }


def test_few_choices_are_branches_and_the_longest_of_those_that_begin_alike_come_first() -> None:
    boolean = JsonSchema({"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}, "compact")
    tree = drafted(ForcedDrafter(spell), written(ForcedDrafter(spell), boolean, '{"on":'))
    found = guesses(tree)
    assert {"true", "false"} <= {text for text, score in found.items() if score > 0.3}
    assert found["true"] > max(found.get(part, 0.0) for part in ("t", "tr", "tru"))
    assert "forced/branch" in tree.sources


def test_what_was_picked_at_a_place_is_likelier_there() -> None:
    drafter = ForcedDrafter(spell)
    before = guesses(drafted(drafter, written(drafter, COLOUR, '["red"')))
    after = guesses(drafted(drafter, written(drafter, COLOUR, '["red","grey","grey","grey"')))
    assert after[',"grey'] > 0.5 > before.get(',"grey', 0.0)


def test_a_finished_text_teaches_the_texts_of_its_salt_only() -> None:
    drafter = ForcedDrafter(spell)
    teacher = written(drafter, COLOUR, '["grey","grey","grey","grey"', salt="a")
    teacher.finish_reason = "stop"
    drafter.forget(teacher)
    assert drafter.num_kept == 0
    same, other = (guesses(drafted(drafter, written(drafter, COLOUR, "[", salt=salt))) for salt in ("a", "b"))
    assert same['"grey'] > 0.5 > other.get('"grey', 0.0)


def test_white_space_is_guessed_in_the_style_seen_so_far() -> None:
    record = JsonSchema(
        {
            "type": "object",
            "properties": {name: {"type": "boolean"} for name in ("first", "second", "third")},
            "required": ["first", "second", "third"],
            "additionalProperties": False,
        }
    )
    drafter = ForcedDrafter(spell)
    spaced = guesses(drafted(drafter, written(drafter, record, '{"first": true, "second": true')))
    assert ', "third": true' in spaced
    packed = guesses(drafted(drafter, written(drafter, record, '{"first":true,"second":true')))
    assert ',"third":true' in packed


def test_free_text_costs_nothing() -> None:
    drafter = ForcedDrafter()
    seq = new_sequence([3, 4], constraint=FREE_TEXT)
    assert drafter.draft([Grant(seq, known=2, drafts=9, depth=9)]) == [root(4)]
    assert drafter.num_kept == 0


class Failing:
    """A constraint whose backend has failed."""

    def prune(self, tree: DraftTree) -> DraftTree:
        raise ConstraintError("the grammar failed")

    def mask(self, tree: DraftTree, first_row: int, mask: TokenMask) -> None:
        raise ConstraintError("the grammar failed")

    def row(self, path: tuple[int, ...]) -> NDArray[np.int32]:
        raise ConstraintError("the grammar failed")

    def forced(self, path: tuple[int, ...] = ()) -> tuple[int, ...]:
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
