"""How often the guess of each rank of a drafter that is a model is what the target picks, by depth: what static trees
are made of (Cai et al., Medusa, arXiv 2401.10774, 2.3.3). Prints nothing.

A rank at a depth counts where the path to it was right, so a path is worth the product of its shares.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from specdec.drafters.model_drafter import ModelDrafter, RankCounts
from specdec.errors import ConfigError
from specdec.evals.prompts import EvalPrompt
from specdec.evals.runs import watch
from specdec.llm import LLM
from specdec.request import Sampling, Stopping


def measure(
    llm: LLM,
    prompts: Seq[EvalPrompt],
    sampling: Sampling,
    stopping: Stopping,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Answer every prompt, and count. Raises `ConfigError` unless exactly one drafter of the engine is a model."""
    found = [one for one in llm.loaded.engine.drafting.drafters if isinstance(one, ModelDrafter)]
    if len(found) != 1:
        raise ConfigError(f"rank accuracy is that of one drafter that is a model; {len(found)} run here")
    (drafter,) = found
    drafter.ranks = RankCounts()  # without what it guessed before, as when its costs were measured
    for done, prompt in enumerate(prompts, 1):
        ids = llm.chat_prompt(prompt.messages)
        watch(llm.loaded.engine, llm.request(ids, sampling, stopping, constraint=prompt.constraint))
        if progress is not None:
            progress(done, len(prompts))
    return {"drafter": drafter.names[0], "draws": drafter.ranks.draws, "rank_accuracy": drafter.ranks.accuracy()}
