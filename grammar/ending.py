"""Whether any text can end under a grammar whose texts are checked besides: a search through all that there may be,
where that is little. Knows no schema.
"""

from __future__ import annotations

import re

import numpy as np

from specdec.errors import ConstraintError
from specdec.grammar.token_table import TokenTable, tokens_of
from specdec.grammar.walk import TreeConstraint

MAX_ROWS = 200  # some 10 ms
MANY = 64  # tokens of which one leads on, as in a string
BLANKS = b" \t\r\n"
_ESCAPED = re.compile(rb"\\.", re.DOTALL)


def can_end(constraint: TreeConstraint, table: TokenTable) -> bool:
    """Whether a text can come to an end. True also where there are more than `MAX_ROWS` places to look at, or a place
    where anything may follow. Blanks between values must be needed nowhere: they are passed over."""
    pending: list[tuple[tuple[int, ...], bytes]] = [((), b"")]
    seen = {b""}
    while pending:
        path, text = pending.pop()
        try:
            row_W = constraint.row(path)
        except ConstraintError:
            return True
        if (row_W & table.end_words_W).any() or np.bitwise_count(row_W.view(np.uint32)).sum() > MANY:
            return True
        for token in tokens_of(row_W).tolist():
            data = text + table.spelled[token]
            if data in seen or (not table.spelled[token].strip(BLANKS) and not _in_string(text)):
                continue
            seen.add(data)
            pending.append(((*path, token), data))
        if len(seen) > MAX_ROWS:
            return True
    return False


def _in_string(text: bytes) -> bool:
    """Whether a string has begun and not ended."""
    return bool(_ESCAPED.sub(b"", text).count(b'"') % 2)
