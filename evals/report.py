"""Reports as tables for a terminal. Knows the JSON that the evals make, and nothing of how it was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.table import Table

Report = Mapping[str, Any]


def number(value: float | None, digits: int = 2) -> str:
    """A number for a cell; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def acceptance_tables(report: Report) -> list[Table]:
    """Of an acceptance report: by prompt, by category with the totals, and by draft position."""
    prompts = _table("prompt", "tokens", *_SPEED, "ended by", "parts at (gap)")
    for prompt in report["prompts"]:
        name = f"{prompt['id']} (loops)" if prompt["loops"] else prompt["id"]
        ended = "error" if prompt["error"] else prompt["finish_reason"]
        prompts.add_row(name, str(prompt["tokens"]), *_speed(prompt), ended, _parted(prompt["first_difference"]))
    groups = _table("category", "prompts", "tokens", *_SPEED, "same text")
    for name, part in report["categories"].items():
        groups.add_row(name, *_group(part))
    groups.add_section()
    groups.add_row("all", *_group(report))
    if report["looping"]:
        groups.add_row("without loops", *_group(report["without_looping"]))
    positions = _table("draft position", "accepted")
    for place, share in enumerate(report["accepted_per_position"], 1):
        positions.add_row(str(place), number(share))
    return [prompts, groups, positions]


def coupling_tables(report: Report) -> list[Table]:
    """Of a coupling report: the share of positions at which each way accepts a draft."""
    ways = {
        "rejection sampling, sum min(p, q)": "rejection",
        "coupled, exact": "coupled_exact",
        "coupled, counted": "coupled_1",
        "best 2 coupled": "coupled_2",
        "best 4 coupled": "coupled_4",
        "greedy draft": "greedy",
    }
    table = _table(f"first {report['layers']} of {report['of']} layers, {report['positions']} positions", "accepted")
    for name, key in ways.items():
        table.add_row(name, number(report[key], 3))
    return [table]


def rank_tables(report: Report) -> list[Table]:
    """Of a rank accuracy report: the share of draws at which the guess of a rank was right, by depth."""
    ranks = max(map(len, report["rank_accuracy"]), default=0)
    table = _table(f"{report['drafter']}, depth", "draws", *(f"rank {rank}" for rank in range(ranks)))
    for depth, (draws, shares) in enumerate(zip(report["draws"], report["rank_accuracy"], strict=True), 1):
        table.add_row(str(depth), str(draws), *(number(share, 3) for share in shares))
    return [table]


def bench_tables(report: Report) -> list[Table]:
    """Of a bench report: a step's milliseconds by rows, and where they go if that was asked for."""
    kinds = {
        "greedy": "rows_ms",
        "temperature 0.8, top-p 0.95": "rows_ms_sampled",
        "inside a JSON string": "rows_ms_schema",
    }
    rows = list(report["rows_ms"])
    steps = _table(f"ms a step at context {report['context']}", *(f"{row} rows" for row in rows))
    for kind, key in kinds.items():
        steps.add_row(kind, *(number(report[key][row]) for row in rows))
    prefill = _table("prompt tokens", "tokens/s")
    prefill.add_row(str(report["prefill_tokens"]), number(report["prefill_tokens_per_s"], 1))
    tables = [steps, prefill]
    for kind, key in kinds.items() if "profile" in report else ():
        by_row = report["profile"][key]
        areas = dict.fromkeys(area for found in by_row.values() for area in found)
        profile = _table(f"ms by area, profiled: {kind}", *(f"{row} rows" for row in rows))
        for area in areas:
            profile.add_row(area, *(number(by_row[row].get(area, 0.0)) for row in rows))
        profile.add_row("sum", *(number(sum(by_row[row].values())) for row in rows))
        tables.append(profile)
    return tables


def grammar_tables(report: Report) -> list[Table]:
    """Of a bench of grammars: microseconds of rows and trees."""
    columns = ("row_us", "tree_us", "walk_us")
    table = _table("CPU us, p50 / p99 / max", "schemas", "rows", "a row", "all rows of a tree", "those of a walk")
    for kind in ("plain", "checked"):
        found = report[kind]
        spreads = (" / ".join(number(found[name][key], 0) for key in ("p50", "p99", "max")) for name in columns)
        table.add_row(kind, str(found["schemas"]), str(found["rows"]), *spreads)
    return [table]


