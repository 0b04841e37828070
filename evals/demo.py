"""What `specdec demo` shows: a record corrected under its schema, and an ordinary prompt, both with and without drafts.

The record is asked of the model like anything else; nothing here knows what the answer will be.
"""

from __future__ import annotations

import json
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.evals.acceptance import Outcome, measure, summary
from specdec.evals.exactness import Difference
from specdec.evals.prompts import EvalPrompt
from specdec.evals.report import number
from specdec.grammar.spec import JsonSchema
from specdec.llm import LLM
from specdec.request import Sampling, Stopping

RECORD: dict[str, Any] = {
    "order_number": 40817,
    "customer_name": "Mara Lind",
    "email": "mara.lind@example.org",
    "street": "12 Harbour Road",
    "city": "Bergen",
    "country": "Norway",
    "item": "standing lamp",
    "quantity": 2,
    "unit_price": 49.5,
    "paid": True,
}
FIELD, CORRECTION = "quantity", 3
REPEATS = 3
MAX_TOKENS = 200


def schema() -> dict[str, Any]:
    """A JSON Schema of records with the fields of `RECORD`, in its order, all of them required."""
    kinds: dict[type, dict[str, Any]] = {
        str: {"type": "string", "maxLength": 40},
        int: {"type": "integer", "minimum": 0, "maximum": 99999},
        float: {"type": "number", "minimum": 0, "maximum": 99999},
        bool: {"type": "boolean"},
    }
    return {
        "type": "object",
        "properties": {name: kinds[type(value)] for name, value in RECORD.items()},
        "required": list(RECORD),
        "additionalProperties": False,
    }


def prompts() -> list[EvalPrompt]:
    """The record's correction, and an ordinary question."""
    record = json.dumps(RECORD, separators=(",", ":"))
    correct = (
        f"Here is a record:\n{record}\n"
        f"Change the {FIELD} to {CORRECTION}. Print the whole record again with this one change."
    )
    ask = "What does a lighthouse keeper do? Answer in a few sentences."
    return [
        EvalPrompt(
            "a record under its schema",
            "json",
            ({"role": "user", "content": correct},),
            JsonSchema(schema(), whitespace="compact"),
        ),
        EvalPrompt("an ordinary prompt", "chat", ({"role": "user", "content": ask},)),
    ]


def run_demo(llm: LLM, console: Console) -> list[Outcome]:
    """Answer both prompts both ways, in turns, and print what came of it. Raises what ended a text early, if so."""
    sampling, stopping = Sampling(temperature=0.0, seed=0), Stopping(max_tokens=MAX_TOKENS)
    outcomes = []
    for prompt in prompts():
        console.print(f"[bold]{prompt.id}[/bold]")
        console.print(prompt.messages[-1]["content"], style="dim", markup=False, highlight=False)
        with console.status(f"answering {REPEATS} times with and without drafts, in turns"):
            (outcome,) = measure(llm, [prompt], sampling, stopping, repeats=REPEATS)
        for run in (outcome.pair.plain, outcome.pair.drafted):
            if run.error is not None:
                raise run.error
        outcomes.append(outcome)
        answer = outcome.pair.drafted
        if prompt.constraint is not None and answer.seq.finish_reason == "stop":
            console.print_json(answer.text)
        else:
            console.print(answer.text, markup=False, highlight=False)
        console.print()
    console.print(_table(llm.loaded.name, outcomes))
    return outcomes


def _table(model: str, shown: list[Outcome]) -> Table:
    table = Table(title=f"{model}, temperature 0, medians of {REPEATS} runs in turns", title_justify="left", box=None)
    table.add_column("")
    for part in shown:
        table.add_column(part.prompt.id, justify="right")
    rows = zip(*(_numbers(part) for part in shown), strict=True)
    for name, row in zip(("tokens", "tokens/forward", "tokens/s with drafts", "without", "speedup"), rows, strict=True):
        table.add_row(name, *row)
    table.add_row("same text", *(_same(part.difference) for part in shown))
    return table


def _numbers(part: Outcome) -> tuple[str, ...]:
    found = summary([part])
    return (
        str(found["tokens"]),
        number(found["tokens_per_forward"]),
        number(found["tokens_per_second"], 1),
        number(found["plain_tokens_per_second"], 1),
        number(found["speedup"]),
    )


def _same(parted: Difference | None) -> str:
    if parted is None:
        return "yes"
    gap = f"{parted.gap:.6f}" if math.isfinite(parted.gap) else "none"
    return f"up to token {parted.index} (gap {gap})"
