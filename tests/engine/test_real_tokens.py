"""The law on a real model. Where attention runs in C, texts are equal to the last token. Where it does not, rows of
other batches differ in the last bits of fp32 and a near tie may flip: the gap of the best two scores must be tiny."""

from __future__ import annotations

import functools

import pytest
import torch

from specdec.build import Options
from specdec.drafters.forced import ForcedDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.evals.exactness import difference
from specdec.evals.prompts import DEFAULT_PROMPTS, read_prompts
from specdec.kernels.tree_attention import serves
from specdec.llm import LLM
from specdec.request import Request, Sampling, Stopping
from tests.drafters_for_tests import OracleDrafter
from tests.fakes import run, texts

pytestmark = pytest.mark.weights
MAX_GAP = 1e-3


@functools.cache
def smollm2(quantize: str | None) -> LLM:
    # Room for all prompts at once, and every guess verified: else few drafts would be tried.
    options = Options(
        dtype="float32", quantize=quantize, max_model_len=1024, kv_cache_tokens=16_384, drafter="none", policy="fixed"
    )
    return LLM("smollm2-135m", options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize(
    ("num_prompts", "max_tokens"), [(3, 16), pytest.param(20, 64, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])]
)
def test_same_tokens_on_smollm2(num_prompts: int, max_tokens: int, quantize: str | None, temperature: float) -> None:
    """Drafts from the grammar, from lookup, and from an oracle that errs and branches, several requests at a time."""
    llm = smollm2(quantize)
    engine = llm.loaded.engine
    requests = [
        llm.request(
            llm.chat_prompt(prompt.messages),
            Sampling(temperature=temperature, seed=17),
            Stopping(max_tokens=max_tokens),
            constraint=prompt.constraint,
        )
        for prompt in read_prompts(DEFAULT_PROMPTS)[-num_prompts:]
    ]
    engine.drafting.drafters = ()
    plain: list[tuple[Request, tuple[int, ...]]] = []
    sequences = []
    for request in requests:  # one at a time: every draw is a row alone
        (parts,) = run(engine, [request], check=False).values()
        sequences.append(parts[-1].seq)
        plain.append((request, tuple(parts[-1].seq.tokens[len(request.prompt) :])))
    oracle = OracleDrafter(
        {request.prompt: tokens for request, tokens in plain}, engine.runner.vocab_size, 0.15, 0.3, seed=3
    )
    engine.drafting.drafters = (ForcedDrafter(), NgramDrafter(), oracle)
    before = engine.metrics.acceptance.accepted_tokens
    drafted = texts(run(engine, requests))
    assert engine.metrics.acceptance.accepted_tokens - before > num_prompts * max_tokens // 4
    differences = [
        found
        for number, seq in enumerate(sequences)
        if (found := difference(engine, seq, drafted[f"r{number}", 0].tokens)) is not None
    ]
    equal = f"{num_prompts - len(differences)} of {num_prompts} equal"
    print(f"{quantize or 'float32'}, temperature {temperature}: {equal}; {differences}")
    assert quantize or all(found.gap <= MAX_GAP for found in differences)
    if serves(64, torch.float32, "cpu"):  # every part of the forward gives a row the same bits in any company
        assert not differences
