"""The server's options: what is wrong is named before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.errors import ConfigError
from specdec.server.app import ServerConfig


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 70_000},
        {"api_keys": ("",)},
        {"api_keys": ("two words",)},
        {"api_keys": ("schlüssel",)},
        {"served_model_names": ("",)},
        {"served_model_names": ("a\nb",)},
        {"max_body_bytes": 0},
        {"body_timeout": 0},
        {"shutdown_timeout": -1},
        {"log_level": "loud"},
    ],
    ids=str,
)
def test_a_wrong_option_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerConfig(**options)


def test_only_this_machine_is_served_unless_asked_otherwise() -> None:
    assert ServerConfig().host == "127.0.0.1"
