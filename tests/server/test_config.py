"""What a server's configuration accepts, and how it refuses."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.server.config import ServerConfig


def test_the_defaults_are_sglangs_and_safe() -> None:
    config = ServerConfig()
    assert (config.host, config.port, config.api_key, config.allowed_origins) == ("127.0.0.1", 30000, None, ())
    assert (config.shutdown_timeout, config.watchdog_timeout, config.stream_interval) == (30.0, 300.0, 1)
    assert not config.log_requests


def test_every_field_has_its_help() -> None:
    assert not [item.name for item in fields(ServerConfig) if not item.metadata["help"].endswith(".")]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port": 70000}, ("port", "70000", "0 to 65535")),
        ({"port": True}, ("port", "True")),
        ({"host": ""}, ("host", "an address")),
        ({"api_key": "two words"}, ("api_key", "printable ASCII")),
        ({"api_key": ""}, ("api_key",)),
        ({"admin_api_key": "a"}, ("admin_api_key", "api_key", "both")),
        ({"served_model_name": "a"}, ("served_model_name", "'a'", "a tuple")),
        ({"served_model_name": ("",)}, ("served_model_name", "not empty")),
        ({"chat_template": "/no/such/file"}, ("chat_template", "/no/such/file", "a file")),
        ({"max_queued_requests": -1}, ("max_queued_requests", "-1", "at least 0")),
        ({"request_timeout": 0}, ("request_timeout", "above 0")),
        ({"shutdown_timeout": -1.0}, ("shutdown_timeout", "at least 0")),
        ({"health_stall_seconds": 0.5}, ("health_stall_seconds", "at least 1")),
        ({"watchdog_timeout": float("inf")}, ("watchdog_timeout", "inf")),
        ({"max_request_bytes": 0}, ("max_request_bytes", "at least 1")),
        ({"allowed_origins": ("example.org",)}, ("allowed_origins", "https://example.org")),
        ({"metrics_names": "prometheus"}, ("metrics_names", "vllm, sglang, both")),
        ({"log_level": "loud"}, ("log_level", "debug, info")),
        ({"engine": "other"}, ("engine", "auto, null")),
        ({"null_step_ms": 5.0}, ("null_step_ms", "engine='null'")),
        ({"log_requests": 1}, ("log_requests", "true or false")),
    ],
)
def test_values_that_cannot_be_used_are_refused_by_name(values: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        ServerConfig(**values)
    for word in words:
        assert word in str(caught.value)


def test_a_refusal_does_not_repeat_a_secret() -> None:
    with pytest.raises(InputError) as caught:
        ServerConfig(api_key="my secret")
    assert "secret" not in str(caught.value)
