"""How often a draft that shares the target's noise is right, beside other ways to accept drafts. Prints nothing.

At each position of texts that the target draws, with p the target's law and q the draft's (the target's own first
layers), both at the same temperature: rejection sampling accepts sum min(p, q), the most that any way can for one
draft; one coupled draft is right with probability sum over v of 1 / sum over u of max(p_u / p_v, q_u / q_v) (Daliri,
Musco, Suresh, arXiv 2408.07978); the best 2 and 4 guesses under the noise are counted over draws; a
draft without noise, the likeliest token, is right with probability p. P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.batch import Batch, Rows
from specdec.drafters.draft_model import Borrowed, CausalHead
from specdec.errors import ConfigError
from specdec.evals.prompts import EvalPrompt
from specdec.evals.runs import watch
from specdec.kernels.sample import GREEDY_BELOW, gumbel, noise_words
from specdec.kv import Pool
from specdec.llm import LLM
from specdec.request import Sampling, Stopping

GUESSES = (1, 2, 4)


def measure(
    llm: LLM,
    prompts: Seq[EvalPrompt],
    depth: int,
    *,
    temperature: float,
    max_tokens: int,
    draws: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Means over all positions of the texts that answer `prompts`, drafts being those of the first `depth` layers.

    Raises `ConfigError` for a depth that the model does not have, or a temperature at which nothing is drawn.
    """
    if temperature < GREEDY_BELOW:
        raise ConfigError(
            f"coupling is measured where tokens are drawn: temperature must be {GREEDY_BELOW:g} or more, "
            f"got {temperature}"
        )
    runner: Any = llm.loaded.engine.runner  # of a model in torch
    if not 1 <= depth <= len(runner.model.layers):
        raise ConfigError(f"layers must be between 1 and the model's {len(runner.model.layers)}, got {depth}")
    rows: list[dict[str, float]] = []
    stopping = Stopping(max_tokens=max_tokens)
    for done, prompt in enumerate(prompts, 1):
        ids = llm.chat_prompt(prompt.messages)
        sampling = Sampling(temperature=temperature, seed=seed + done, speculative=False)
        told = watch(llm.loaded.engine, llm.request(ids, sampling, stopping)).tokens
        target_PV, draft_PV = _logits(llm, [*ids, *told], depth)
        first = len(ids) - 1  # the row that draws the first token of the answer
        for row in range(first, first + len(told)):
            rows.append(
                _position(
                    target_PV[row] / temperature,
                    draft_PV[row] / temperature,
                    [gumbel(noise_words(draw, row, target_PV.shape[1])) for draw in range(draws)],
                )
            )
        if progress is not None:
            progress(done, len(prompts))
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return {"layers": depth, "of": len(runner.model.layers), "positions": len(rows), "draws": draws, **means}


def chain_acceptance(p_V: NDArray[np.float64], q_V: NDArray[np.float64]) -> float:
    """The probability that p and q take the same token under one Gumbel noise, exactly: terms are sorted by p / q, so
    that each sum of maxima is one of p's and one of q's."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_V = np.where(q_V > 0, p_V / q_V, np.inf)
    order = np.argsort(ratio_V, kind="stable")
    p, q = p_V[order], q_V[order]
    # max(p_u / p_v, q_u / q_v) is p_u / p_v where p_u / q_u is at least p_v / q_v: for u at v's place or behind it.
    p_after = np.cumsum(p[::-1])[::-1]
    q_before = np.cumsum(q) - q
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = 1.0 / (p_after / p + q_before / q)
    return float(np.where((p > 0) & (q > 0), terms, 0.0).sum())


def _position(
    target_V: NDArray[np.float64], draft_V: NDArray[np.float64], noises: Seq[NDArray[np.float64]]
) -> dict[str, float]:
    p_V, q_V = (np.exp(row_V - row_V.max()) for row_V in (target_V, draft_V))
    p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    hits = dict.fromkeys(GUESSES, 0)
    for noise_V in noises:
        pick = int((target_V + noise_V).argmax())
        perturbed_V = draft_V + noise_V
        rank = int((perturbed_V > perturbed_V[pick]).sum())
        for count in GUESSES:
            hits[count] += rank < count
    return {
        "rejection": float(np.minimum(p_V, q_V).sum()),
        "coupled_exact": chain_acceptance(p_V, q_V),
        **{f"coupled_{count}": hits[count] / len(noises) for count in GUESSES},
        "greedy": float(p_V[draft_V.argmax()]),
    }


@torch.inference_mode()
def _logits(llm: LLM, tokens: list[int], depth: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """fp64 logits `[P, V]` of a text, of the target and of its first layers, in blocks of an idle engine."""
    engine = llm.loaded.engine
    runner: Any = engine.runner
    pool, cache = engine.scheduler.pool, runner.cache
    blocks = pool.take(-(-len(tokens) // engine.config.block_size))
    assert blocks is not None, "the engine is not idle"
    try:
        rows = replace(Rows.known(blocks, tokens, 0), num_logits=len(tokens))
        target_PV = runner.forward(Batch.of([rows], engine.config.block_size)).logits_LV
        head = CausalHead("layer_skip", runner.model, runner.vocab_size, depth=depth)
        keys = cache.keys[0]
        alike = Pool(0, cache.block_size, str(keys.device), keys.dtype)
        hidden_PD = Borrowed(head, cache, alike).run([rows], None)
        draft_PV = head.logits(hidden_PD)
    finally:
        pool.release(blocks)
    return target_PV.double().cpu().numpy(), draft_PV.double().cpu().numpy()
