"""What a user says about the server, as `EngineConfig` has it of the engine. Each field is a flag of `eightfold serve`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from eightfold.config import option
from eightfold.errors import InputError

EngineKind: TypeAlias = Literal["auto", "null"]
MetricsNames: TypeAlias = Literal["vllm", "sglang", "both"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a user asks of a server."""

    host: str = option("127.0.0.1", help="Address to listen on; 0.0.0.0 is every one of this machine.")
    port: int = option(30000, help="Port to listen on; 0 takes a free one, which the first line of output names.")
    api_key: str | None = option(
        None, help="What clients have to send as Authorization: Bearer, but for /health, /ready and the chat page."
    )
    admin_api_key: str | None = option(None, help="The same for the routes that change or steer the engine.")
    served_model_name: tuple[str, ...] = option(
        (), help="What requests may call the model, the first being what answers call it; the default is MODEL."
    )
    chat_template: str | None = option(None, help="A file with a chat template in place of the tokenizer's own.")
    reasoning_parser: str | None = option(None, help="How the model marks its reasoning.")
    tool_call_parser: str | None = option(None, help="How the model writes tool calls.")
    max_queued_requests: int = option(4096, help="Requests that may wait beside those that run; more are answered 429.")
    request_timeout: float | None = option(None, help="Seconds for one request, after which it ends in an error.")
    stream_timeout: float = option(60.0, help="Seconds that a client may take nothing of its stream before it is dropped.")
    stream_interval: int = option(1, help="Tokens in a piece of a stream, but for the first and the last.")
    max_request_bytes: int = option(64 * 2**20, help="Largest body of a request.")
    shutdown_timeout: float = option(30.0, help="Seconds that running requests have to end after SIGTERM.")
    health_stall_seconds: float = option(
        30.0, help="Silence of the engine after which /health fails; longer than the longest step."
    )
    watchdog_timeout: float = option(300.0, help="Seconds for one step, after which the server prints its stacks and ends.")
    allowed_origins: tuple[str, ...] = option((), help="Web pages of other origins that may call the API; * is all.")
    metrics_names: MetricsNames = option("vllm", choices=MetricsNames, help="Whose names /metrics uses.")
    weight_version: str = option("default", help="A name for the weights, which /model_info tells.")
    log_level: LogLevel = option("info", choices=LogLevel, help="Least important messages that are logged, to stderr.")
    log_requests: bool = option(False, help="Log the bodies of requests, prompts included.")
    disable_docs: bool = option(False, help="Leave out /docs and /openapi.json.")
    engine: EngineKind = option("auto", choices=EngineKind, help="null measures the server itself, with an engine of no cost.")
    null_step_ms: float = option(0.0, help="Milliseconds that a step of the null engine takes.")

    def __post_init__(self) -> None:
        for item in fields(self):
            value, words = getattr(self, item.name), item.metadata["choices"]
            if value is None and item.default is None:
                continue
            check, expected = _CHECKS.get(item.name, (_is_text, "a text that is not empty"))
            if words:
                check, expected = words.__contains__, f"one of: {', '.join(words)}"
            elif isinstance(item.default, bool):
                check, expected = _is_bool, "true or false"
            if not check(value):
                raise InputError(item.name, got=_shown(item.name, value), expected=expected)
        if self.admin_api_key is not None and self.api_key is None:
            raise InputError(
                "admin_api_key",
                got="one without an api_key",
                expected="both",
                remedy="Without --api-key every other route is open to everybody.",
            )
        if self.null_step_ms and self.engine != "null":
            raise InputError("null_step_ms", got=self.null_step_ms, expected="it to go with engine='null'")


def _shown(name: str, value: object) -> str:
    """A value for an error message, which never repeats a secret."""
    return ("one that is not" if value else "an empty text") if name.endswith("api_key") else repr(value)


def _whole(low: int, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_duration(value: Any) -> bool:
    return value == 0 or _is_positive(value)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_key(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[!-~]+", value) is not None


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_text, value))


def _are_origins(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(item, str) and re.fullmatch(r"\*|https?://[^/\s]+", item) for item in value
    )


_SECONDS = "a number of seconds above 0"
_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "host": (_is_text, "an address such as 127.0.0.1 or 0.0.0.0"),
    "port": (_whole(0, 65535), "a whole number from 0 to 65535"),
    "api_key": (_is_key, "printable ASCII without spaces"),
    "admin_api_key": (_is_key, "printable ASCII without spaces"),
    "served_model_name": (_are_names, "a tuple of names that are not empty"),
    "chat_template": (lambda value: Path(value).is_file(), "a file with a Jinja template"),
    "max_queued_requests": (_whole(0), "a whole number, at least 0"),
    "request_timeout": (_is_positive, _SECONDS),
    "stream_timeout": (_is_positive, _SECONDS),
    "stream_interval": (_whole(1), "a whole number, at least 1"),
    "max_request_bytes": (_whole(1), "a whole number, at least 1"),
    "shutdown_timeout": (_is_duration, "a number of seconds, at least 0"),
    "health_stall_seconds": (lambda value: _is_positive(value) and value >= 1, "a number of seconds, at least 1"),
    "watchdog_timeout": (_is_positive, _SECONDS),
    "allowed_origins": (_are_origins, "a tuple of origins such as https://example.org, or *"),
    "null_step_ms": (_is_duration, "a number of milliseconds, at least 0"),
}
