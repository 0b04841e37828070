"""Whole texts are the same where all rows of a step are drawn at once, as on a GPU: by the references under many
configs, by Triton's kernels in the interpreter on a tiny model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import nullcontext

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.config import EngineConfig
from specdec.drawing import Drawing
from specdec.engine import Engine
from specdec.errors import ConstraintError, SpecdecError
from specdec.grammar.spec import JsonSchema, Regex
from specdec.kernels.device import interpreted
from specdec.mask import TokenMask
from specdec.protocols import Drafter
from specdec.request import Request, Sampling, Stopping
from specdec.sequence import Emission
from specdec.tree import DraftTree, chain, root
from tests.drafters_for_tests import OracleDrafter, RandomDrafter
from tests.engine import test_loop as loop
from tests.fakes import Automaton, hash_engine, run, texts
from tests.grammar.small_tokenizer import END_IDS, VOCAB_SIZE, compiler, encode
from tests.masks import allow
from tests.tiny import tiny_engine


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows are drawn at once on the CPU, by the references."""
    monkeypatch.setattr(Drawing, "picks", Drawing.drawn)
    yield


def check_alike(found: loop.Emissions, expected: loop.Emissions) -> None:
    """Equal tokens, texts, ends and errors; log-probabilities to 1e-5."""
    assert texts(found) == texts(expected)
    for key, parts in expected.items():
        assert str(found[key][-1].error) == str(parts[-1].error)
        got, wanted = ([one for part in run_ for one in part.logprobs] for run_ in (found[key], parts))
        for one, other in zip(got, wanted, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-5)


@functools.cache
def one_by_one() -> loop.Emissions:
    """What the mixed requests say without drafts, in the plainest config."""
    assert Drawing.picks is not Drawing.drawn
    return run(hash_engine(loop.PLAIN), loop.mixed_requests())


@pytest.fixture
def expected() -> loop.Emissions:
    """Before `at_once`: a fixture that comes first in a test's arguments is made first."""
    return one_by_one()


@pytest.mark.parametrize(
    "drafter, config",
    [("none", "plain"), ("random", "small pool"), ("oracle", "plain"), ("oracle", "full trees"), ("oracle", "chunks")],
)
def test_texts_are_the_same_under_any_config(
    expected: loop.Emissions, at_once: None, drafter: str, config: str
) -> None:
    requests = loop.mixed_requests()
    told = {requests[int(name[1:])].prompt: tokens_of(parts) for (name, index), parts in expected.items() if not index}
    drafters: dict[str, list[Drafter]] = {
        "none": [],
        "random": [RandomDrafter(3, loop.VOCAB_SIZE)],
        "oracle": [OracleDrafter(told, loop.VOCAB_SIZE, mistake_rate=0.2, branch_rate=0.5)],
    }
    check_alike(run(hash_engine(loop.CONFIGS[config], *drafters[drafter]), requests), expected)


def tokens_of(parts: list[Emission]) -> tuple[int, ...]:
    """All tokens of a sequence."""
    return tuple(token for part in parts for token in part.tokens)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    "law",
    [
        loop.test_a_dead_end_counts_only_where_the_text_goes,
        loop.test_logits_that_are_not_numbers_end_one_request_where_it_goes_there,
        functools.partial(
            loop.test_what_the_grammar_leaves_no_choice_about_comes_before_bans,
            Stopping(ignore_eos=True, min_tokens=9, include_stop=True),
            ((5, 6, 0), "fga", "stop", None),
        ),
    ],
    ids=["dead end", "numbers", "completion"],
)
def test_errors_and_bans_are_those_of_rows_drawn_one_by_one(
    at_once: None, law: Callable[..., None], drafts: bool
) -> None:
    law(drafts=drafts)


def test_a_grammar_that_may_go_on_does_so_until_min_tokens(at_once: None) -> None:
    loop.test_a_grammar_that_may_go_on_does_so_until_min_tokens()


