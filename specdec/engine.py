"""The loop: schedule, guess, verify, commit. Knows trees, spans and picks; no HTTP, no files, no model family."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specdec.batch import Batch
from specdec.config import EngineConfig
from specdec.drafting import Drafting
from specdec.drawing import Drawing, Drawn
from specdec.errors import (
    ConfigError,
    ConstraintError,
    ContextTooLong,
    DeadEnd,
    InvalidRequest,
    NumericalError,
    QueueFull,
    SpecdecError,
)
from specdec.free import FREE_TEXT
from specdec.mask import TokenMask
from specdec.metrics import Metrics
from specdec.policy import Policy
from specdec.protocols import Drafter, Runner
from specdec.request import PREDICTION, Request, Stopping
from specdec.sampling import Picks
from specdec.scheduler import Scheduler
from specdec.sequence import Emission, Grant, Logprob, Sequence, Span
from specdec.text import Detokenizer
from specdec.tree import DraftTree

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Walk:
    """The path on which guesser and target agree: accepted nodes, the tokens to emit, and how the text ends, if so."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    text: Detokenizer
    visible: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: SpecdecError | None = None

    @property
    def at_end(self) -> bool:
        """Whether an end token ended it, so that the text is whole."""
        return self.finish_reason == "stop" and self.stop_reason is None