def constrained_tables(report: Report) -> list[Table]:
    """Of a bench of constrained text: milliseconds a token."""
    table = _table("ms a token, medians", "free", "constrained", "ratio", "of CPU time")
    for name, found in report["schemas"].items():
        ratios = (number(found[key], 3) for key in ("ratio", "cpu_ratio"))
        table.add_row(name, number(found["free_ms"]), number(found["constrained_ms"]), *ratios)
    table.add_row("median", "", "", number(report["ratio"], 3), number(report["cpu_ratio"], 3))
    return [table]


def structured_tables(report: Report) -> list[Table]:
    """Of an evaluation of grammars: instances, random texts and times, each with what goes wrong most."""
    tests = _table("instances", "right", "accepted invalid", "rejected valid", "refused", "schemas", "compiled")
    keys = ("right", "accepted_invalid", "rejected_valid", "refused", "schemas", "compiled")
    share = f" ({report['right'] / report['tests']:.1%})" if report["tests"] else ""
    tests.add_row(str(report["tests"]), f"{report['right']}{share}", *(str(report[key]) for key in keys[1:]))
    walks = _table(f"random texts, seed {report['seed']}", "valid", "dead end", "unfinished", "invalid", "long")
    ends = ("walks_valid", "walks_dead_end", "walks_unfinished", "walks_invalid", "walks_long")
    walks.add_row(str(report["walks"]), *(str(report[key]) for key in ends))
    times = _table("CPU time", "median", "99 %", "longest")
    for name, key in (
        ("compile, ms", "compile_ms"),
        ("first mask, ms", "first_mask_ms"),
        ("mask row, us", "mask_us"),
        ("tree, us", "tree_us"),
        ("rows of a tree", "tree_rows"),
    ):
        times.add_row(name, *(number(report[key][part]) for part in ("p50", "p99", "max")))
    tables = [tests, walks, times]
    if report["failing"]:
        outcomes = Counter((entry["outcome"], entry["reason"][:100]) for entry in report["failing"])
        worst = _table("outcome", "reason", "times")
        for (outcome, reason), count in outcomes.most_common(10):
            worst.add_row(outcome, reason, str(count))
        tables.append(worst)
    return tables


def generation_tables(report: Report) -> list[Table]:
    """Of texts under schemas: how they ended, with drafts and without, and what is wrong with any."""
    ends = ("finished", "valid", "unfinished", "invalid", "dead_end", "failed", "tokens")
    texts = _table(f"texts, seed {report['seed']}", *(end.replace("_", " ") for end in ends), "accepted")
    for kind in ("plain", "drafted"):
        part = report[kind]
        drafts = f"{part['accepted_tokens']} of {part['draft_tokens']}"
        texts.add_row(kind, *(str(part[end]) for end in ends), drafts)
    schemas = _table("schemas", "compiled", "equal texts")
    schemas.add_row(str(report["schemas"]), str(report["compiled"]), f"{report['equal_texts']} of {report['compiled']}")
    tables = [schemas, texts]
    if report["failing"]:
        failing = _table("text", "ended by", "reason")
        for entry in report["failing"][:10]:
            failing.add_row(f"{entry['id']} ({entry['kind']})", entry["end"], entry["reason"][:100])
        tables.append(failing)
    return tables


_SPEED = ("tokens/fwd", "tokens/s", "plain", "speedup", "cost")


def _speed(part: Report) -> tuple[str, ...]:
    return (
        number(part["tokens_per_forward"]),
        number(part["tokens_per_second"], 1),
        number(part["plain_tokens_per_second"], 1),
        number(part["speedup"]),
        number(part["cost_ratio"]),
    )


def _group(part: Report) -> tuple[str, ...]:
    return (
        str(part["requests"]),
        str(part["tokens"]),
        *_speed(part),
        f"{part['equal_texts']} of {part['requests']}",
    )


def _parted(difference: Report | None) -> str:
    return "-" if difference is None else f"{difference['index']} ({number(difference['gap'], 4)})"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        text = place == 0 or column in ("ended by", "reason")
        table.add_column(column, justify="left" if text else "right", no_wrap=place == 0)
    return table
