"""Texts as they come, on a terminal or through a pipe, and what a user says in between. Knows no options."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.grammar.spec import Spec
    from specdec.llm import LLM
    from specdec.request import Sampling, Stopping


def said(at_terminal: bool) -> Iterator[str]:
    """What the user says, line by line, without the blank ones."""
    if at_terminal:
        with suppress(ImportError):  # where there is none, lines are plain
            import readline  # noqa: F401 - input() then edits lines and remembers them
    while True:
        try:
            line = input("> ") if at_terminal else sys.stdin.readline()
        except EOFError:
            print()
            return
        if not at_terminal and not line:
            return
        if line.strip():
            yield line.strip()


def answered(
    llm: LLM,
    messages: list[Mapping[str, str]],
    sampling: Sampling,
    stopping: Stopping,
    name: str,
    spec: Spec | None,
    *,
    stoppable: bool,
) -> str:
    """Print an answer as it comes; `stoppable` by Ctrl-C, which leaves what there is."""
    prompt = llm.chat_prompt(messages)
    text, finish_reason = "", None
    with _interrupts(stoppable) as stopped:
        for emission in llm.stream(prompt, sampling, stopping, constraint=spec):
            show(emission.text)
            text += emission.text
            finish_reason = emission.seq.finish_reason
            if emission.error is not None:
                show("\n")
                raise emission.error
            if stopped():
                break
    show("\n")
    note_a_cut(name, finish_reason)
    return text


@contextmanager
def _interrupts(counted: bool) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C came, asked between two steps: an exception in the middle of one would leave the engine torn."""
    if not counted:
        yield lambda: False
        return
    interrupts: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        interrupts.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


def note_a_cut(name: str, finish_reason: str | None) -> None:
    """Say on stderr that a text under the constraint `name` ended at its limit, and not where the constraint does."""
    if name and finish_reason == "length":
        print(f"specdec: {name}: cut off at --max-tokens or the end of the context, so not complete", file=sys.stderr)


def show(text: str) -> None:
    """A piece of a text, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def one_line(error: Exception) -> str:
    """What an error says, without line breaks."""
    return " ".join(str(error).split())