class Engine:
    """Serves one target model. One thread calls `add`, `abort` and `step`, and never two of them at once.

    Without `drafters` every tree is its root. `end_tokens` is the model's whole list; `new_text` makes the detokeniser
    of a sequence. Without a `policy` every guess that fits is verified.
    """

    def __init__(
        self,
        runner: Runner,
        drafters: Seq[Drafter],
        config: EngineConfig,
        *,
        new_text: Callable[[Stopping], Detokenizer],
        end_tokens: Seq[int],
        policy: Policy | None = None,
    ) -> None:
        bad = [token for token in end_tokens if not 0 <= token < runner.vocab_size]
        if bad:
            raise ConfigError(f"end_tokens must be ids below {runner.vocab_size}, got {bad}")
        self.runner = runner
        self.config = config
        self.scheduler = Scheduler(config)
        self.policy = policy or Policy(config.max_rows)
        self.metrics = Metrics()
        # What never guesses needs not learn.
        self.drafting = Drafting(drafters if config.max_drafts else (), runner.vocab_size, self.metrics)
        self._drawing = Drawing()
        self._new_text = new_text
        self._end_tokens = frozenset(end_tokens)
        self._arrivals = 0
        self._sequences: dict[str, list[Sequence]] = {}

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work

    def add(self, request: Request, request_id: str) -> list[Sequence]:
        """Queue the `n` sequences of a request.

        Raises `InvalidRequest` for ids outside the vocabulary, a `request_id` in use, a drafter that does not run or a
        prediction that none reads, `ContextTooLong` for a prompt of `max_model_len` tokens or more, `QueueFull` when
        `max_waiting` sequences wait already.
        """
        self._check(request, request_id)
        seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
        room = self.config.max_model_len - len(request.prompt)
        grammar = request.grammar or FREE_TEXT
        sequences = []
        for index in range(request.n):
            self._arrivals += 1
            sequences.append(
                Sequence(
                    request_id,
                    index,
                    request,
                    seed if index == 0 else splitmix64(seed + index),
                    list(request.prompt),
                    grammar.start(),
                    self._new_text(request.stopping),
                    min(room, request.stopping.max_tokens or room),
                    self._end_tokens,
                    arrival=self._arrivals,
                )
            )
        self._sequences[request_id] = sequences
        for seq in sequences:
            self.scheduler.add(seq)
        return sequences

    def abort(self, request_id: str) -> list[Emission]:
        """End what is left of a request and free all it holds; an unknown or finished id has nothing left."""
        emissions = []
        for seq in self._sequences.pop(request_id, []):
            if not seq.finished:
                seq.finish_reason = "abort"
                self.scheduler.release(seq)
                self._forget([seq])
                self.metrics.count_finish("abort")
                emissions.append(Emission(seq, text=seq.text.close(), finish_reason="abort"))
        self._gauge()
        return emissions

    def step(self) -> list[Emission]:
        """One forward of the target over every known token and every guess; what it added to each sequence."""
        # Integers only: who runs, how many known rows, how many draft nodes.
        grants = self.policy.ask(self.scheduler.schedule())
        self._forget(self.scheduler.preempted)
        if not grants:
            return []
        failures: dict[int, SpecdecError] = {}  # of constraints, by place in the batch

        # Guess. Nothing is mutated until commit.
        trees = self._prune(self.drafting.draft(grants), grants, failures)
        spans = make_spans(grants, self.policy.trim(trees, grants))
        batch = Batch.build(spans, self.config.block_size)

        # Verify: an accelerator works from here, while the CPU fills masks.
        forward = self.runner.forward(batch, self.drafting.taps)
        mask = self._mask(spans, batch.num_logits, failures)
        picks = self._drawing.picks(forward.logits_LV, mask, spans)

        # Commit: keep the path on which guesser and target agree.
        walks = [walk(span, picks, failures.get(index)) for index, span in enumerate(spans)]
        self._move(spans, walks)
        emissions = [self._commit(span, agreed) for span, agreed in zip(spans, walks, strict=True)]
        # Learn before blocks are published: a published block holds the drafter's keys and values too.
        paths = [agreed.nodes for agreed in walks]
        self.policy.learn(spans, paths, [len(agreed.tokens) for agreed in walks])
        self.drafting.observe(spans, batch, forward.taps, paths)
        self._forget([span.seq for span in spans if span.seq.finished])
        self.scheduler.settle(spans)
        self.metrics.steps += 1
        self.metrics.preemptions += len(self.scheduler.preempted)
        self._gauge()
        return [emission for emission in emissions if emission.tokens or emission.finish_reason]

    # Guess

    def _prune(self, trees: Seq[DraftTree], grants: Seq[Grant], failures: dict[int, SpecdecError]) -> list[DraftTree]:
        """The trees without the nodes that the grammars forbid: no row is spent on them."""
        pruned = list(trees)
        for index, (tree, grant) in enumerate(zip(trees, grants, strict=True)):
            if tree.num_drafts:
                try:
                    pruned[index] = grant.seq.constraint.prune(tree)
                except SpecdecError as error:
                    failures[index] = error
                    pruned[index] = tree.keep([])
        return pruned

    # Verify

    def _mask(self, spans: Seq[Span], num_logits: int, failures: dict[int, SpecdecError]) -> TokenMask:
        mask = TokenMask(num_logits, self.runner.vocab_size)
        for index, span in enumerate(spans):
            if len(span.tree) and index not in failures:
                try:
                    span.seq.constraint.mask(span.tree, span.first_logit, mask)
                except SpecdecError as error:
                    failures[index] = error
        return mask

    # Commit

    def _move(self, spans: Seq[Span], walks: Seq[Walk]) -> None:
        """Compact the accepted KV rows to the slots of their positions; a chain's are there already. Finished sequences
        too: their blocks are published."""
        sources, targets = [], []
        for span, agreed in zip(spans, walks, strict=True):
            for depth, node in enumerate(agreed.nodes, 1):
                if node != depth:
                    sources.append(self._slot(span.seq, span.root_slot + node))
                    targets.append(self._slot(span.seq, span.root_slot + depth))
        if sources:
            self.runner.move(sources, targets)

    def _slot(self, seq: Sequence, index: int) -> int:
        block, offset = divmod(index, self.config.block_size)
        return seq.blocks[block] * self.config.block_size + offset

    def _commit(self, span: Span, agreed: Walk) -> Emission:
        """The one place where a sequence grows: tokens, num_computed, constraint, text and counters together."""
        seq = span.seq
        finish_reason, error = agreed.finish_reason, agreed.error
        if not agreed.tokens and finish_reason is None:  # the rows stopped short of the frontier
            seq.num_computed += span.known
            return Emission(seq)
        try:
            if finish_reason is None:
                seq.constraint.advance(agreed.tokens)
            elif agreed.at_end:
                seq.constraint.advance(agreed.tokens[:-1])
                seq.constraint.finish()
        except SpecdecError as failure:
            finish_reason, error = "error", failure
        visible = agreed.visible + (agreed.text.close() if finish_reason else "")
        first = seq.num_output == 0
        seq.tokens.extend(agreed.tokens)
        seq.num_computed = len(seq.tokens) - 1
        seq.text = agreed.text
        seq.followed.read(agreed.tokens)
        seq.logprobs.extend(agreed.logprobs)
        seq.finish_reason, seq.error = finish_reason, error
        self._count(span, agreed, first)
        if finish_reason:
            self._finish(seq, finish_reason)
        num_drafts, num_accepted = span.tree.num_drafts, len(agreed.nodes)
        return Emission(
            seq,
            agreed.tokens,
            visible,
            agreed.logprobs,
            num_drafts,
            num_accepted,
            finish_reason,
            agreed.stop_reason,
            error,
        )

    def _finish(self, seq: Sequence, reason: str) -> None:
        self.metrics.count_finish(reason)
        siblings = self._sequences.get(seq.request_id, [])
        if all(other.finished for other in siblings):
            self._sequences.pop(seq.request_id, None)

    def _forget(self, sequences: Seq[Sequence]) -> None:
        """After the last `observe`, or what the drafter learns there would stay for ever."""
        for seq in sequences:
            self.policy.forget(seq)
            self.drafting.forget(seq)

    # Counters

    def _count(self, span: Span, agreed: Walk, first: bool) -> None:
        seq, metrics = span.seq, self.metrics
        if first:
            metrics.prompt_tokens += seq.num_prompt
            metrics.cached_prompt_tokens += seq.num_cached
        metrics.generation_tokens += len(agreed.tokens)
        if agreed.tokens:
            sources = span.tree.sources
            for acceptance in (seq.acceptance, metrics.acceptance):
                acceptance.count(sources[1:], [sources[node] for node in agreed.nodes])
        match seq.error:
            case DeadEnd():
                metrics.dead_ends += 1
            case ConstraintError():
                metrics.constraint_errors += 1
            case NumericalError():
                metrics.numerical_errors += 1

    def _gauge(self) -> None:
        metrics, scheduler = self.metrics, self.scheduler
        metrics.running, metrics.waiting = len(scheduler.running), len(scheduler.waiting)
        metrics.kv_blocks_total = scheduler.pool.num_blocks - 1
        metrics.kv_blocks_used = metrics.kv_blocks_total - scheduler.pool.num_available

    # Admission

    def _check(self, request: Request, request_id: str) -> None:
        vocab_size = self.runner.vocab_size
        if request_id in self._sequences:
            raise InvalidRequest("request_id", f"{request_id!r} is in use")
        for name, tokens in (
            ("prompt", request.prompt),
            ("prediction", request.prediction),
            ("logit_bias", request.sampling.logit_bias),
            ("stop_token_ids", request.stopping.stop_token_ids),
        ):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise InvalidRequest(name, f"token {token} is not in the vocabulary of {vocab_size}")
        self._check_guesses(request)
        if len(request.prompt) >= self.config.max_model_len:
            raise ContextTooLong(
                "prompt",
                f"is {len(request.prompt)} tokens long, and the context of {self.config.max_model_len} "
                f"must leave room for at least one more",
            )
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            raise QueueFull(f"{len(self.scheduler.waiting)} sequences wait already (max_waiting)")

    def _check_guesses(self, request: Request) -> None:
        names = self.drafting.names
        for method in request.sampling.guesses.methods:
            if method not in names:
                raise InvalidRequest(
                    "speculative.method",
                    f"{method!r} is not a drafter that runs here; there are {', '.join(names) or 'none'}",
                )
        if request.prediction and PREDICTION not in names:
            raise InvalidRequest(
                "prediction",
                "is of no use here: no drafter of this engine reads predictions",
                code="unsupported_parameter",
            )


