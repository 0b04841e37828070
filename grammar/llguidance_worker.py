"""The program of the process that tries out what llguidance compiles (see `CompileProcess`). It is told the tokenizer,
then specs; its results are readings. llguidance has no grammars that could be handed over, so whoever asks builds the
same one again, and knows that it can be built.

Each spec is tried in a fork of this process, which its system ends where it takes too much CPU, memory or stack; this
process goes on with the next. A row too slow for an engine, or one that cannot be had, is found by writing a text.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from specdec.errors import InvalidRequest
from specdec.grammar import spec as specs
from specdec.grammar.building import build, on_stack
from specdec.grammar.llguidance import STATEFUL, LlguidanceTokens, compile_llguidance
from specdec.grammar.reading import packed, read
from specdec.grammar.refusal import refusal
from specdec.grammar.trial import TooCostly, try_out

STACK_BYTES = 8 * 2**20
MEMORY_BYTES = 2**30  # beside the tokenizer's
NICENESS = 5  # the engine comes first
FAULT, NO_MEMORY = 70, 71  # codes that a fork exits with
# Why there is no answer. The system has other signals for a process that runs out of memory or stack.
WHY = {FAULT: "fault", -signal.SIGPROF: "cpu", -signal.SIGALRM: "time", -signal.SIGKILL: "time"}


def main() -> None:
    """Try specs out until the other side hangs up."""
    cpu_seconds, seconds = map(float, sys.argv[1:])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not end up between the answers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    target = json.loads(sys.stdin.readline())
    tokens = LlguidanceTokens.load(
        target["tokenizer"], target["vocab_size"], tuple(target["end_ids"]), frozenset(target["special_ids"])
    )
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(_tried(json.loads(line), tokens, target["remotes"], cpu_seconds, seconds), file=answers, flush=True)


def _tried(
    job: dict[str, Any], tokens: LlguidanceTokens, remotes: dict[str, object], cpu_seconds: float, seconds: float
) -> str:
    """The answer to a job, as JSON, from a fork of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = FAULT
        try:
            os.close(reading)
            _limit(cpu_seconds, seconds)
            answer = json.dumps(on_stack(STACK_BYTES, lambda: _answer(job, tokens, remotes)))
            with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                pipe.write(answer)
            status = 0
        except MemoryError:
            status = NO_MEMORY
        except BaseException:  # nobody above would say anything
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return text if code == 0 else json.dumps([None, WHY.get(code, "memory")])


def _limit(cpu_seconds: float, seconds: float) -> None:
    """Have the system end this process, also in the middle of native code, where it takes too much."""
    for alarm in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(alarm, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    status = Path("/proc/self/statm")
    if status.exists():  # elsewhere the address space has no meaning of memory
        here = int(status.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (here + MEMORY_BYTES, here + MEMORY_BYTES))


def _answer(job: dict[str, Any], tokens: LlguidanceTokens, remotes: dict[str, object]) -> list[Any]:
    """`[true, reading]`, or `[false, {what is wrong}]`."""
    param = job["param"]
    try:
        spec = getattr(specs, job["kind"])(**job["fields"])
        reading = read(
            spec,
            param,
            lambda regex, name: compile_llguidance(regex, tokens, name),
            remotes=remotes,
            spelling=tokens.spelling,
        )
        try:
            try_out(build(spec, reading, tokens, param), tokens.vocabulary, tokens.token_bytes())
        except TooCostly as error:
            where = reading.schemas[0].prepared.pointers(STATEFUL) if reading.schemas else ""
            raise refusal(param, f"is too complex: {error}{where}", "too_large") from error
    except InvalidRequest as error:
        return [False, {"message": error.message, "code": error.code}]
    return [True, packed(reading)]


if __name__ == "__main__":
    main()
