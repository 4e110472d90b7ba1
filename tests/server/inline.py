"""The generation routes over an engine in the test's own process, without sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response

from eightfold.errors import InputError
from eightfold.llm import LLM
from eightfold.server import native, openai
from eightfold.server.errors import answer_to
from eightfold.server.inprocess import serving_in_process

T = TypeVar("T")


def app_of(llm: LLM) -> FastAPI:
    app = FastAPI()
    app.include_router(openai.router)
    app.include_router(native.router)
    app.state.serving = serving_in_process(llm.engine, llm.tokenizer, ["tiny"])
    app.state.stall_seconds = None

    @app.exception_handler(InputError)
    async def refuse(request: Request, error: InputError) -> Response:
        return answer_to(error).response()

    return app


def talk(llm: LLM, conversation: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Run a conversation with the routes over `llm`, in an event loop of its own."""

    async def run() -> T:
        app = app_of(llm)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            result = await asyncio.wait_for(conversation(client), 60)
        await asyncio.wait_for(app.state.serving.engine.idle(), 60)
        return result

    return asyncio.run(run())


def post(llm: LLM, path: str, body: Any) -> httpx.Response:
    """One answer; `body` is an object, or bytes that are sent as they are."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return talk(llm, lambda client: client.post(path, content=content))


def events(response: httpx.Response) -> list[Any]:
    """The objects of a stream, which has to end as streams end."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@contextmanager
def listening(llm: LLM) -> Iterator[str]:
    """The routes on a socket, served by a thread; the address. At the end nothing of the engine may be in use."""
    app = app_of(llm)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([listener],), name="server")
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
            wait_until(lambda: not llm.engine.has_work)
        finally:
            server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what other threads do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.005)
