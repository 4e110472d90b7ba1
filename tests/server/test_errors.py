"""Every error has a status and OpenAI's body."""

from __future__ import annotations

import json

import pytest

from eightfold.errors import CheckpointError, InputError
from eightfold.server.errors import BodyTooLargeError, UnavailableError, answer_to
from eightfold.server.protocol import UnknownModelError
from eightfold.server.token_stream import EngineDiedError, RefusedError

PARTS = {"got": 1, "expected": "2"}


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InputError("n", got=0, expected="at least 1"), 400, "invalid_request_error", "n", None),
        (CheckpointError("model", got=0, expected="a folder"), 400, "invalid_request_error", "model", None),
        (RefusedError("prompt", got=0, expected="more"), 400, "invalid_request_error", "prompt", None),
        (UnknownModelError("model", got="a", expected="b"), 404, "invalid_request_error", "model", "model_not_found"),
        (BodyTooLargeError(10), 413, "invalid_request_error", None, "body_too_large"),
        (RefusedError("the queue", got=9, expected="8", kind="queue_full"), 429, "rate_limit_error", None, "queue_full"),
        (UnavailableError("it loads", "loading"), 503, "server_error", None, "loading"),
        (EngineDiedError("it died"), 503, "server_error", None, "engine_died"),
        (TimeoutError(), 504, "server_error", None, "timeout"),
        (RuntimeError("a secret"), 500, "server_error", None, "internal_error"),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, Exception) else "",
)
def test_errors(error: Exception, status: int, kind: str, param: str | None, code: str | None) -> None:
    answer = answer_to(error)
    response = answer.response()
    told = json.loads(bytes(response.body))["error"]
    assert (response.status_code, told["type"], told["param"], told["code"]) == (status, kind, param, code)
    assert told["message"]
    assert set(told) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"


def test_what_nobody_foresaw_tells_nothing() -> None:
    assert "secret" not in answer_to(RuntimeError("a secret")).message


def test_who_may_try_again_is_told_when() -> None:
    for error in (RefusedError("q", got=9, expected="8", kind="queue_full"), UnavailableError("it loads", "loading")):
        assert int(answer_to(error).response().headers["retry-after"]) >= 1
    assert "retry-after" not in answer_to(EngineDiedError("it died")).response().headers
