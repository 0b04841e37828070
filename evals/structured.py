"""Whether a grammar means what its schema says: known instances are replayed token by token, and random texts walked
under the mask are judged by the schema itself. Knows no model: nothing here is likely text, all of it is possible text.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from os.path import commonpath
from typing import Any

import jsonschema_rs
import numpy as np
from numpy.typing import NDArray

from specdec.errors import ConstraintError, InvalidRequest
from specdec.evals.cases import SUITE_URL, Case, Instance, parse, write
from specdec.evals.closing import Closing
from specdec.evals.orders import Orders, ranks
from specdec.evals.second_opinion import SecondOpinion
from specdec.evals.vocabulary import EvalVocabulary
from specdec.grammar.spec import Formats, JsonSchema, PropertyOrder, Whitespace
from specdec.grammar.validated import problem
from specdec.grammar.walk import has
from specdec.mask import TokenMask, bits
from specdec.protocols import Constraint, Grammar
from specdec.tree import chain, merge, root

STRUCTURAL = frozenset(b'{}[]:,"')
MAX_ORDERS, MAX_ORDER_BYTES = 300, 100_000  # of the keys of one valid instance; a tenth for an invalid one
WALK_TOKENS = 64  # beside four times those of the shortest instance
TREES_A_SCHEMA, DRAFTS, DRAFT_DEPTH = 2, 16, 8  # a tree is made of 16 texts of 8 tokens, cut to its 63 rows


@dataclass(frozen=True, slots=True)
class Settings:
    """How to evaluate. `walks` random texts a schema; `property_order` is what the grammar allows, `any_order` tries
    other orders of an instance's keys before it counts as rejected, and before an invalid one counts as refused."""

    formats: Formats = "assert"
    whitespace: Whitespace = "flexible"
    any_order: bool = False
    walks: int = 20
    seed: int = 0
    property_order: PropertyOrder = "schema"


@dataclass(slots=True)
class Times:
    """Thread CPU time of everything measured."""

    compile_ms: list[float] = field(default_factory=list)
    first_mask_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    tree_us: list[float] = field(default_factory=list)
    tree_rows: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Counts:
    """The counters of a report, by its keys."""

    tests: int = 0
    right: int = 0
    accepted_invalid: int = 0
    rejected_valid: int = 0
    refused: int = 0
    unsatisfiable: int = 0
    schemas: int = 0
    compiled: int = 0
    walks: int = 0
    walks_valid: int = 0
    walks_dead_end: int = 0
    walks_long: int = 0
    walks_unfinished: int = 0
    walks_invalid: int = 0


@dataclass(frozen=True, slots=True)
class Replay:
    """How far a text came, over which tokens: `place` is the byte that could not follow, the length where the end could
    not; None where all of it and the end were allowed."""

    place: int | None
    reason: str = ""
    tokens: tuple[int, ...] = ()


Compile = Callable[[str], Grammar]


