"""A process of its own for compiling EBNF: a short grammar can hold the compiler for hours, and nothing but killing
the process stops it. Knows no grammar, only lines of JSON and a deadline.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO

from specdec.errors import ConfigError

logger = logging.getLogger(__name__)

START_SECONDS = 300.0
COMPILE_SECONDS = 10.0
PROGRAM = Path(__file__).with_name("ebnf_worker.py")


class TooSlow(Exception):
    """The grammar did not compile within its time, or broke the process."""


class EbnfProcess:
    """Compiles grammars, one at a time, each within 10 seconds. The process starts at once, and again after a kill."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = False
        self._start()

    def compile(self, info: str, text: str) -> tuple[bool, str]:
        """Whether `text` compiles for the vocabulary `info` (the same in every call), with the serialised grammar or
        what is wrong. Raises `TooSlow`."""
        with self._lock:
            if self._process.poll() is not None:
                self._start()
            if not self._ready:
                if self._ask(info, START_SECONDS) != "ready":
                    raise ConfigError("xgrammar cannot be started; its process says why on the error output")
                self._ready = True
            answer = self._ask(text, COMPILE_SECONDS)
            if not isinstance(answer, list):
                raise TooSlow(f"does not compile within {COMPILE_SECONDS:g} seconds")
            compiled, result = answer
            return compiled, result

    def _start(self) -> None:
        # -P: the folder of the program holds an xgrammar.py of ours. A session of its own: Ctrl-C is not for it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
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

    def _ask(self, question: str, seconds: float) -> object:
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
