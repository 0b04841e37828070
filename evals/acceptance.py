"""How far a drafter is right, what that is worth in time, and whether the text stays the same. Prints nothing.

Definitions. Tokens per forward: tokens emitted (an end token included, nothing after it) over target forwards that drew
one, pooled over requests; 1.0 without drafts. Acceptance at a position: draws that accepted a draft of depth i + 1 over
draws with any draft, as vLLM counts it. Speeds are decoding only: the step that ends the prompt is not in them. Cost
ratio: what the forwards cost by the table that the policy goes by, over what root-only forwards would have cost for the
same tokens; a number without noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from specdec.errors import InvalidRequest
from specdec.evals.exactness import Difference, difference
from specdec.evals.prompts import EvalPrompt, categories
from specdec.evals.runs import Pair, watch_pair
from specdec.llm import LLM
from specdec.metrics import Acceptance
from specdec.request import Sampling, Stopping

MIN_LOOP = 32  # tokens that repeat what came one period before


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prompt answered with and without drafts. `loops`: the text goes in circles, and flatters the drafter."""

    prompt: EvalPrompt
    pair: Pair
    difference: Difference | None
    loops: bool


def measure(
    llm: LLM,
    prompts: Seq[EvalPrompt],
    sampling: Sampling,
    stopping: Stopping,
    *,
    repeats: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Answer every prompt root-only and with drafts, in turns, on one engine; `progress(done, total)` counts prompts.

    Raises `InvalidRequest`, naming the prompt, for one that does not fit the model.
    """
    outcomes = []
    for done, prompt in enumerate(prompts, 1):
        try:
            ids = llm.chat_prompt(prompt.messages)
            request = llm.request(ids, sampling, stopping, constraint=prompt.constraint)
            pair = watch_pair(llm.loaded.engine, request, repeats=repeats)
        except InvalidRequest as error:
            raise InvalidRequest(f"{prompt.id}: {error.param}", error.message, code=error.code) from error
        parted = difference(llm.loaded.engine, pair.plain.seq, pair.drafted.tokens)
        outcomes.append(Outcome(prompt, pair, parted, loops(pair.plain.tokens)))
        if progress is not None:
            progress(done, len(prompts))
    return outcomes


def summary(outcomes: Seq[Outcome]) -> dict[str, Any]:
    """Pooled numbers of some outcomes, as JSON values; ratios are None where there is nothing to divide by."""
    drafted = Acceptance.total(outcome.pair.drafted.acceptance for outcome in outcomes)
    tokens = sum(len(outcome.pair.drafted.tokens) for outcome in outcomes)
    plain_speed = _ratio(
        sum(outcome.pair.plain.num_decoded for outcome in outcomes),
        sum(outcome.pair.plain_seconds for outcome in outcomes),
    )
    drafted_speed = _ratio(
        sum(outcome.pair.drafted.num_decoded for outcome in outcomes),
        sum(outcome.pair.drafted_seconds for outcome in outcomes),
    )
    return {
        "requests": len(outcomes),
        "equal_texts": sum(outcome.difference is None for outcome in outcomes),
        "tokens": tokens,
        "tokens_per_forward": _ratio(tokens, drafted.draws),
        "acceptance_length": _ratio(drafted.drafts + drafted.accepted_tokens, drafted.drafts),
        "acceptance_rate": _ratio(drafted.accepted_tokens, drafted.draft_tokens),
        "accepted_per_position": [accepted / drafted.drafts for accepted in drafted.accepted_per_depth],
        "tokens_per_second": drafted_speed,
        "plain_tokens_per_second": plain_speed,
        "speedup": _ratio(drafted_speed or 0.0, plain_speed or 0.0),
        "cost_ratio": _ratio(
            sum(outcome.pair.drafted.cost for outcome in outcomes),
            sum(outcome.pair.drafted.plain_cost for outcome in outcomes),
        ),
    }


def report(outcomes: Seq[Outcome]) -> dict[str, Any]:
    """All of it as JSON values: pooled, by category, without the prompts whose texts loop, and prompt by prompt."""
    prompts = [outcome.prompt for outcome in outcomes]
    straight = [outcome for outcome in outcomes if not outcome.loops]
    return {
        **summary(outcomes),
        "first_differences": [
            {"id": outcome.prompt.id, **_difference(outcome.difference)}
            for outcome in outcomes
            if outcome.difference is not None
        ],
        "categories": {
            category: summary([outcome for outcome in outcomes if outcome.prompt.category == category])
            for category in categories(prompts)
        },
        "looping": [outcome.prompt.id for outcome in outcomes if outcome.loops],
        "without_looping": summary(straight),
        "prompts": [_prompt(outcome) for outcome in outcomes],
    }


def loops(tokens: Seq[int]) -> bool:
    """Whether some stretch repeats what came one period before for two more periods and at least `MIN_LOOP` tokens."""
    for period in range(1, len(tokens) // 3 + 1):
        run = 0
        for one, other in zip(tokens, tokens[period:], strict=False):
            run = run + 1 if one == other else 0
            if run >= max(2 * period, MIN_LOOP):
                return True
    return False


def _prompt(outcome: Outcome) -> dict[str, Any]:
    plain, drafted = outcome.pair.plain, outcome.pair.drafted
    error = drafted.error or plain.error
    return {
        "id": outcome.prompt.id,
        "category": outcome.prompt.category,
        **summary([outcome]),
        "prompt_tokens": plain.seq.num_prompt,
        "finish_reason": drafted.seq.finish_reason,
        "error": None if error is None else str(error),
        "loops": outcome.loops,
        "first_difference": None if outcome.difference is None else _difference(outcome.difference),
        "text": drafted.text,
    }


def _difference(found: Difference) -> dict[str, Any]:
    return {
        "index": found.index,
        "gap": found.gap if math.isfinite(found.gap) else None,
        "filtered": found.filtered,
    }


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
