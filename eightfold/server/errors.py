"""How errors leave: the status, OpenAI's body, and headers, for everything that a route or the engine can raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from eightfold.errors import InputError
from eightfold.requests import PromptTooLongError
from eightfold.server.protocol import UnknownModelError
from eightfold.server.token_stream import EngineDiedError, RefusedError

_RETRY = {"Retry-After": "1"}


class UnavailableError(Exception):
    """Nobody is served at this time: the model loads, or the server leaves.

    Args:
        message: one sentence.
        code: "loading" or "shutting_down".
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class BodyTooLargeError(Exception):
    """A body beyond the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"body: got more than {limit} bytes; expected at most {limit}, which is --max-request-bytes")


_PLAIN: Sequence[tuple[type[Exception], int, str]] = (
    (BodyTooLargeError, 413, "body_too_large"),
    (EngineDiedError, 503, "engine_died"),
    (TimeoutError, 504, "timeout"),
)


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as it is answered.

    Attributes:
        status: of HTTP.
        message: what is wrong, what was given, what would work.
        type: OpenAI's kind of error.
        param: the field at fault, where there is one.
        code: a word for programs.
        headers: further ones.
    """

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        parts = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": parts}

    def response(self) -> Response:
        """The whole response."""
        content = msgspec.json.encode(self.body)
        return Response(content, self.status, dict(self.headers), media_type="application/json")


def answer_to(error: Exception) -> ErrorAnswer:
    """What a client is told of an error. Of one that nobody foresaw it learns no more than that."""
    if isinstance(error, InputError):
        if isinstance(error, RefusedError) and error.kind == "queue_full":
            return ErrorAnswer(429, str(error), "rate_limit_error", code="queue_full", headers=_RETRY)
        is_unknown = isinstance(error, UnknownModelError)
        code = "model_not_found" if is_unknown else "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
        return ErrorAnswer(404 if is_unknown else 400, str(error), "invalid_request_error", error.what, code)
    for kind, status, code in _PLAIN:
        if isinstance(error, kind):
            whose = "server_error" if status >= 500 else "invalid_request_error"
            return ErrorAnswer(status, str(error) or "the request took too long", whose, code=code)
    if isinstance(error, UnavailableError):
        return ErrorAnswer(503, str(error), "server_error", code=error.code, headers=_RETRY)
    return ErrorAnswer(500, "the server failed; its log says why", "server_error", code="internal_error")
