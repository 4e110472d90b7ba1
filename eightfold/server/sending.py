"""How answers leave: as one JSON object or as server-sent events, and what happens when nobody is there to take them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from eightfold.server.protocol import Body
from eightfold.server.stream import frame

logger = logging.getLogger(__name__)

_GONE = 499  # what access logs show for a client that left; nobody receives it

T = TypeVar("T")


def json_response(value: object) -> Response:
    """An object as it goes out."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def documented(kind: type[Body]) -> dict[str, Any]:
    """What the OpenAPI page says of a route that reads its body itself."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, definitions)}}}}


async def whole_response(request: Request, work: Coroutine[Any, Any, object]) -> Response:
    """What `work` returns, as JSON; when the client leaves, the work ends with it."""
    worker = asyncio.create_task(work)
    if await _ended_before_the_client_left(worker, request.receive):
        return json_response(worker.result())
    return Response(status_code=_GONE)


class EventStream(Response):
    """Frames as server-sent events.

    The status goes out with the first frame, so that what the engine refuses still gets a status of its own. An error after
    that is an event, and the last one. The frames are closed whatever happens, which frees what the engine holds for them.

    Args:
        frames: the bytes of events.
        describe: the body of an error.
        stall_seconds: how long a client may take no bytes before it counts as gone; None for any time.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        describe: Callable[[Exception], object],
        stall_seconds: float | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._describe = describe
        self._stall_seconds = stall_seconds
        self._blocked_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI's signature
        """Send the frames until they end or the client leaves."""
        writer = asyncio.create_task(self._write(send))
        if await _ended_before_the_client_left(writer, receive, self._is_stalled, self._stall_seconds):
            writer.result()

    async def _write(self, send: Send) -> None:
        frames, loop = self._frames, asyncio.get_running_loop()
        try:
            written = await anext(frames)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while True:
                self._blocked_since = loop.time()
                await send({"type": "http.response.body", "body": written, "more_body": True})
                self._blocked_since = None
                try:
                    written = await anext(frames)
                except StopAsyncIteration:
                    break
                except Exception as error:
                    logger.warning("a stream ended in an error: %s", error)
                    await send(
                        {"type": "http.response.body", "body": frame(self._describe(error)), "more_body": True},
                    )
                    break
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await frames.aclose()

    def _is_stalled(self) -> bool:
        since, limit = self._blocked_since, self._stall_seconds
        return since is not None and limit is not None and asyncio.get_running_loop().time() - since > limit


async def _ended_before_the_client_left(
    worker: asyncio.Task[Any],
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    is_stalled: Callable[[], bool] = lambda: False,
    look_every: float | None = None,
) -> bool:
    """Wait for a task; where the client leaves before its end, or this is cancelled, the task is cancelled and has ended."""
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        while not worker.done():
            await asyncio.wait({worker, watcher}, timeout=look_every, return_when=asyncio.FIRST_COMPLETED)
            if not worker.done() and watcher.done():
                return False
            if not worker.done() and is_stalled():
                logger.warning("dropped a client that took nothing of its stream for more than %g seconds", look_every)
                return False
        return True
    finally:
        watcher.cancel()
        if not worker.done():
            worker.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _inlined(value: Any, definitions: dict[str, Any]) -> Any:
    """A schema without references, which would point to nowhere inside the page."""
    if isinstance(value, list):
        return [_inlined(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inlined(definitions[value["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(item, definitions) for name, item in value.items()}
