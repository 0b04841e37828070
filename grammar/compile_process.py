"""A process of its own for compiling: a short grammar or pattern can hold a library for hours or fill the memory, and
nothing but killing the process stops it. Knows no library and no grammar, only lines of JSON and a deadline.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO, Any

from specdec.errors import ConfigError

logger = logging.getLogger(__name__)

START_SECONDS = 300.0
COMPILE_SECONDS = 10.0


class TooSlow(Exception):
    """The text did not compile within its time, or broke the process."""


class CompileProcess:
    """Compiles texts by a program beside this file, one at a time, each within 10 seconds. The process starts at once,
    and again after a kill."""

    def __init__(self, program: str) -> None:
        """`program` reads a line of JSON that says what to compile for, and answers "ready"; then it reads texts, and
        answers each with `[true, result]` or `[false, what is wrong]`."""
        self._program = Path(__file__).with_name(program)
        self._lock = threading.Lock()
        self._ready = False
        self._start()

    def compile(self, target: object, text: str) -> tuple[bool, Any]:
        """Whether `text` compiles for `target` (the same in every call), with the result or what is wrong with it.
        Raises `TooSlow`."""
        with self._lock:
            if self._process.poll() is not None:
                self._start()
            if not self._ready:
                if self._ask(target, START_SECONDS) != "ready":
                    name = self._program.stem.removesuffix("_worker")
                    raise ConfigError(f"{name} cannot be started; its process says why on the error output")
                self._ready = True
            answer = self._ask(text, COMPILE_SECONDS)
            if not isinstance(answer, list):
                raise TooSlow(f"does not compile within {COMPILE_SECONDS:g} seconds and the memory that is allowed")
            compiled, result = answer
            return compiled, result

    def _start(self) -> None:
        # -P: the program's folder holds modules named as the libraries. A session of its own: Ctrl-C is not for it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(self._program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )
        self._ready = False
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipes: tuple[IO[str], IO[str]] = (self._process.stdin, self._process.stdout)
        weakref.finalize(self, _end, self._process, self._pipes)

    def _ask(self, question: object, seconds: float) -> object:
        """The answer to a line, or None where the process died or was killed for taking too long."""
        questions, answers = self._pipes
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            print(json.dumps(question), file=questions, flush=True)
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line.endswith("\n"):
            return json.loads(line)
        _end(self._process, self._pipes)
        logger.debug("the process that compiles grammars ended with code %s", self._process.returncode)
        return None


def _end(process: subprocess.Popen[str], pipes: tuple[IO[str], IO[str]]) -> None:
    """Kill the process if it still runs, and leave nothing behind."""
    process.kill()
    process.wait()
    for pipe in pipes:
        try:
            pipe.close()
        except BrokenPipeError:  # closing flushes what the dead process never read
            continue