def make_spans(grants: Seq[Grant], trees: Seq[DraftTree]) -> list[Span]:
    """Place each grant and its tree in the rows and logits rows of one batch."""
    spans: list[Span] = []
    row = logit = 0
    for grant, tree in zip(grants, trees, strict=True):
        spans.append(Span(grant.seq, grant.known, tree, row, logit, grant.seq.num_computed + grant.known - 1))
        row += spans[-1].num_rows
        logit += len(tree)
    return spans


def walk(span: Span, picks: Picks | Drawn, failure: SpecdecError | None = None) -> Walk:
    """From the root to a child as long as the target's pick IS that child; the last pick is the bonus token.

    It ends with the text: nothing after an end token, a stop string or the last token allowed is looked at. A
    `failure` of the constraint, or a row where nothing can be picked, ends it with that error.
    """
    seq, tree = span.seq, span.tree
    if not len(tree):
        return Walk((), (), (), seq.text, "")
    nodes: list[int] = []
    tokens: list[int] = []
    logprobs: list[Logprob] = []
    text, visible = seq.text.fork(), ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    children = tree.children()
    node: int | None = 0
    while node is not None and finish_reason is None:
        try:
            if failure is not None:
                raise failure
            token, logprob = picks.at(span, node, tokens)
        except SpecdecError as error:
            return Walk(tuple(nodes), tuple(tokens), tuple(logprobs), text, visible, "error", None, error)
        tokens.append(token)
        if logprob is not None:
            logprobs.append(logprob)
        node = next((child for child in children[node] if tree.tokens[child] == token), None)
        if node is not None:
            nodes.append(node)
        text, shown, finish_reason, stop_reason = _show(seq, text, token, seq.num_output + len(tokens))
        visible += shown
    return Walk(tuple(nodes), tuple(tokens), tuple(logprobs), text, visible, finish_reason, stop_reason)


def _show(
    seq: Sequence, text: Detokenizer, token: int, num_output: int
) -> tuple[Detokenizer, str, str | None, str | int | None]:
    """Push one token: the text, what became visible, and whether that ends it. Stop string > stop token > length."""
    stopping = seq.request.stopping
    is_end = token in seq.ending
    is_stop = is_end or token in stopping.stop_token_ids
    pushed = text.fork() if is_stop and not stopping.include_stop else text
    shown = pushed.push(token)
    if pushed.matched is not None:
        return pushed, shown, "stop", pushed.matched
    if is_stop:
        return text, shown if pushed is text else "", "stop", None if is_end else token
    return text, shown, "length" if num_output >= seq.max_tokens else None, None


def splitmix64(state: int) -> int:
    """One output of the SplitMix64 generator (Steele, Lea, Flood, OOPSLA 2014) from a state, modulo 2**64."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31
