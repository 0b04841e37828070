"""Requests: every value out of range, of the wrong type or not a number is refused, and the error names its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specdec.errors import InvalidRequest, SpecdecError
from specdec.request import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    Request,
    Sampling,
    Speculative,
    Stopping,
)

NUMBERS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-9, 10.0),
}
INTEGERS = {"top_k": (0, 2**31 - 1), "seed": (-(2**63), 2**64 - 1), "logprobs": (0, MAX_LOGPROBS)}
NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, "1", b"1", [1.0], (), 1j]
NOT_INTEGERS = [1.0, True, "1", [1], math.nan]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, None])
def test_a_number_that_is_not_one_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Sampling(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
    assert caught.value.code == "invalid_value"


@pytest.mark.parametrize(("field", "limits"), NUMBERS.items())
def test_numbers_keep_their_range(field: str, limits: tuple[float, float]) -> None:
    low, high = limits
    for value in (low, high):
        Sampling(**{field: value})  # type: ignore[arg-type]
    for value in (low - 0.001, high + 0.001, -1e9, 1e9, -(10**9), 10**9, 10**400):
        with pytest.raises(InvalidRequest, match=rf"^{field}: must be .* and at most {high}, got {value}$"):
            Sampling(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["top_p", "repetition_penalty"])
def test_what_must_be_above_zero_is_not_zero(field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{field}: must be above 0"):
        Sampling(**{field: 0.0})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", NOT_INTEGERS)
def test_an_integer_that_is_not_one_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: must be an integer, got "):
        Sampling(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "limits"), INTEGERS.items())
def test_integers_keep_their_range(field: str, limits: tuple[int, int]) -> None:
    low, high = limits
    for value in (low, high):
        Sampling(**{field: value})  # type: ignore[arg-type]
    for value in (low - 1, high + 1, -(10**30), 10**30):
        with pytest.raises(InvalidRequest, match=f"^{field}: must be between {low} and {high}, got {value}"):
            Sampling(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bias", "param"),
    [
        ([(1, 2.0)], "logit_bias"),
        ({"5": 1.0}, "logit_bias"),
        ({True: 1.0}, "logit_bias"),
        ({-1: 1.0}, "logit_bias"),
        ({5: 100.5}, "logit_bias.5"),
        ({5: math.nan}, "logit_bias.5"),
        ({5: "1"}, "logit_bias.5"),
        ({5: None}, "logit_bias.5"),
    ],
)
def test_a_bad_logit_bias_names_the_entry(bias: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Sampling(logit_bias=bias)
    assert caught.value.param == param


@pytest.mark.parametrize("value", [1, 0, None, "true"])
@pytest.mark.parametrize("field", ["ignore_eos", "include_stop"])
def test_flags_are_booleans(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: must be true or false"):
        Stopping(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^speculative: must be true, false or a Speculative, got "):
        Sampling(speculative=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"method": ""}, "speculative.method"),
        ({"method": "ngram,"}, "speculative.method"),
        ({"method": ","}, "speculative.method"),
        ({"method": "a" * 257}, "speculative.method"),
        ({"method": "a\ud800"}, "speculative.method"),
        ({"method": ("ngram",)}, "speculative.method"),
        ({"method": 1}, "speculative.method"),
        ({"max_nodes": -1}, "speculative.max_nodes"),
        ({"max_nodes": 63}, "speculative.max_nodes"),
        ({"max_nodes": True}, "speculative.max_nodes"),
        ({"max_nodes": 1.0}, "speculative.max_nodes"),
        ({"max_nodes": "9"}, "speculative.max_nodes"),
    ],
)
def test_what_is_no_choice_of_guesses_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Speculative(**fields)
    assert caught.value.param == param


def test_the_short_forms_of_speculative_are_its_long_ones() -> None:
    assert Sampling().guesses == Sampling(speculative=True).guesses == Speculative()
    assert Sampling(speculative=False).guesses.limit == 0
    assert Speculative().limit == 62
    assert Speculative(max_nodes=0).limit == 0
    both = Speculative(" forced, suffix ", 5)
    assert Sampling(speculative=both).guesses is both
    assert (both.methods, both.limit) == (("forced", "suffix"), 5)


@pytest.mark.parametrize("speculative", [False, Speculative(max_nodes=0), Speculative("suffix")])
def test_a_prediction_that_no_drafter_may_read_is_refused(speculative: bool | Speculative) -> None:
    sampling = Sampling(speculative=speculative)
    Request((1,), sampling)
    with pytest.raises(InvalidRequest, match=r"^prediction: is of no use"):
        Request((1,), sampling, prediction=(2,))
    for allowed in (True, Speculative("suffix,prediction"), Speculative(max_nodes=1)):
        Request((1,), Sampling(speculative=allowed), prediction=(2,))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": None}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": "x"}, "stop"),
        ({"stop": ["x"]}, "stop"),
        ({"stop": ("",)}, "stop"),
        ({"stop": (1,)}, "stop"),
        ({"stop": ("a\ud800",)}, "stop"),
        ({"stop": ("x" * (MAX_STOP_LENGTH + 1),)}, "stop"),
        ({"stop": ("x",) * (MAX_STOP_STRINGS + 1)}, "stop"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": (True,)}, "stop_token_ids"),
        ({"stop_token_ids": ("1",)}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": None}, "stop_token_ids"),
    ],
)
def test_a_bad_end_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Stopping(**fields)
    assert caught.value.param == param


def test_the_largest_ends_are_taken() -> None:
    Stopping(
        max_tokens=2**31 - 1,
        min_tokens=2**31 - 1,
        stop=tuple("x" * MAX_STOP_LENGTH for _ in range(MAX_STOP_STRINGS)),
        stop_token_ids=(0, 2**31 - 1),
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (1.0,)}, "prompt"),
        ({"prompt": (1, True)}, "prompt"),
        ({"prompt": (1, "2")}, "prompt"),
        ({"prompt": "abc"}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prediction": [1]}, "prediction"),
        ({"prediction": "abc"}, "prediction"),
        ({"prediction": (1, True)}, "prediction"),
        ({"n": 0}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": True}, "n"),
        ({"n": None}, "n"),
        ({"n": 1.0}, "n"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": None}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
    ],
)
def test_a_bad_request_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Request(**{"prompt": (1,), **fields})
    assert caught.value.param == param


def test_an_invalid_request_is_a_value_error_and_ours() -> None:
    with pytest.raises(ValueError, match=r"^n: must be between 1 and 128, got 0$") as caught:
        Request((1,), n=0)
    assert isinstance(caught.value, SpecdecError)


def test_requests_cannot_be_changed() -> None:
    request = Request((1,))
    for value, field in ((request, "n"), (request.sampling, "seed"), (request.stopping, "max_tokens")):
        with pytest.raises(AttributeError):
            setattr(value, field, 2)
    with pytest.raises(TypeError):
        request.sampling.logit_bias[1] = 2.0  # type: ignore[index]
