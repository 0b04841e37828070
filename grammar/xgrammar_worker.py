"""The program of the process that compiles by xgrammar (see `CompileProcess`). Run by its path, so it imports nothing
of ours. It is told a serialised TokenizerInfo, then EBNF; its results are serialised grammars. The system ends it where
a grammar takes too much CPU.
"""

from __future__ import annotations

import json
import os
import signal
import sys

MAX_CHARACTERS = 20_000_000  # of a result: reading one takes a second, on a thread that lets others run


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
            result = compiler.compile_grammar(text).serialize_json()
            answer = [True, result] if len(result) <= MAX_CHARACTERS else [None, "memory"]
        except UnicodeDecodeError as error:  # its message names a byte of the grammar and cannot be read
            answer = [False, error.object.decode("utf-8", "replace")]
        except RuntimeError as error:
            answer = [False, str(error)]
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