def measure(
    cases: Sequence[Case],
    vocabulary: EvalVocabulary,
    compile_schema: Compile,
    settings: Settings,
    remotes: Mapping[str, Any] | None = None,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The report of all cases. `compile_schema` makes the grammar of a schema's text, or raises `InvalidRequest`.

    `tests` = right + accepted_invalid + rejected_valid + refused; `unsatisfiable` counts schemas that were refused
    because nothing satisfies them: right where no test is valid. `walks_long` are random texts that had not come to an
    end within their length, whatever became of them then (`long` says of which schemas). Cases that refer to a document
    of the official suite that is not among `remotes` are counted apart, in `missing_remotes`.
    """
    run = _Run(vocabulary, compile_schema, settings, remotes or {})
    for number, case in enumerate(cases):
        run.case(case)
        progress(number + 1, len(cases))
    return run.report()


class _Run:
    def __init__(
        self, vocabulary: EvalVocabulary, compile_schema: Compile, settings: Settings, remotes: Mapping[str, Any]
    ) -> None:
        self._vocabulary = vocabulary
        self._compile = compile_schema
        self._settings = settings
        self._remotes = remotes
        self._walker = Walker(vocabulary)
        self._second = SecondOpinion.find(remotes, assert_formats=settings.formats == "assert")
        self._counts = Counts()
        self._times = Times()
        self._failing: list[dict[str, str]] = []
        self._long: list[dict[str, Any]] = []
        self._missing: list[Case] = []
        self._excused = Counter[tuple[str, str]]()

    def case(self, case: Case) -> None:
        if missing_remote(parse(case.schema), self._remotes):
            self._missing.append(case)
            return
        counts = self._counts
        counts.schemas += 1
        counts.tests += len(case.tests)
        started = time.thread_time_ns()
        try:
            grammar = self._compile(case.schema)
        except InvalidRequest as refusal:
            self._refused(case, refusal)
            return
        self._times.compile_ms.append((time.thread_time_ns() - started) / 1e6)
        counts.compiled += 1
        first = list[float]()
        row_of(grammar.start(), self._vocabulary.size, first)
        self._times.first_mask_ms.append(first[0] / 1e3)
        lengths = [self._test(case, instance, grammar) for instance in case.tests]
        shortest = min((length for length in lengths if length is not None), default=0)
        if self._settings.walks:
            self._walks(case, grammar, 4 * shortest + WALK_TOKENS)

    def report(self) -> dict[str, Any]:
        counts, times = self._counts, self._times
        found: dict[str, Any] = {name: getattr(counts, name) for name in Counts.__slots__}
        found["compile_ms"] = spread(times.compile_ms)
        found["mask_us"] = spread(times.mask_us)
        found["failing"] = self._failing
        found["long"] = self._long
        found["first_mask_ms"] = spread(times.first_mask_ms)
        found["tree_us"] = spread(times.tree_us)
        found["tree_rows"] = spread(times.tree_rows)
        found["missing_remotes"] = {
            "tests": sum(len(case.tests) for case in self._missing),
            "ids": [case.id for case in self._missing],
        }
        found["second_opinion"] = {
            "by": None if self._second is None else self._second.name,
            "excused": [
                {"id": case, "reason": reason, "walks": walks} for (case, reason), walks in self._excused.items()
            ],
        }
        return found

    def _refused(self, case: Case, refusal: InvalidRequest) -> None:
        counts = self._counts
        unsatisfiable = refusal.code == "unsatisfiable"
        counts.unsatisfiable += unsatisfiable
        if unsatisfiable and not any(instance.valid for instance in case.tests):
            counts.right += len(case.tests)
            return
        counts.refused += len(case.tests)
        self._fail(case.id, "refused", f"{refusal.code}: {refusal.message}")

    def _test(self, case: Case, instance: Instance, grammar: Grammar) -> int | None:
        """Replay one instance; the number of its tokens if it is valid."""
        counts = self._counts
        text = self._written(instance)
        replay = self._replay(grammar, text)
        if replay.place is not None and self._settings.any_order:
            effort = 1.0 if instance.valid else 0.1
            replay = self._other_orders(case, text, grammar, replay, int(effort * MAX_ORDERS), effort * MAX_ORDER_BYTES)
        name = f"{case.id}/{instance.name}"
        if (replay.place is None) == instance.valid:
            counts.right += 1
        elif instance.valid:
            counts.rejected_valid += 1
            self._fail(name, "rejected_valid", replay.reason)
        else:
            counts.accepted_invalid += 1
            self._fail(name, "accepted_invalid", text[:200])
        try:
            return len(self._vocabulary.encode(text)) if instance.valid else None
        except ValueError:
            return None

    def _written(self, instance: Instance) -> str:
        """How an instance is written."""
        spelling = self._vocabulary.spelling
        return spelling.respelled(write(instance.value)) if instance.text is None else instance.text

    def _other_orders(
        self, case: Case, text: str, grammar: Grammar, replay: Replay, max_orders: int, max_bytes: float
    ) -> Replay:
        """The first order of the keys that passes, or the replay as it was. Texts that are not compact stay as they
        are."""
        try:
            value = parse(text)
        except ValueError:
            return replay
        if write(value) != text:  # its spelling is what the test is about
            return replay
        orders = Orders(value, ranks(json.loads(case.schema)))
        refused_at: int | None = None
        found = replay
        for _ in range(min(max_orders, int(max_bytes / len(text)))):
            other = orders.next(refused_at)
            if other is None:
                break
            found = self._replay(grammar, other, self._shared(found, text, other))
            text = other
            if found.place is None:
                return found
            refused_at = len(other.encode()[: found.place + self._vocabulary.longest].decode(errors="ignore"))
        return replay

    def _replay(self, grammar: Grammar, text: str, start: Sequence[int] = ()) -> Replay:
        return replay_text(grammar, text, self._vocabulary, self._times, start)

    def _shared(self, before: Replay, text: str, other: str) -> list[int]:
        """The tokens of a replay of `text` that `other` begins with too."""
        left = len(commonpath([text.encode(), other.encode()]))
        tokens = list[int]()
        for token in before.tokens:
            left -= len(self._vocabulary.tokenizer.token_bytes(token))
            if left < 0:
                break
            tokens.append(token)
        return tokens

    def _walks(self, case: Case, grammar: Grammar, budget: int) -> None:
        counts, settings = self._counts, self._settings
        judge = validator(case.schema, self._remotes, settings.formats)
        known = [self._written(instance).encode() for instance in case.tests if instance.valid]
        unfinished, long = 0, 0
        for number in range(settings.walks):
            rng = random.Random(f"{settings.seed} {case.id} {number}")
            tokens, outcome, reason = self._walker.walk(grammar, rng, budget, self._times)
            counts.walks += 1
            if outcome == "unfinished":
                counts.walks_long += 1
                long += 1
                more, outcome, reason = self._walker.close(grammar, rng, budget, self._times, tokens, known)
                tokens += more
            if outcome == "finished":
                data = b"".join(map(self._vocabulary.tokenizer.token_bytes, tokens))
                wrong = self._problem(case, data, judge)
                outcome, reason = ("valid", "") if wrong is None else ("invalid", wrong)
            match outcome:
                case "valid":
                    counts.walks_valid += 1
                case "unfinished":
                    counts.walks_unfinished += 1
                    unfinished += 1
                case "dead_end":
                    counts.walks_dead_end += 1
                    self._fail(f"{case.id}/walk {number}", "walk_dead_end", reason)
                case "invalid":
                    counts.walks_invalid += 1
                    self._fail(f"{case.id}/walk {number}", "walk_invalid", reason)
        if long:
            self._long.append({"id": case.id, "walks": long})
        if unfinished:
            reason = f"{unfinished} of {settings.walks} walks, {budget} tokens each and {budget} to close"
            self._fail(case.id, "walk_unfinished", reason)
        self._trees(case, grammar)

    def _problem(self, case: Case, data: bytes, judge: jsonschema_rs.Validator) -> str | None:
        """What is wrong with a finished text, or None."""
        wrong = problem(data, judge)
        text = data[:200].decode(errors="replace")
        if wrong is not None:
            return f"{text} is not valid: {wrong}"
        if self._second is None:
            return None
        disagrees, excuse = self._second.problem(case.schema, data.decode())
        if excuse is not None:
            self._excused[case.id, excuse] += 1
        return None if disagrees is None else f"{text} is not valid for {self._second.name}: {disagrees}"

    def _trees(self, case: Case, grammar: Grammar) -> None:
        """Time whole trees, pruned and masked: drafts are random texts that go on from the middle of one."""
        for number in range(TREES_A_SCHEMA):
            rng = random.Random(f"{self._settings.seed} {case.id} tree {number}")
            tokens, _, _ = self._walker.walk(grammar, rng, WALK_TOKENS, Times())
            start = tokens[: rng.randrange(len(tokens) + 1)]
            drafts = [self._walker.walk(grammar, rng, DRAFT_DEPTH, Times(), start)[0] for _ in range(DRAFTS)]
            tree = merge([chain(0, draft, "random") for draft in drafts])
            constraint = grammar.start()
            constraint.advance(start)
            started = time.thread_time_ns()
            kept = constraint.prune(tree)
            constraint.mask(kept, 0, TokenMask(len(kept), self._vocabulary.size))
            self._times.tree_us.append((time.thread_time_ns() - started) / 1e3)
            self._times.tree_rows.append(len(kept))

    def _fail(self, test: str, outcome: str, reason: str) -> None:
        self._failing.append({"id": test, "outcome": outcome, "reason": reason})


class Walker:
    """Writes random texts under the mask: half of the draws among the tokens that hold a byte of JSON's own syntax,
    where one is allowed, half among all. The end of the text is one of both."""

    def __init__(self, vocabulary: EvalVocabulary) -> None:
        self._vocabulary = vocabulary
        self._spelled = vocabulary.tokenizer.token_bytes_table()[: vocabulary.size]
        structural = np.zeros((vocabulary.size + 31) // 32 * 32, np.bool_)
        for token, spelled in enumerate(self._spelled):
            structural[token] = not STRUCTURAL.isdisjoint(spelled)
        structural[vocabulary.end_ids[0]] = True
        # Several end tokens mean the same; the first stands for all.
        drawable = np.ones_like(structural)
        drawable[list(vocabulary.end_ids[1:])] = False
        self._structural_W = np.packbits(structural & drawable, bitorder="little").view(np.int32)
        self._drawable_W = np.packbits(drawable, bitorder="little").view(np.int32)

    def walk(
        self, grammar: Grammar, rng: random.Random, budget: int, times: Times, start: Sequence[int] = ()
    ) -> tuple[list[int], str, str]:
        """Up to `budget` tokens after `start`, with "finished", "unfinished" or "dead_end", and why that."""
        return self._write(grammar, rng, budget, times, start, lambda allowed_W: self._draw(allowed_W, rng))

    def close(
        self,
        grammar: Grammar,
        rng: random.Random,
        budget: int,
        times: Times,
        start: Sequence[int],
        known: Sequence[bytes],
    ) -> tuple[list[int], str, str]:
        """As `walk`, but for a text that is to end, drawn by `Closing`; `known` are texts that are right."""
        closing = Closing(self._spelled, self._vocabulary.ids, self._vocabulary.end_ids[0], known, start)
        return self._write(grammar, rng, budget, times, start, lambda allowed_W: closing.draw(allowed_W, rng))

    def _write(
        self,
        grammar: Grammar,
        rng: random.Random,
        budget: int,
        times: Times,
        start: Sequence[int],
        draw: Callable[[NDArray[np.int32]], int],
    ) -> tuple[list[int], str, str]:
        constraint, tokens = grammar.start(), list[int]()
        try:
            constraint.advance(start)
            for _ in range(budget + 1):
                allowed_W = row_of(constraint, self._vocabulary.size, times.mask_us) & self._drawable_W
                if not allowed_W.any():
                    return tokens, "dead_end", f"nothing may follow {self._text([*start, *tokens])!r}"
                if len(tokens) == budget:
                    break
                token = draw(allowed_W)
                if token == self._vocabulary.end_ids[0]:
                    return tokens, "finished", ""
                constraint.advance([token])
                tokens.append(token)
        except ConstraintError as error:
            return tokens, "dead_end", f"after {self._text([*start, *tokens])!r}: {error}"
        may_end = has(allowed_W, self._vocabulary.end_ids[0]) and allowed_W.any()
        only_end = may_end and len(np.flatnonzero(bits(allowed_W, self._vocabulary.size))) == 1
        return tokens, "finished" if only_end else "unfinished", ""

    def _draw(self, allowed_W: NDArray[np.int32], rng: random.Random) -> int:
        if rng.random() < 0.5:
            structural_W = allowed_W & self._structural_W
            if structural_W.any():
                allowed_W = structural_W
        return int(rng.choice(np.flatnonzero(bits(allowed_W, self._vocabulary.size))))

    def _text(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._vocabulary.tokenizer.token_bytes, tokens))[-200:]


def replay_text(
    grammar: Grammar, text: str, vocabulary: EvalVocabulary, times: Times, start: Sequence[int] = ()
) -> Replay:
    """Follow `text` from the beginning, and end it. The tokenizer's own tokens are taken where the mask allows them,
    else the longest allowed that spells what comes: a text is a text whatever its tokens. `start` are tokens that it
    begins with and that are known to be allowed."""
    data, spelled = text.encode(), vocabulary.tokenizer.token_bytes
    try:
        own = vocabulary.encode(text)
    except ValueError as error:
        return Replay(0, str(error))
    own_at = dict(zip(accumulate((len(spelled(token)) for token in own), initial=0), own, strict=False))
    constraint, tokens = grammar.start(), list(start)
    place = sum(len(spelled(token)) for token in start)
    try:
        constraint.advance(start)
        while True:
            row_W = row_of(constraint, vocabulary.size, times.mask_us)
            if place == len(data):
                break
            token = _next(row_W, data, place, own_at.get(place), vocabulary)
            if token is None:
                reason = f"{data[place : place + 20]!r} cannot follow {data[max(0, place - 60) : place]!r}"
                return Replay(place, reason, tuple(tokens))
            constraint.advance([token])
            tokens.append(token)
            place += len(spelled(token))
    except ConstraintError as error:
        return Replay(place, f"after {data[max(0, place - 60) : place]!r}: {error}", tuple(tokens))
    if len({has(row_W, end) for end in vocabulary.end_ids}) > 1:
        return Replay(place, "only some of the end tokens are allowed", tuple(tokens))
    if not has(row_W, vocabulary.end_ids[0]):
        return Replay(place, f"cannot end after {data[-60:]!r}", tuple(tokens))
    return Replay(None, "", tuple(tokens))


def _next(row_W: NDArray[np.int32], data: bytes, place: int, own: int | None, vocabulary: EvalVocabulary) -> int | None:
    """An allowed token that spells what stands at `place`: `own` if it can be."""
    if own is not None and has(row_W, own):
        return own
    for length in range(min(vocabulary.longest, len(data) - place), 0, -1):
        token = vocabulary.ids.get(data[place : place + length])
        if token is not None and has(row_W, token):
            return token
    return None


def row_of(constraint: Constraint, vocab_size: int, times: list[float]) -> NDArray[np.int32]:
    """`[W]`: what may come next; the microseconds it took to make the row are added to `times`."""
    mask, tree = TokenMask(1, vocab_size), root(0)
    started = time.thread_time_ns()
    constraint.mask(tree, 0, mask)
    times.append((time.thread_time_ns() - started) / 1e3)
    words_W = mask.words(0)
    assert words_W is not None, "a grammar masks its row"
    return words_W


def schema_compiler(vocabulary: EvalVocabulary, settings: Settings, remotes: Mapping[str, Any]) -> Compile:
    """What a server does with a schema, for `measure`."""
    compiler = vocabulary.compiler(remotes)
    return lambda schema: compiler.compile(
        JsonSchema(schema, settings.whitespace, settings.formats, settings.property_order)
    )


def validator(schema: str, remotes: Mapping[str, Any], formats: Formats) -> jsonschema_rs.Validator:
    """What the schema itself says of an instance, by jsonschema-rs; documents come from `remotes` only."""
    return jsonschema_rs.validator_for(
        json.loads(schema),
        validate_formats=formats == "assert",
        registry=jsonschema_rs.Registry(list(remotes.items()), retriever=_retrieve),
        retriever=_retrieve,
    )


def missing_remote(schema: Any, remotes: Mapping[str, Any]) -> bool:
    """Whether a schema refers to a document of the official suite that is not there."""
    text = write(schema)
    if SUITE_URL not in text:
        return False
    try:
        validator(text, remotes, "annotate")
    except jsonschema_rs.ReferencingError:
        return True
    except jsonschema_rs.ValidationError as error:
        return SUITE_URL in error.message
    return False


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median, 99th percentile and maximum; None where nothing was measured."""
    if not values:
        return {"p50": None, "p99": None, "max": None}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3), "max": round(max(values), 3)}


def _retrieve(address: str) -> Any:
    raise LookupError(f"{address} is not among the documents that were given")
