"""Sequences for drafter tests: real ones, with no model behind them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, cast

from specdec.free import FREE_TEXT
from specdec.protocols import Constraint
from specdec.request import Request, Sampling
from specdec.sequence import Sequence

if TYPE_CHECKING:
    from specdec.text import Detokenizer


def new_sequence(
    tokens: Seq[int],
    *,
    num_prompt: int = 1,
    constraint: Constraint | None = None,
    sampling: Sampling | None = None,
    prediction: Seq[int] = (),
    request_id: str = "test",
    salt: str = "",
) -> Sequence:
    """A sequence whose first `num_prompt` tokens are its prompt. Drafters look at neither its text nor its limits."""
    seq = Sequence(
        request_id=request_id,
        index=0,
        request=Request(
            tuple(tokens[:num_prompt]),
            sampling=sampling or Sampling(),
            prediction=tuple(prediction),
            cache_salt=salt,
        ),
        seed=0,
        tokens=list(tokens),
        constraint=constraint or FREE_TEXT,
        text=cast("Detokenizer", None),
        max_tokens=1000,
        end_tokens=frozenset(),
    )
    seq.followed.read(tokens[num_prompt:])
    return seq
