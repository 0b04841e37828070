"""The Python face on a tiny random model: prompts of every kind, streams that meet, queues that are full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.build import Options
from specdec.errors import ConfigError, InvalidRequest, ModelError
from specdec.grammar.spec import Regex
from specdec.llm import LLM
from specdec.request import Request, Sampling, Speculative, Stopping
from specdec.sequence import Emission
from tests.server.conftest import write_model

GREEDY = Sampling(temperature=0.0, seed=1)
SHORT = Stopping(max_tokens=3)
TWELVE = Stopping(max_tokens=12, ignore_eos=True)
TINY_OPTIONS = Options(device="cpu", dtype="float32", max_model_len=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def load(folder: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "kv_cache_tokens": 256}
    return LLM(str(folder), Options(**settings | options))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return load(folder)


def test_more_prompts_than_the_queue_holds_are_worked_off(folder: Path) -> None:
    llm = load(folder, max_waiting=4, max_num_seqs=2)
    prompts = [[token] for token in range(3, 23)]
    results = llm.generate(prompts, GREEDY, SHORT, n=2)
    (alone,) = llm.generate([prompts[-1]], GREEDY, SHORT)
    assert len(results) == 20
    assert all(len(choice.tokens) == 3 for result in results for choice in result.choices)
    assert results[-1].choices[0].tokens == alone.choices[0].tokens
    assert llm.loaded.engine.scheduler.pool.usage == 0


def test_a_prediction_is_text_or_tokens_and_changes_no_text(folder: Path) -> None:
    llm = load(folder, policy="fixed")
    told = llm.generate("hi", GREEDY, TWELVE).choices[0]
    edited = list(told.tokens)
    edited[5] = (edited[5] + 1) % 250
    for prediction, accepted in ((list(told.tokens), 12), (edited, 11), (tuple(edited[:3]), 3)):
        for sampling in (GREEDY, Sampling(temperature=0.0, speculative=Speculative("prediction", 4))):
            (result,) = llm.generate(["hi"], sampling, TWELVE, prediction=prediction)
            choice = result.choices[0]
            assert (choice.tokens, choice.text) == (told.tokens, told.text)
            assert choice.num_predicted == accepted
            assert choice.acceptance.by_source["prediction"].accepted_tokens >= accepted // 2
            assert choice.acceptance.draws < 12
    spelled = Stopping(max_tokens=12)
    abc = llm.generate("hi", GREEDY, spelled, constraint=Regex("[a-z]{12}")).text
    same = llm.generate("hi", GREEDY, spelled, constraint=Regex("[a-z]{12}"), prediction=abc).choices[0]
    assert (same.text, same.num_predicted) == (abc, 12)
    messages = [{"role": "user", "content": "hi"}]
    answer = llm.chat(messages, GREEDY, spelled, constraint=Regex("[a-z]{12}")).text
    assert (
        llm.chat(messages, GREEDY, spelled, constraint=Regex("[a-z]{12}"), prediction=answer).choices[0].text == answer
    )
    stream = llm.stream("hi", GREEDY, spelled, constraint=Regex("[a-z]{12}"), prediction=abc)
    assert "".join(emission.text for emission in stream) == abc


@pytest.mark.parametrize("prediction", [5, None, b"ab", [1.0], [True], ["a"], [10**6], "\ud800"])
def test_a_prediction_that_is_none_is_refused_by_name(llm: LLM, prediction: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate("hi", GREEDY, SHORT, prediction=prediction)
    assert caught.value.param == "prediction"


@pytest.mark.parametrize(
    ("prompts", "param"),
    [
        ([1, 2, 3], "prompt"),
        ([None], "prompt"),
        ([b"ab"], "prompt"),
        ([[1.0]], "prompt"),
        ([[True]], "prompt"),
        ([[]], "prompt"),
        ([[10**6]], "prompt"),
        (["fine", "\ud800"], "prompt"),
        (b"ab", "prompts"),
        (None, "prompts"),
        (5, "prompts"),
    ],
)
def test_a_prompt_that_is_none_is_refused_by_name_and_leaves_nothing_behind(llm: LLM, prompts: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, GREEDY, SHORT)
    assert caught.value.param == param
    assert not llm.loaded.engine.has_work


def test_token_ids_may_be_any_sequence_of_them(llm: LLM) -> None:
    told = [
        [token for part in llm.stream(prompt, GREEDY, SHORT) for token in part.tokens]
        for prompt in ([5, 6], (5, 6), range(5, 7))
    ]
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": {"temperature": 0}}, "sampling"),
        ({"sampling": {}}, "sampling"),
        ({"sampling": SHORT}, "sampling"),
        ({"stopping": {"max_tokens": 3}}, "stopping"),
        ({"stopping": GREEDY}, "stopping"),
        ({"constraint": {"type": "object"}}, "grammar"),
    ],
)
def test_what_shapes_a_text_has_its_own_type(llm: LLM, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate("a", **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("option", ["max_model_len", "kv_cache_tokens"])
def test_a_size_of_nothing_is_no_default(folder: Path, option: str) -> None:
    with pytest.raises(ConfigError, match="got 0"):
        load(folder, **{option: 0})


@pytest.mark.parametrize("default", [{"temperature": 5}, {"top_k": 50.5}, {"top_p": "all"}, {"repetition_penalty": 0}])
def test_a_default_that_no_request_could_have_is_the_model_s_fault(tmp_path: Path, default: dict[str, Any]) -> None:
    folder = write_model(tmp_path / "odd")
    (folder / "generation_config.json").write_text(json.dumps(default))
    with pytest.raises(ModelError, match=rf"generation_config.json: {next(iter(default))}: "):
        load(folder)
    assert load(folder, use_generation_config=False).loaded.default_sampling == Sampling()


def text_of(parts: list[Emission]) -> str:
    return "".join(part.text for part in parts)


def test_streams_and_batches_that_meet_in_one_engine_keep_their_texts(llm: LLM) -> None:
    stopping = Stopping(max_tokens=12)
    first, second = llm.stream("hello", GREEDY, stopping), llm.stream("other", GREEDY, stopping)
    parts = {"hello": [next(first)], "other": [next(second)]}
    parts["hello"].append(next(first))
    results = llm.generate(["hello", "other"], GREEDY, stopping)
    parts["other"] += second
    parts["hello"] += first
    assert [text_of(parts["hello"]), text_of(parts["other"])] == [result.text for result in results]


def test_a_stream_closed_halfway_frees_what_it_held(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY, Stopping(max_tokens=40), n=3)
    next(stream)
    other = llm.stream("other", GREEDY, SHORT)
    parts = [next(other)]
    stream.close()  # type: ignore[attr-defined]
    parts += other
    assert sum(len(part.tokens) for part in parts) == 3
    assert not llm.loaded.engine.has_work
    assert llm.loaded.engine.scheduler.pool.usage == 0


def test_numbers_of_any_size_are_refused_in_words() -> None:
    for make, param in (
        (lambda: Sampling(temperature=10**5000), "temperature"),
        (lambda: Sampling(seed=10**5000), "seed"),
        (lambda: Stopping(max_tokens=-(10**5000)), "max_tokens"),
        (lambda: Request((1,), n=10**5000), "n"),
    ):
        with pytest.raises(InvalidRequest, match=r"got an integer of \d+ bits") as caught:
            make()
        assert caught.value.param == param


def test_a_model_s_own_sampling_holds_where_none_is_given(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "top_k": -1, "eos_token_id": 258}')
    greedy = LLM(str(folder), TINY_OPTIONS).generate("abc", Sampling(temperature=0.0), TWELVE).choices[0].tokens
    assert LLM(str(folder), TINY_OPTIONS).generate("abc", stopping=TWELVE).choices[0].tokens == greedy
    (folder / "generation_config.json").write_text('{"temperature": 7.0, "eos_token_id": 258}')
    with pytest.raises(ModelError, match=r"generation_config.json: temperature: must be at least 0.0 and at most 2.0"):
        LLM(str(folder), TINY_OPTIONS)


def test_a_stream_shows_what_generate_returns_choice_by_choice(llm: LLM) -> None:
    sampling = Sampling(seed=3)
    whole = llm.generate("abc", sampling, TWELVE, n=3)
    streamed = dict.fromkeys(range(3), "")
    for emission in llm.stream("abc", sampling, TWELVE, n=3):
        streamed[emission.seq.index] += emission.text
    assert [choice.text for choice in whole.choices] == list(streamed.values())
    assert len({choice.text for choice in whole.choices}) == 3
    assert all(len(choice.tokens) == 12 and choice.finish_reason == "length" for choice in whole.choices)
