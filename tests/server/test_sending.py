"""How answers leave, and what happens when the client does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, MutableMapping
from typing import Any

import pytest
from starlette.requests import Request

from eightfold.errors import InputError
from eightfold.server.context import describe
from eightfold.server.protocol import ChatBody
from eightfold.server.sending import EventStream, documented, json_response, whole_response

Message = MutableMapping[str, Any]


class Connection:
    """A client as ASGI shows it. It leaves when told to."""

    def __init__(self, *, takes: Callable[[Message], bool] = lambda _: True) -> None:
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self.arrived = asyncio.Event()
        self._takes = takes

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if not self._takes(message):
            await asyncio.Event().wait()
        self.sent.append(message)
        self.arrived.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Frames:
    """Frames that a test lets go one by one, and that know whether they were closed."""

    def __init__(self, *frames: bytes | Exception, endless: bool = False) -> None:
        self._frames, self._endless = frames, endless
        self.closed = False

    async def generate(self) -> AsyncGenerator[bytes, None]:
        try:
            for item in self._frames:
                if isinstance(item, Exception):
                    raise item
                yield item
            if self._endless:
                await asyncio.Event().wait()
        finally:
            self.closed = True


def run(work: Callable[[], Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(work(), 30)

    return asyncio.run(limited())


def response(frames: Frames, **options: Any) -> EventStream:
    return EventStream(frames.generate(), describe=describe, **options)


def test_frames_leave_one_by_one_under_one_status() -> None:
    async def work() -> None:
        connection, frames = Connection(), Frames(b"a", b"b")
        await response(frames)({}, connection.receive, connection.send)
        start, *bodies = connection.sent
        headers = dict(start["headers"])
        assert start["status"] == 200
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert b"content-length" not in headers
        assert [(body["body"], body["more_body"]) for body in bodies] == [(b"a", True), (b"b", True), (b"", False)]
        assert frames.closed

    run(work)


def test_an_error_before_the_first_frame_gets_a_status_of_its_own() -> None:
    async def work() -> None:
        connection, frames = Connection(), Frames(InputError("n", got=1, expected="2"))
        with pytest.raises(InputError):
            await response(frames)({}, connection.receive, connection.send)
        assert connection.sent == []
        assert frames.closed

    run(work)


@pytest.mark.parametrize(
    ("error", "message", "kind"),
    [
        (InputError("n", got=1, expected="2"), "n: got 1; expected 2", "invalid_request_error"),
        (RuntimeError("private"), "the server failed; its log says why", "server_error"),
    ],
)
def test_an_error_after_it_is_the_last_event(error: Exception, message: str, kind: str) -> None:
    async def work() -> None:
        connection, frames = Connection(), Frames(b"data: 1\n\n", error)
        await response(frames)({}, connection.receive, connection.send)
        first, last, rest = connection.body.split(b"\n\n")
        assert (first, rest) == (b"data: 1", b"")
        told = json.loads(last.removeprefix(b"data: "))["error"]
        assert (told["message"], told["type"]) == (message, kind)
        assert connection.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
        assert frames.closed

    run(work)


def test_a_client_that_leaves_closes_the_frames() -> None:
    async def work() -> None:
        connection, frames = Connection(), Frames(b"a", endless=True)
        sending = asyncio.create_task(response(frames)({}, connection.receive, connection.send))
        await connection.arrived.wait()
        assert not frames.closed
        connection.left.set()
        await sending
        assert frames.closed

    run(work)


def test_a_client_that_leaves_before_the_first_frame_closes_them_too() -> None:
    async def work() -> None:
        connection, frames = Connection(), Frames(endless=True)
        connection.left.set()
        await response(frames)({}, connection.receive, connection.send)
        assert frames.closed
        assert connection.sent == []

    run(work)


def test_a_client_that_takes_nothing_counts_as_gone() -> None:
    async def work() -> None:
        connection, frames = Connection(takes=lambda message: message.get("body") != b"b"), Frames(b"a", b"b", b"c")
        await response(frames, stall_seconds=0.05)({}, connection.receive, connection.send)
        assert frames.closed
        assert connection.body == b"a"

    run(work)


def test_frames_are_closed_when_the_server_ends_the_request() -> None:
    async def work() -> None:
        connection, frames = Connection(), Frames(b"a", endless=True)
        sending = asyncio.create_task(response(frames)({}, connection.receive, connection.send))
        await connection.arrived.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert frames.closed

    run(work)


def test_whole_answers_end_with_their_client() -> None:
    async def work() -> None:
        ended = asyncio.Event()

        async def answer() -> object:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return None

        connection = Connection()
        request = Request({"type": "http"}, connection.receive)
        sending = asyncio.create_task(whole_response(request, answer()))
        await asyncio.sleep(0)
        connection.left.set()
        assert (await sending).status_code == 499
        assert ended.is_set()

    run(work)


def test_whole_answers_are_json_and_their_errors_are_raised() -> None:
    async def work() -> None:
        async def fine() -> object:
            return {"a": "é"}

        async def bad() -> object:
            raise InputError("n", got=1, expected="2")

        request = Request({"type": "http"}, Connection().receive)
        assert json.loads(bytes((await whole_response(request, fine())).body)) == {"a": "é"}
        with pytest.raises(InputError):
            await whole_response(request, bad())

    run(work)


def test_objects_leave_as_json() -> None:
    sent = json_response({"a": [1, None]})
    assert sent.body == b'{"a":[1,null]}'
    assert sent.headers["content-type"] == "application/json"


def test_documented_schemas_have_no_references() -> None:
    schema = documented(ChatBody)["requestBody"]["content"]["application/json"]["schema"]
    assert "$ref" not in json.dumps(schema)
    assert "include_usage" in json.dumps(schema)
    assert schema["required"] == ["messages"]
