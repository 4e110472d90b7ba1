"""What the generation routes find in the app."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request

from eightfold.errors import InputError
from eightfold.server.context import describe, serving_of, stall_seconds
from eightfold.server.inprocess import serving_in_process
from tests.pretended import make_llm, saying


def test_the_app_keeps_what_answers() -> None:
    app, llm = Starlette(), make_llm(saying("x"))
    app.state.serving, app.state.stall_seconds = serving_in_process(llm.engine, llm.tokenizer, ["a"]), 3.0
    request = Request({"type": "http", "app": app})
    assert serving_of(request) is app.state.serving
    assert stall_seconds(request) == 3.0


def test_errors_within_a_stream_have_the_shape_of_others() -> None:
    told = describe(InputError("n", got=0, expected="1"))["error"]
    assert told == {"message": "n: got 0; expected 1", "type": "invalid_request_error", "param": "n", "code": None}
    assert "secret" not in str(describe(RuntimeError("secret")))
