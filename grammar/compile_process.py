"""A process of its own for compiling: a short grammar or pattern can hold a library for hours or fill the memory, and
nothing but killing the process stops it. Knows no library and no grammar, only lines of JSON and a deadline.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO, Any

import specdec
from specdec.errors import ConfigError

logger = logging.getLogger(__name__)

START_SECONDS = 300.0
COMPILE_SECONDS = 10.0
GRACE_SECONDS = 1.0  # for a program that keeps the time itself
CPU_SECONDS = 2.0


class TooSlow(Exception):
    """What was asked did not compile within its time or memory."""


class CompileProcess:
    """Compiles by a program beside this file, one question at a time, each within 10 seconds and `cpu_seconds` of CPU.
    The process starts at once, and again after a kill."""

    def __init__(self, program: str, cpu_seconds: float = CPU_SECONDS) -> None:
        """`program` is run with the seconds of CPU and all seconds that it may spend on a question. It reads a line of
        JSON that says what to compile for, and answers "ready"; then it reads questions, and answers each with
        `[true, result]`, `[false, what is wrong]`, or `[null, why]` where it ran out of "cpu", "time" or "memory", has
        slow "rows", or a "fault". It may also be ended by the system."""
        self._program = Path(__file__).with_name(program)
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._ready = False
        self._start()

    def compile(self, target: object, question: object) -> tuple[bool, Any]:
        """Whether what `question` asks for compiles for `target` (the same in every call), with the result or what is
        wrong with it. Raises `TooSlow`."""
        with self._lock:
            if self._process.poll() is not None:
                self._start()
            if not self._ready:
                if self._ask(target, START_SECONDS) != "ready":
                    name = self._program.stem.removesuffix("_worker")
                    raise ConfigError(f"{name} cannot be started; its process says why on the error output")
                self._ready = True
            answer = self._ask(question, COMPILE_SECONDS + GRACE_SECONDS)
            assert isinstance(answer, list), answer
            compiled, result = answer
            if compiled is None:
                raise TooSlow(self._complaint(result))
            return compiled, result

    def _complaint(self, why: str) -> str:
        limits = {
            "cpu": f"does not compile within {self._cpu_seconds:g} seconds of processor time",
            "time": f"does not compile within {COMPILE_SECONDS:g} seconds",
            "rows": "is too complex: a token of a text under it takes too much processor time",
            "memory": "does not compile within the memory that is allowed",
        }
        if why not in limits:
            raise RuntimeError("the process that compiles grammars failed; it says how on the error output")
        return limits[why]

    def _start(self) -> None:
        # -P: the program's folder holds modules named as the libraries. A session of its own: Ctrl-C is not for it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(self._program), str(self._cpu_seconds), str(COMPILE_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": _search_path(), "OPENBLAS_NUM_THREADS": "1"},
        )
        self._ready = False
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipes: tuple[IO[str], IO[str]] = (self._process.stdin, self._process.stdout)
        weakref.finalize(self, _end, self._process, self._pipes)

    def _ask(self, question: object, seconds: float) -> object:
        """The answer to a line, or why there is none: the process has ended, or was killed for taking too long."""
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
        code = self._process.returncode
        logger.debug("the process that compiles grammars ended with code %s", code)
        return [None, {-signal.SIGPROF: "cpu", -signal.SIGKILL: "time"}.get(code, "memory")]


def _search_path() -> str:
    """Where the program finds what this process has found, however it did."""
    here = str(Path(specdec.__file__).parents[1])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


def _end(process: subprocess.Popen[str], pipes: tuple[IO[str], IO[str]]) -> None:
    """Kill the process if it still runs, and leave nothing behind."""
    process.kill()
    process.wait()
    for pipe in pipes:
        try:
            pipe.close()
        except BrokenPipeError:  # closing flushes what the dead process never read
            continue
