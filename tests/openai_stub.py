"""A server of OpenAI's API that says what a test tells it to, also what no good server says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

JSON = "application/json"


@dataclass
class Plan:
    """How one request is answered.

    Attributes:
        status: of HTTP; beside 200 the message is an error body.
        message: of the error body, or of an error event within the stream.
        tokens: texts, one a frame.
        usage: the last chunk's; None leaves it out.
        has_end: whether the stream ends with [DONE].
        breaks_after: frames after which the connection is cut.
        raw: events to send instead.
        wait: an event that must be set before each frame but the first.
        chunked: as chunks, else until the connection closes.
    """

    status: int = 200
    message: str = ""
    tokens: tuple[str, ...] = ("one ", "two ", "three")
    usage: Mapping[str, Any] | None = field(default_factory=dict)
    has_end: bool = True
    breaks_after: int | None = None
    raw: tuple[str, ...] | None = None
    wait: threading.Event | None = None
    chunked: bool = True


@dataclass(frozen=True)
class Request:
    """What came."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


def count_tokens(request: Request) -> int:
    """This server's tokenizer: four characters a token, and ten for a chat template."""
    is_chat = "messages" in request.body
    text = request.body["messages"][-1]["content"] if is_chat else request.body["prompt"]
    return len(text) // 4 + 10 * is_chat


def events(request: Request, plan: Plan) -> Iterator[str]:
    """The data of each event of a stream."""
    if plan.raw is not None:
        yield from plan.raw
        return
    is_chat = "messages" in request.body
    head = {"id": "a", "object": "chat.completion.chunk" if is_chat else "text_completion", "model": request.body["model"]}
    if is_chat:
        yield json.dumps(head | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for text in plan.tokens:
        part: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
        yield json.dumps(head | {"choices": [{"index": 0, "finish_reason": None, **part}], "usage": None})
    part = {"delta": {}} if is_chat else {"text": ""}
    yield json.dumps(head | {"choices": [{"index": 0, "finish_reason": "length", **part}]})
    if plan.message:
        yield json.dumps({"error": {"message": plan.message}})
    if plan.usage is not None:
        usage = {"prompt_tokens": count_tokens(request), "completion_tokens": len(plan.tokens)}
        yield json.dumps(head | {"choices": [], "usage": usage | dict(plan.usage)})
    if plan.has_end:
        yield "[DONE]"


class Stub:
    """The server, in a thread of its own.

    Attributes:
        plan: from a request to how it is answered; requests that do not stream get a whole answer.
        pages: further routes, each with a content type and a body.
        key: which every route but the pages asks for; empty asks for none.
        requests: what came so far.
        dropped: streams whose client left before the end.
    """

    def __init__(self) -> None:
        self.plan: Callable[[Request], Plan] = lambda request: Plan()
        self.pages: dict[str, tuple[str, Mapping[str, str], str]] = {}
        self.key = ""
        self.requests: list[Request] = []
        self.dropped = threading.Event()
        self.url = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        if not self._ready.wait(10):
            raise TimeoutError("the stub does not listen")

    def close(self) -> None:
        """Cut all connections and end."""
        if self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.create_task(self._connection(reader, writer)))

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read(reader)) is not None:
                self.requests.append(request)
                if not await self._answer(request, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            self.dropped.set()
        finally:
            writer.close()

    async def _answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays."""
        if request.path in self.pages:
            kind, headers, text = self.pages[request.path]
            return _send(writer, 200, kind, text, headers)
        if request.path == "/v1/models" and self._admits(request):
            return _send(writer, 200, JSON, json.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]}))
        if not self._admits(request):
            plan = Plan(401, "Incorrect API key provided.")
        else:
            plan = self.plan(request) if request.method == "POST" else Plan(404, f"no route {request.path}")
        if plan.status != 200:
            return _send(writer, plan.status, JSON, json.dumps({"error": {"message": plan.message}}))
        if not request.body.get("stream"):
            usage = None if plan.usage is None else {"prompt_tokens": count_tokens(request), "completion_tokens": 1}
            return _send(writer, 200, JSON, json.dumps({"choices": [], "usage": usage}))
        return await self._stream(request, plan, reader, writer)

    def _admits(self, request: Request) -> bool:
        return not self.key or request.headers.get("authorization") == f"Bearer {self.key}"

    async def _stream(self, request: Request, plan: Plan, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        framing = "Transfer-Encoding: chunked" if plan.chunked else "Connection: close"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n\r\n".encode())
        for number, data in enumerate(events(request, plan)):
            if number == plan.breaks_after:
                return False
            if plan.wait is not None and number > 1:
                while not plan.wait.is_set():
                    await asyncio.sleep(0.01)
                    if reader.at_eof():
                        raise ConnectionResetError
            event = f"data: {data}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(event), event) if plan.chunked else event)
            await writer.drain()
        if plan.chunked:
            writer.write(b"0\r\n\r\n")
        return plan.chunked


def _send(writer: asyncio.StreamWriter, status: int, kind: str, text: str, headers: Mapping[str, str] | None = None) -> bool:
    body = text.encode()
    further = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{further}\r\n".encode() + body)
    return True


async def _read(reader: asyncio.StreamReader) -> Request | None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1") if not reader.at_eof() else ""
    if not head:
        return None
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, path, headers, json.loads(body) if body else {})


@contextmanager
def stub_server() -> Iterator[Stub]:
    """A server that listens until the end of the block."""
    stub = Stub()
    stub.start()
    try:
        yield stub
    finally:
        stub.close()
