"""The program of the process that compiles by xgrammar (see `CompileProcess`). Run by its path, so it imports nothing
of ours. It is told a serialised TokenizerInfo, then EBNF; its results are serialised grammars. The system ends it where
a grammar takes too much CPU. A short text is written under each, to see what its rows cost.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np

MAX_CHARACTERS = 20_000_000  # of a result: reading one takes a second, on a thread that lets others run
NUM_TOKENS = 64
MAX_TOKEN_SECONDS = 0.25  # of CPU


def main() -> None:
    """Compile until the other side hangs up."""
    cpu_seconds = float(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not end up between the answers

    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(json.loads(sys.stdin.readline()))
    # One thread: more of them starve the engine on small machines. The cache is on the other side.
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            answer = _answer(xgrammar, compiler.compile_grammar(text), info)
        except UnicodeDecodeError as error:  # its message names a byte of the grammar and cannot be read
            answer = [False, error.object.decode("utf-8", "replace")]
        except RuntimeError as error:
            answer = [False, str(error)]
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=answers, flush=True)


def _answer(xgrammar: Any, compiled: Any, info: Any) -> list[Any]:
    """`[true, grammar]`, or `[null, why]` where it is too large or its rows are too slow for an engine."""
    result = compiled.serialize_json()
    if len(result) > MAX_CHARACTERS:
        return [None, "memory"]
    matcher, rng = xgrammar.GrammarMatcher(compiled), random.Random(0)
    rows = np.empty((1, (info.vocab_size + 31) // 32), np.int32)
    for _ in range(NUM_TOKENS):
        began = time.thread_time()
        rows[:] = -1
        matcher.fill_next_token_bitmask(rows)
        if time.thread_time() - began > MAX_TOKEN_SECONDS:
            return [None, "rows"]
        allowed = np.unpackbits(rows.view(np.uint8), bitorder="little")[: info.vocab_size]
        allowed[list(info.stop_token_ids)] = 0
        choices = np.flatnonzero(allowed).tolist()
        if not choices or not matcher.accept_token(rng.choice(choices)):
            break
    return [True, result]


if __name__ == "__main__":
    main()
