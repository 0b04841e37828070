"""What an eval or a bench found, on its way out: tables for people, JSON for programs. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

JsonOut = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the report here; - for standard output.")
]


def deliver(
    found: Mapping[str, Any],
    asked: Mapping[str, Any],
    origin: Mapping[str, Any],
    tables: Callable[[Mapping[str, Any]], list[Table]],
    json_out: Path | None,
) -> None:
    """The report of what was `found` where this was `asked`: its tables on standard output, all of it in a file; with
    `-` standard output gets it. `origin` is where the numbers come from, as things stood before. Raises `ConfigError`
    for a file that cannot be written."""
    from rich.console import Console

    from specdec.evals.provenance import load_average

    report = {**found, **asked, "provenance": {**origin, "load_average_after": load_average()}}
    text = json.dumps(report, indent=2, allow_nan=False)
    to_stdout = json_out is not None and str(json_out) == "-"
    console = Console(stderr=to_stdout)
    for table in tables(report):
        console.print(table)
        console.print()
    origin = report["provenance"]
    console.print(
        f"{origin['model']} on {origin['cpu'] if origin['device'] == 'cpu' else origin['device']}, "
        f"{origin['threads']} threads, load {origin['load_average']} before and {origin['load_average_after']} after",
        highlight=False,
    )
    if to_stdout:
        print(text)
    elif json_out is not None:
        try:
            json_out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{json_out}: cannot be written: {error}") from error
