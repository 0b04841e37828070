"""What constraints cost: CPU time of single rows and of draft trees, and of a token beside one of free text. Judges no
text and prints nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from types import MappingProxyType
from typing import Any

from specdec.errors import InvalidRequest
from specdec.evals.bench import TEXT, timed
from specdec.evals.cases import Case
from specdec.evals.structured import DRAFT_DEPTH, DRAFTS, WALK_TOKENS, Times, Walker, spread
from specdec.evals.vocabulary import EvalVocabulary
from specdec.grammar.llguidance import LlguidanceGrammar
from specdec.grammar.spec import JsonSchema, PropertyOrder, Whitespace
from specdec.grammar.validated import ValidatedGrammar
from specdec.llm import LLM
from specdec.mask import TokenMask
from specdec.protocols import Grammar
from specdec.request import Request, Sampling, Stopping
from specdec.tree import DraftTree, chain, merge

_POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "number"}}, "required": ["x", "y"]}
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "role": {"enum": ["cook", "pilot", "nurse"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "role", "age"],
    "additionalProperties": False,
}
# None of them ends within some hundred tokens.
SCHEMAS: Mapping[str, Any] = MappingProxyType(
    {
        "people": {"type": "array", "items": _PERSON, "minItems": 40},
        "points": {"type": "array", "items": {**_POINT, "additionalProperties": False}, "minItems": 100},
        "map": {"type": "object", "additionalProperties": {"type": "string", "minLength": 3}, "minProperties": 100},
        "unique words": {
            "type": "array",
            "items": {"type": "string", "minLength": 2},
            "uniqueItems": True,
            "minItems": 99,
        },
    }
)
_ids = count()


@dataclass(slots=True)
class _Found:
    schemas: int = 0
    row_us: list[float] = field(default_factory=list)
    tree_us: list[float] = field(default_factory=list)
    walk_us: list[float] = field(default_factory=list)
    tree_rows: list[float] = field(default_factory=list)


def bench_grammar(
    cases: Sequence[Case],
    vocabulary: EvalVocabulary,
    *,
    walks: int = 4,
    whitespace: Whitespace = "flexible",
    property_order: PropertyOrder = "schema",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Thread CPU time in microseconds, by whether a checker follows a schema's texts (`checked`) or none (`plain`):
    a row of a random text (`row_us`), all rows of a draft tree of up to 63 (`tree_us`), and, as in a step on a CPU,
    pruning such a tree and the rows on the way to one of its leaves (`walk_us`)."""
    found = {"plain": _Found(), "checked": _Found()}
    compiler, walker = vocabulary.compiler({}), Walker(vocabulary)
    for done, case in enumerate(cases):
        try:
            grammar = compiler.compile(JsonSchema(case.schema, whitespace, property_order=property_order))
        except InvalidRequest:
            continue
        times = found["checked" if _is_checked(grammar) else "plain"]
        times.schemas += 1
        for number in range(walks):
            rng, measured = random.Random(f"{case.id} {number}"), Times()
            walker.walk(grammar, rng, WALK_TOKENS, measured)
            times.row_us += measured.mask_us
        for number in range(walks):
            start, tree = _tree(grammar, walker, random.Random(f"{case.id} tree {number}"))
            times.tree_us.append(_cpu_us(grammar, vocabulary.size, start, tree, lambda kept: range(len(kept))))
            times.walk_us.append(_cpu_us(grammar, vocabulary.size, start, tree, _path_to_a_leaf))
            times.tree_rows.append(len(tree))
        progress(done + 1, len(cases))
    return {
        kind: {
            "schemas": times.schemas,
            "rows": len(times.row_us),
            "row_us": spread(times.row_us),
            "tree_us": spread(times.tree_us),
            "walk_us": spread(times.walk_us),
            "tree_rows": spread(times.tree_rows),
        }
        for kind, times in found.items()
    }


