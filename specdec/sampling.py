"""What the target picks at a row: the one function that makes scores, and the one draw.

V vocabulary. Rows are processed when the walk visits them, so a tree costs sampling only along its accepted path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.errors import DeadEnd, NumericalError
from specdec.kernels.sample import best, log_probabilities, penalize, perturbed
from specdec.mask import TokenMask
from specdec.request import Sampling
from specdec.sequence import Logprob, Sequence, Span


class Picks:
    """The picks of one step, made when they are asked for."""

    def __init__(self, logits_LV: Tensor, mask: TokenMask) -> None:
        if logits_LV.device.type != "cpu":
            mask.fill()  # while the accelerator is busy
        self._logits_LV: NDArray[np.float32] = logits_LV.cpu().numpy()
        self._mask = mask

    def at(self, span: Span, node: int, path: Seq[int]) -> tuple[int, Logprob | None]:
        """The token that the target draws after `node`, reached over the draft tokens `path`, and its raw logprob.

        Raises `DeadEnd` where nothing is allowed and `NumericalError` where the scores are not numbers.
        """
        seq, row = span.seq, span.first_logit + node
        logits_V = self._logits_LV[row]
        scores_V = scores(logits_V, seq, path, self._mask.allowed(row))
        token = best(*compared(scores_V, seq, len(path)))
        sampling = seq.request.sampling
        if sampling.logprobs is None:
            return token, None
        logprob, top = log_probabilities(logits_V, token, sampling.logprobs)
        return token, Logprob(token, logprob, tuple(top))


def compared(
    scores_V: NDArray[np.float32], seq: Sequence, depth: int
) -> tuple[NDArray[np.intp] | None, NDArray[np.float32] | NDArray[np.float64]]:
    """What the draw `depth` tokens past the last known one compares: surviving ids (None: all) and perturbed scores."""
    sampling = seq.request.sampling
    return perturbed(
        scores_V,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=seq.seed,
        position=len(seq.tokens) + depth,
    )


def scores(
    logits_V: NDArray[np.float32], seq: Sequence, path: Seq[int], allowed_V: NDArray[np.bool_] | None
) -> NDArray[np.float32]:
    """fp32 scores `[V]` of one row: penalties, logit_bias, bans, grammar mask, in this order (docs/design.md, 3).

    `path` are the draft tokens between the last known token and the row. The logits are not changed. Raises `DeadEnd`
    where everything is forbidden and `NumericalError` where the logits hold NaN or infinity, or nothing finite: also
    where these tokens are masked, since the log-probabilities of the others are no numbers then either. It is raised
    too where penalties make a score that may be drawn NaN or infinite.
    """
    position = len(seq.tokens) + len(path)
    if not math.isfinite(logits_V.max()):
        raise no_logits(position)
    sampling = seq.request.sampling
    scores_V = logits_V
    penalized = is_penalized(sampling)
    banned = _banned(seq, len(path), allowed_V)
    if penalized or sampling.logit_bias or banned or allowed_V is not None:
        scores_V = logits_V.copy()
    if penalized:
        penalize(
            scores_V,
            *seq.counts().after(path),
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
        )
    for token, bias in sampling.logit_bias.items():
        scores_V[token] += np.float32(bias)
    if banned:
        scores_V[banned] = -np.inf
    if allowed_V is not None:
        forbid(scores_V, allowed_V)
    if scores_V is not logits_V:
        highest = scores_V.max()
        if highest == -math.inf:
            raise nothing_allowed(position)
        if not highest < math.inf:
            raise no_scores(position)
    return scores_V


def no_logits(position: int) -> NumericalError:
    """What is wrong with a row of the model at `position` from which nothing can be drawn."""
    return NumericalError(f"the model's logits at position {position} are not numbers")


def no_scores(position: int) -> NumericalError:
    """What is wrong with a row that was fine until it was penalized."""
    return NumericalError(f"the scores at position {position} are not numbers once penalties are applied")


def nothing_allowed(position: int) -> DeadEnd:
    """What is wrong where everything is forbidden."""
    return DeadEnd(f"no token is allowed at position {position}")


def is_penalized(sampling: Sampling) -> bool:
    """Whether any penalty changes scores."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def forbid(scores_V: NDArray[np.float32], allowed_V: NDArray[np.bool_]) -> None:
    """Set the scores of all other tokens to minus infinity, in place. Takes the shorter way: NumPy's boolean indexing
    costs most where half of a row is set."""
    if 2 * int(np.count_nonzero(allowed_V)) > len(allowed_V):
        scores_V[~allowed_V] = -np.inf
        return
    ids = np.flatnonzero(allowed_V)
    kept = scores_V[ids]
    scores_V.fill(-np.inf)
    scores_V[ids] = kept


def bans(seq: Sequence, depth: int, constrained: bool) -> list[int]:
    """Tokens, ascending, that may not be drawn `depth` tokens past the last known one, unless a grammar is complete:
    where they are all that it allows, nothing is banned.

    Stops are banned before `min_tokens`, and end tokens all along for `ignore_eos` where a grammar has a say
    (`constrained`), since it has nothing to say after its end.
    """
    stopping = seq.request.stopping
    banned: set[int] = set()
    if seq.num_output + depth < stopping.min_tokens:
        banned.update(seq.end_tokens, stopping.stop_token_ids)
    if stopping.ignore_eos and constrained:
        banned.update(seq.end_tokens)
    return sorted(banned)


def _banned(seq: Sequence, depth: int, allowed_V: NDArray[np.bool_] | None) -> list[int]:
    """`bans`, or none where the grammar leaves nothing else."""
    tokens = bans(seq, depth, allowed_V is not None)
    if tokens and allowed_V is not None and int(allowed_V[tokens].sum()) == int(allowed_V.sum()):
        return []
    return tokens
