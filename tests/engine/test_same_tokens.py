"""The law of the project: a drafter changes speed, never text. Checked by equality with the root-only run."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from specdec.config import EngineConfig
from specdec.drafters.forced import ForcedDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.prediction import PredictionDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.engine import Engine
from specdec.grammar.spec import JsonSchema, Regex, Spec
from specdec.policy import drafter_of
from specdec.protocols import Drafter
from specdec.request import PREDICTION, Request, Sampling, Speculative, Stopping
from tests.drafters_for_tests import OracleDrafter, RandomDrafter
from tests.fakes import Outcome, run, texts
from tests.grammar.small_tokenizer import END_IDS, VOCAB_SIZE, compiler, encode
from tests.tiny import tiny_engine

MAX_MODEL_LEN = 96
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["quick brown", "quick red", "lazy"]},
        "tags": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SPECS: dict[str, Spec | None] = {
    "free": None,
    "regex": Regex(r"(the |quick |brown |[a-f]{2,4},){3,9}\."),
    "schema": JsonSchema(SCHEMA),
    "open": JsonSchema({"type": "array", "items": {"additionalProperties": DIGIT, "minProperties": 1}, "minItems": 9}),
}
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, seed=1),
    "filtered": Sampling(temperature=0.7, top_p=0.9, top_k=40, min_p=0.02, seed=2, logprobs=2),
    "penalties": Sampling(
        temperature=1.0,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias={7: 2.0, 9: -3.0},
        seed=3,
    ),
}
ROOMY = 8 * (MAX_MODEL_LEN + 64)
CONFIGS = {
    "plain": EngineConfig(MAX_MODEL_LEN, ROOMY, max_drafts=62),
    "chunked": EngineConfig(MAX_MODEL_LEN, ROOMY, max_rows=9, block_size=4),
    "preempting": EngineConfig(MAX_MODEL_LEN, MAX_MODEL_LEN + 64, block_size=8, max_drafts=24),
    "blocks of 1": EngineConfig(MAX_MODEL_LEN, ROOMY, block_size=1, max_drafts=20),
    "blocks of 16": EngineConfig(MAX_MODEL_LEN, ROOMY, block_size=16, max_drafts=20),
    "uncached": EngineConfig(MAX_MODEL_LEN, ROOMY, block_size=2, max_drafts=62, prefix_caching=False),
}
TOKEN_BYTES = [bytes([97 + token % 26]) for token in range(VOCAB_SIZE)]
Texts = dict[tuple[str, int], Outcome]


def requests(spec: Spec | None, sampling: Sampling) -> list[Request]:
    """Prompts of many lengths, two of them equal, one with three choices."""
    rng = random.Random(11)
    grammar = None if spec is None else compiler().compile(spec)
    lines = [
        "the quick brown fox jumps over the quick brown",
        '{"name":"Ada","kind":"lazy","tags":[1,2]}',
        "a",
        "fox " * 9,
    ]
    prompts = [encode(line) for line in [*lines, lines[0]]]
    prompts.append([rng.randrange(3, VOCAB_SIZE) for _ in range(40)])
    return [
        Request(tuple(prompt), sampling, Stopping(max_tokens=48), grammar, n=3 if index == 1 else 1)
        for index, prompt in enumerate(prompts)
    ]


def new_engine(family: str, drafters: Seq[Drafter], config: EngineConfig) -> Engine:
    return tiny_engine(family, drafters, config, token_bytes=TOKEN_BYTES, end_tokens=END_IDS)


@functools.cache
def root_only(family: str, spec: str, sampling: str) -> Texts:
    engine = new_engine(family, [], CONFIGS["plain"])
    return texts(run(engine, requests(SPECS[spec], SAMPLINGS[sampling])))


def drafters(family: str, spec: str, sampling: str) -> dict[str, Seq[Drafter]]:
    """One line a drafter."""
    asked = requests(SPECS[spec], SAMPLINGS[sampling])
    told = root_only(family, spec, sampling)
    truth = {asked[int(key[0][1:])].prompt: told[key].tokens for key in told if key[1] == 0}
    return {
        "none": [NoDrafter()],
        "ngram": [NgramDrafter()],
        "forced": [ForcedDrafter()],
        "suffix": [SuffixDrafter()],
        "prediction": [PredictionDrafter()],
        "forced,suffix": [ForcedDrafter(), SuffixDrafter()],
        "forced,ngram": [ForcedDrafter(), NgramDrafter()],
        "random": [RandomDrafter(5, VOCAB_SIZE)],
        "oracle": [OracleDrafter(truth, VOCAB_SIZE, mistake_rate=0.1, branch_rate=0.4)],
        "oracle,random": [OracleDrafter(truth, VOCAB_SIZE, mistake_rate=0.2), RandomDrafter(6, VOCAB_SIZE)],
    }


DRAFTERS = [
    "none", "ngram", "suffix", "forced", "prediction", "forced,suffix", "forced,ngram", "random", "oracle",
    "oracle,random",
]  # fmt: skip


def predicted(asked: list[Request], told: Texts) -> list[Request]:
    """The requests with their first answers, edited here and there, as predictions."""
    rng = random.Random(4)
    known = []
    for number, request in enumerate(asked):
        answer = list(told[f"r{number}", 0].tokens)
        for _ in range(len(answer) // 12):
            place = rng.randrange(len(answer))
            answer[place : place + rng.randint(0, 2)] = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 2))]
        known.append(replace(request, prediction=tuple(answer)))
    return known


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("spec", ["free", "regex", "schema"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_tokens(drafter: str, spec: str, sampling: str, config: str) -> None:
    engine = new_engine("llama", drafters("llama", spec, sampling)[drafter], CONFIGS[config])
    asked, told = requests(SPECS[spec], SAMPLINGS[sampling]), root_only("llama", spec, sampling)
    assert texts(run(engine, predicted(asked, told) if drafter == PREDICTION else asked)) == told
    assert engine.metrics.drafter_errors == 0
    assert engine.scheduler.pool.usage == 0
    if config == "preempting":
        assert engine.metrics.preemptions > 0
    if drafter.startswith(("oracle", PREDICTION)) and config != "chunked":
        assert engine.metrics.acceptance.accepted_tokens > 50  # paths, not only roots, were committed


CHOICES: list[bool | Speculative] = [
    True, False, Speculative("ngram"), Speculative("forced, prediction", 5), Speculative(max_nodes=1),
    Speculative("suffix,ngram", 62),
]  # fmt: skip


@pytest.mark.parametrize("config", ["plain", "chunked", "preempting"])
@pytest.mark.parametrize("spec", ["free", "schema"])
def test_same_tokens_whatever_guesses_each_request_lets_in(spec: str, config: str) -> None:
    drafters: list[Drafter] = [PredictionDrafter(), ForcedDrafter(), SuffixDrafter(), NgramDrafter()]
    engine = new_engine("llama", drafters, CONFIGS[config])
    told = root_only("llama", spec, "filtered")
    asked = [
        replace(
            request,
            sampling=replace(request.sampling, speculative=choice),
            prediction=request.prediction if choice in (CHOICES[0], CHOICES[3], CHOICES[4]) else (),
        )
        for request, choice in zip(predicted(requests(SPECS[spec], SAMPLINGS["filtered"]), told), CHOICES, strict=True)
    ]
    emissions = run(engine, asked)
    assert texts(emissions) == told
    assert engine.metrics.drafter_errors == 0
    for parts in emissions.values():
        allowed = parts[0].seq.request.sampling.guesses
        assert max(part.num_drafts for part in parts) <= allowed.limit
        heard = {drafter_of(source) for source in parts[0].seq.acceptance.by_source}
        assert heard <= {*(allowed.methods or engine.drafting.names)}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("drafter", ["forced,suffix", "oracle,random"])
def test_same_tokens_where_the_text_is_followed_beside_the_grammar(drafter: str, config: str) -> None:
    test_same_tokens(drafter, "open", "filtered", config)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("drafter", ["random", "oracle", "oracle,random"])
def test_same_tokens_across_a_window_edge(drafter: str, config: str) -> None:
    """A window of 8 positions: trees hang over its edge, and over the borders of blocks."""
    engine = new_engine("gemma3_text", drafters("gemma3_text", "free", "filtered")[drafter], CONFIGS[config])
    assert texts(run(engine, requests(None, SAMPLINGS["filtered"]))) == root_only("gemma3_text", "free", "filtered")