def bench_constrained(
    llm: LLM,
    *,
    tokens: int = 64,
    rounds: int = 6,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Milliseconds of a step without drafts behind one prompt, of free text and under each of `SCHEMAS`, in runs of
    `tokens` that take turns; medians, and `ratio`: constrained to the free runs beside it; `cpu_ratio`
    is that of CPU time of the thread, which other work on the machine touches less. The prompt's step is not
    counted, nor the first of a text, which may compile the lexer. The engine's drafters are taken away."""
    llm.loaded.engine.drafting.drafters = ()
    prompt, warm = TEXT * 2, Sampling(temperature=0.8, seed=1)
    free = llm.request(prompt, warm, Stopping(max_tokens=tokens + 2, ignore_eos=True))
    requests = {
        name: llm.request(prompt, warm, Stopping(max_tokens=tokens + 2), constraint=JsonSchema(schema, "compact"))
        for name, schema in SCHEMAS.items()
    }
    steps: dict[str, tuple[list[_Step], list[_Step]]] = {name: ([], []) for name in requests}
    for request in (free, *requests.values()):
        list(_steps(llm, request))  # reads the prompt, and compiles
    for done in range(rounds):
        for name, request in requests.items():
            beside, under = steps[name]
            turns = ((beside, free), (under, request))
            for into, which in turns if done % 2 == 0 else reversed(turns):
                into.extend(_steps(llm, which))
        progress(done + 1, rounds)
    schemas = {}
    for name, (beside, under) in steps.items():
        wall, wall_free, cpu, cpu_free = (median(t[at] for t in found) for at in (0, 1) for found in (under, beside))
        schemas[name] = {
            "free_ms": round(1e3 * wall_free, 3),
            "constrained_ms": round(1e3 * wall, 3),
            "ratio": round(wall / wall_free, 4),
            "cpu_ratio": round(cpu / cpu_free, 4),
            "steps": len(under),
        }
    ratios = {key: round(median(found[key] for found in schemas.values()), 4) for key in ("ratio", "cpu_ratio")}
    return {"tokens": tokens, "rounds": rounds, "schemas": schemas, **ratios}


_Step = tuple[float, float]  # seconds of the clock, and of the thread's CPU


def _steps(llm: LLM, request: Request) -> Iterator[_Step]:
    """Each step of a text but its first two."""
    engine, request_id = llm.loaded.engine, f"bench-constrained-{next(_ids)}"
    engine.add(request, request_id)
    number = 0
    while engine.has_work:
        cpu = time.thread_time()
        _, seconds = timed(engine.step)
        cpu = time.thread_time() - cpu
        number += 1
        if number > 2:
            yield seconds, cpu


def _is_checked(grammar: Grammar) -> bool:
    inner = grammar.grammar if isinstance(grammar, ValidatedGrammar) else grammar
    return isinstance(inner, LlguidanceGrammar) and inner.narrowing is not None


def _tree(grammar: Grammar, walker: Walker, rng: random.Random) -> tuple[list[int], DraftTree]:
    """The beginning of a random text, and a tree of random texts that go on from there."""
    tokens, _, _ = walker.walk(grammar, rng, WALK_TOKENS, Times())
    start = tokens[: rng.randrange(len(tokens) + 1)]
    drafts = [walker.walk(grammar, rng, DRAFT_DEPTH, Times(), start)[0] for _ in range(DRAFTS)]
    return start, merge([chain(0, draft, "random") for draft in drafts])


def _path_to_a_leaf(tree: DraftTree) -> list[int]:
    """The root, and the nodes on the way to its last leaf."""
    return [0, *tree.path(len(tree) - 1)]


def _cpu_us(
    grammar: Grammar,
    vocab_size: int,
    start: Sequence[int],
    tree: DraftTree,
    visited: Callable[[DraftTree], Sequence[int]],
) -> float:
    """Microseconds of pruning a tree behind `start`, and of the rows of the nodes that are visited."""
    constraint = grammar.start()
    constraint.advance(start)
    started = time.thread_time_ns()
    kept = constraint.prune(tree)
    mask = TokenMask(len(kept), vocab_size)
    constraint.mask(kept, 0, mask)
    for node in visited(kept):
        mask.words(node)
    return (time.thread_time_ns() - started) / 1e3