class Late:
    """A grammar of all letters whose rows are worked out late, and fail behind token 5."""

    def __init__(self) -> None:
        self.inner = Automaton({0: dict.fromkeys(range(1, loop.VOCAB_SIZE), 0)}, {0: [0]}).start()
        self.text: list[int] = []
        self.prune, self.row = self.inner.prune, self.inner.row
        self.forced, self.finish = self.inner.forced, self.inner.finish

    def start(self) -> Late:
        """A constraint at the beginning of the text."""
        return Late()

    def mask(self, tree: DraftTree, first_row: int, mask: TokenMask) -> None:
        """See `Constraint.mask`."""
        for node in range(len(tree)):
            path = [*self.text, *(tree.tokens[place] for place in tree.path(node))]
            mask.fill_later(first_row + node, functools.partial(self._words, path, mask.num_words))

    def advance(self, tokens: Seq[int]) -> None:
        """See `Constraint.advance`."""
        self.text += tokens

    def _words(self, path: list[int], num_words: int) -> NDArray[np.int32]:
        if 5 in path:
            raise ConstraintError(f"nothing is known behind 5 after {len(path)} tokens")
        words_W = np.zeros(num_words, np.int32)
        allow(words_W, range(loop.VOCAB_SIZE))
        return words_W


@pytest.mark.parametrize("way", ["one by one", "at once", "kernels"])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_row_that_cannot_be_filled_ends_the_text_that_goes_there_and_no_other(
    way: str, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all rows are filled at once, so is the failing one, though the walk may never come to it."""
    if way == "at once":
        monkeypatch.setattr(Drawing, "picks", Drawing.drawn)
    if way == "kernels":
        pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")
    propose = chain if drafts else lambda token, tokens, source: root(token)
    drafter = loop.Proposer(lambda grant: propose(grant.seq.tokens[-1], [5], "x"))
    stopping = Stopping(max_tokens=4, ignore_eos=True)
    avoids, walks_in = (
        Request((1,), Sampling(temperature=0.0, logit_bias={5: bias}), stopping, Late()) for bias in (-100.0, 100.0)
    )
    free = Request((1,), Sampling(temperature=0.0), stopping)
    with interpreted() if way == "kernels" else nullcontext():
        emissions = run(engine := hash_engine(loop.PLAIN, drafter), [walks_in, avoids, free])
    shown = texts(emissions)
    assert shown["r0", 0].tokens == (5,)
    last = emissions["r0", 0][-1]
    assert isinstance(last.error, SpecdecError)
    assert str(last.error) == "nothing is known behind 5 after 1 tokens"
    assert shown["r1", 0].finish_reason == shown["r2", 0].finish_reason == "length"
    assert engine.metrics.constraint_errors == engine.metrics.finished["error"] == 1
    loop.assert_empty(engine)


TOKEN_BYTES = [bytes([97 + token % 26]) for token in range(VOCAB_SIZE)]
MAX_MODEL_LEN = 48


def tiny_requests() -> list[Request]:
    """Prompts that do not fit the small pool together: free and constrained, one with three choices."""
    text = encode("the quick brown fox jumps over the lazy dog, twice, " * 3)[:30]
    schema = JsonSchema({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]})
    few = Stopping(max_tokens=5)
    return [
        Request((3, *text), Sampling(temperature=0.8, seed=3, logprobs=3), few, n=3),
        Request((4, *text), Sampling(seed=4), few, compiler().compile(Regex("(the |quick |[a-f]+,)+"))),
        Request(
            (5, *text),
            Sampling(top_k=9, seed=5, presence_penalty=0.7, repetition_penalty=1.3, logit_bias={9: -3.0}),
            Stopping(max_tokens=4, min_tokens=2),
            compiler().compile(schema),
        ),
    ]


def test_texts_of_a_model_are_the_same_by_the_kernels_with_trees_grammars_choices_and_preemption() -> None:
    pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")
    asked = tiny_requests()

    def engine_of(*drafters: Drafter) -> Engine:
        config = EngineConfig(MAX_MODEL_LEN, MAX_MODEL_LEN + 64, block_size=8, max_drafts=3)
        return tiny_engine("llama", drafters, config, token_bytes=TOKEN_BYTES, end_tokens=END_IDS)

    expected = run(engine_of(), asked)
    told = {asked[int(name[1:])].prompt: tokens_of(parts) for (name, index), parts in expected.items() if not index}
    engine = engine_of(OracleDrafter(told, VOCAB_SIZE, mistake_rate=0.1, branch_rate=0.3))
    with interpreted():
        found = run(engine, asked)
    check_alike(found, expected)
    assert engine.metrics.preemptions > 0
    assert engine.metrics.acceptance.accepted_tokens > 3
