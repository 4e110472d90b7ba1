"""The layers around the app, each over a small app of its own."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from eightfold.server.errors import BodyTooLargeError, answer_to
from eightfold.server.middleware import Guarded, Identified, Keyed, Limited, SameOrigin, Timed, wrapped


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body, as an app that reads bodies does."""
    try:
        body = await Request(scope, receive).body()
    except BodyTooLargeError as error:
        await answer_to(error).response()(scope, receive, send)
        return
    await JSONResponse({"length": len(body)})(scope, receive, send)


def ask(app: ASGIApp, method: str = "GET", path: str = "/", **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here:30000") as client:
            return await asyncio.wait_for(client.request(method, path, **options), 30)

    return asyncio.run(run())


def test_a_request_gets_an_id_or_keeps_its_own() -> None:
    app = Identified(echo)
    assert ask(app, headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = ask(app).headers["x-request-id"]
    assert len(made) == 32
    for bad in ("two words", "x" * 129, ""):
        assert ask(app, headers={"X-Request-Id": bad}).headers["x-request-id"] not in (bad, made)


def test_a_line_is_logged_without_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ask(Identified(echo), "POST", "/v1/completions?secret=1", content=b"a prompt", headers={"X-Request-Id": "mine"})
    (record,) = [item for item in caplog.records if item.name.endswith("middleware")]
    assert record.levelno == logging.INFO
    assert "POST /v1/completions 200 in" in record.getMessage()
    assert "id mine" in record.getMessage()
    assert "prompt" not in record.getMessage()
    assert "secret" not in record.getMessage()


def test_an_error_after_a_whole_answer_is_logged_and_cuts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def told_and_raised(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({"error": "told"}, 500)(scope, receive, send)
        raise ValueError("a fault")

    assert ask(Guarded(told_and_raised)).json() == {"error": "told"}
    assert "GET / failed" in caplog.text
    assert "ValueError: a fault" in caplog.text

    async def raised(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        ask(Guarded(raised))


def test_bodies_are_logged_where_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ask(Identified(echo, log_bodies=True), "POST", "/v1/completions", content=b"a \xff prompt\nof two lines")
    assert "a \ufffd prompt\\nof two lines" in caplog.text


def test_probes_are_logged_as_debugging_and_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seen: list[int] = []

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(app.num_open)
        await Response()(scope, receive, send)

    app = Identified(count)
    ask(app, path="/health")
    ask(app, path="/v1/models")
    assert seen == [0, 1]
    assert app.num_open == 0
    ours = [item.getMessage() for item in caplog.records if item.name.startswith("eightfold")]
    assert [line.split()[1] for line in ours] == ["/v1/models"]


def test_an_app_that_raises_is_logged_and_not_counted_any_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError

    app = Identified(fail)
    with pytest.raises(RuntimeError):
        ask(app)
    assert app.num_open == 0
    assert "without an answer" in caplog.text


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", "Bearer key ", "bearer key", "Basic key", "key", "Bearer kéy"]
)
def test_a_missing_or_wrong_key_is_refused(given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    response = ask(Keyed(echo, "key", None), path="/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert ("no key" in error["message"]) == (not given)


def test_the_key_opens_everything_where_there_is_no_other() -> None:
    app, headers = Keyed(echo, "key", None), {"Authorization": "Bearer key"}
    for path in ("/v1/models", "/metrics", "/flush_cache", "/docs", "/nowhere"):
        assert ask(app, path=path).status_code == 401
        assert ask(app, path=path, headers=headers).status_code == 200


def test_probes_of_life_and_the_page_need_no_key() -> None:
    for path in ("/health", "/"):
        assert ask(Keyed(echo, "key", "admin"), path=path).status_code == 200


def test_the_admin_key_alone_opens_the_control_routes_and_opens_the_others_too() -> None:
    app = Keyed(echo, "key", "admin")
    key, admin = {"Authorization": "Bearer key"}, {"Authorization": "Bearer admin"}
    for path in ("/flush_cache", "/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk"):
        refused = ask(app, "POST", path, headers=key)
        assert refused.status_code == 401
        assert "--admin-api-key" in refused.json()["error"]["message"]
        assert ask(app, "POST", path, headers=admin).status_code == 200
    for headers in (key, admin):
        assert ask(app, path="/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("origin", "allowed", "status"),
    [
        (None, (), 200),
        ("http://here:30000", (), 200),
        ("http://here", (), 403),
        ("https://evil.example", (), 403),
        ("null", (), 403),
        ("https://good.example", ("https://good.example",), 200),
        ("https://evil.example", ("https://good.example",), 403),
        ("https://evil.example", ("*",), 200),
    ],
)
def test_pages_of_other_origins_are_refused(origin: str | None, allowed: tuple[str, ...], status: int) -> None:
    response = ask(SameOrigin(echo, allowed), "POST", "/flush_cache", headers={} if origin is None else {"Origin": origin})
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["code"] == "origin_not_allowed"


async def _pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"12345"


@pytest.mark.parametrize("content", [b"x" * 11, lambda: _pieces(3)], ids=["announced", "in pieces"])
def test_a_body_that_is_too_large_is_refused(content: bytes | Callable[[], Any]) -> None:
    given = content() if callable(content) else content
    response = ask(Limited(echo, 10), "POST", content=given)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert "10" in response.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"x" * 10, lambda: _pieces(2)], ids=["none", "announced", "in pieces"])
def test_a_body_at_the_limit_is_taken(content: bytes | Callable[[], Any]) -> None:
    given = content() if callable(content) else content
    assert ask(Limited(echo, 10), "POST", content=given).status_code == 200


async def _endless() -> AsyncIterator[bytes]:
    yield b"data: 1\n\n"
    await asyncio.Event().wait()


def test_a_request_that_takes_too_long_ends_in_an_error() -> None:
    async def hang(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    response = ask(Timed(hang, 0.05))
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert "--request-timeout" in response.json()["error"]["message"]


def test_a_stream_that_takes_too_long_ends_in_an_error_event() -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await StreamingResponse(_endless(), media_type="text/event-stream")(scope, receive, send)

    response = ask(Timed(stream, 0.05))
    first, last, rest = response.text.split("\n\n")
    assert (response.status_code, first, rest) == (200, "data: 1", "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"


def test_a_timeout_of_the_apps_own_is_not_taken_for_this_one() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        ask(Timed(fail, 30.0))


def test_the_first_layer_is_the_innermost() -> None:
    order: list[str] = []

    def layer(name: str) -> Callable[[ASGIApp], ASGIApp]:
        def wrap(app: ASGIApp) -> ASGIApp:
            async def called(scope: Scope, receive: Receive, send: Send) -> None:
                order.append(name)
                await app(scope, receive, send)

            return called

        return wrap

    ask(wrapped(echo, [layer("inner"), layer("outer")]))
    assert order == ["outer", "inner"]
