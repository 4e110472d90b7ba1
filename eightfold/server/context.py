"""What the generation routes find in the app, and how they tell errors: the one place that knows where these are."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from eightfold.server.answers import Serving
from eightfold.server.errors import answer_to


def serving_of(request: Request) -> Serving:
    """What a request is answered with. The app refuses requests before there is any."""
    serving: Serving = request.app.state.serving
    return serving


def stall_seconds(request: Request) -> float | None:
    """How long a client may take nothing of a stream; None for any time."""
    seconds: float | None = request.app.state.stall_seconds
    return seconds


def describe(error: Exception) -> dict[str, Any]:
    """The body of an error that comes when the answer has begun."""
    return answer_to(error).body
