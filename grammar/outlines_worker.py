"""The program of the process that compiles by outlines-core (see `CompileProcess`). Run by its path, so it imports
nothing of ours. It is told the tokens' bytes in base64, then patterns; its results are automata over tokens.

outlines-core 0.2.14 drops, where a text may end, every token after which it may not. So no state of ours is one where
the text may end: each pattern ends in a character that a token of our own spells, and a text may end where that token
may follow. Of the states, those stay from which the end can be reached by tokens, so nothing goes on into a part of
that character.

The system ends this process where a pattern takes too much CPU.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import signal
import sys
from typing import Any

import numpy as np
import outlines_core

SENTINEL = "\U0010ffff".encode()
MAX_MEMORY = 6 * 2**30
MAX_STATES = 2**16  # a state is 16 bits
MAX_BYTES = 32 * 2**20  # of rows and of states that follow


def main() -> None:
    """Compile until the other side hangs up."""
    cpu_seconds = float(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not end up between the answers
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # running out of memory aborts
    spelled = [base64.b64decode(text) for text in json.loads(sys.stdin.readline())]
    ids: dict[bytes, list[int]] = {SENTINEL: [len(spelled)]}
    for token, data in enumerate(spelled):
        if data and SENTINEL not in data:
            ids.setdefault(data, []).append(token)
    vocabulary = outlines_core.Vocabulary(len(spelled) + 1, ids)  # its end token is one that no text has
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            index = outlines_core.Index(f"(?:{json.loads(line)})\\x{{10FFFF}}", vocabulary)
            answer = automaton(index, len(spelled))
        except ValueError as error:
            answer = [False, str(error)]
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=answers, flush=True)


def automaton(index: Any, num_tokens: int) -> list[Any]:
    """`[true, automaton]`: states count from 0, where texts begin. `rows` has a bit for each token that may follow a
    state, `nexts` the states after them in the order of bits, `ends` whether a text may end; `[false, why]` for an
    automaton that is too large or without a text."""
    transitions, final = index.get_transitions(), index.get_final_states()
    follow = {  # only our own token leads to where the pattern has ended
        state: {token: after for token, after in tokens.items() if after not in final and token < num_tokens}
        for state, tokens in transitions.items()
        if state not in final
    }
    ends = {state for state, tokens in transitions.items() if num_tokens in tokens}
    alive = _reaching(ends, {state: set(tokens.values()) for state, tokens in follow.items()})
    start = index.get_initial_state()
    if start not in alive:
        return [False, "unsatisfiable"]
    numbers = {state: number for number, state in enumerate([start, *sorted(alive - {start})])}
    num_words = (num_tokens + 31) // 32
    edges = sum(after in numbers for state in numbers for after in follow[state].values())
    if len(numbers) > MAX_STATES or len(numbers) * num_words * 4 + edges * 2 > MAX_BYTES:
        return [False, f"has an automaton of {len(numbers)} states and {edges} tokens between them, which is too large"]
    rows = np.zeros((len(numbers), num_words * 32), np.bool_)
    nexts = []
    for state, number in numbers.items():
        kept = sorted((token, numbers[after]) for token, after in follow[state].items() if after in numbers)
        rows[number, [token for token, _ in kept]] = True
        nexts.append(np.array([after for _, after in kept], np.uint16))
    return [
        True,
        {
            "rows": _text(np.packbits(rows, axis=1, bitorder="little")),
            "nexts": _text(np.concatenate(nexts)),
            "ends": [state in ends for state in numbers],
        },
    ]


def _reaching(goals: set[int], follow: dict[int, set[int]]) -> set[int]:
    """The states from which one of `goals` can be reached, and these."""
    before: dict[int, set[int]] = {}
    for state, states in follow.items():
        for after in states:
            before.setdefault(after, set()).add(state)
    found, pending = set(goals), list(goals)
    while pending:
        for state in before.get(pending.pop(), set()) - found:
            found.add(state)
            pending.append(state)
    return found


def _text(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


if __name__ == "__main__":
    main()
