"""An engine in this process, behind the same interface as one in another: for offline batches, and for tests.

Steps run in a thread, one after the other; everything else that touches the engine happens between them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eightfold.engine.engine import Engine
from eightfold.server.answers import Serving
from eightfold.server.reading import chat_formats
from eightfold.text import Tokenizer
from eightfold.types import FinishReason, Request, TokenEvent


class InProcessEngine:
    """Runs an engine while it has work. Meant for one event loop.

    Args:
        engine: nobody else steps it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams: dict[str, InProcessStream] = {}
        self._changes: deque[Request | str] = deque()  # requests to add, and ids to abort
        self._running: asyncio.Task[None] | None = None

    def reserve(self, count: int) -> None:
        """There is always room."""

    def release(self, count: int) -> None:
        """Nothing was reserved."""

    def submit(self, request: Request, *, reserved: bool = False) -> InProcessStream:
        """Queue a request. What the engine has against it, the stream raises."""
        del reserved  # there is always room
        stream = self._streams[request.request_id] = InProcessStream(self, request.request_id)
        self._change(request)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request before the next step, where it still goes on."""
        if self._streams.pop(request_id, None) is not None:
            self._change(request_id)

    async def idle(self) -> None:
        """Wait until the engine has nothing to do."""
        while self._running is not None and not self._running.done():
            await asyncio.wait([self._running])

    def _change(self, change: Request | str) -> None:
        self._changes.append(change)
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._changes or self._engine.has_work:
                self._apply_changes()
                if self._engine.has_work:
                    self._deliver(await asyncio.to_thread(self._engine.step))
        except Exception as error:  # an engine that broke answers nobody any more
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.put(error)

    def _apply_changes(self) -> None:
        while self._changes:
            change = self._changes.popleft()
            if isinstance(change, str):
                self._engine.abort(change)
                continue
            try:
                self._engine.add(change)
            except Exception as error:
                self._streams.pop(change.request_id).put(error)

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                if event.finish_reason is not None:
                    del self._streams[event.request_id]
                stream.put(event)


class InProcessStream:
    """The events of one request."""

    def __init__(self, engine: InProcessEngine, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._events: list[TokenEvent] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[list[TokenEvent]]:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        """All events since the last call, at least one."""
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error
        events, self._events = self._events, []
        return events

    def abort(self, reason: FinishReason = "abort") -> None:
        """End the request where it still goes on."""
        del reason  # nobody counts the ends here
        self._engine.abort(self._request_id)

    def put(self, news: TokenEvent | Exception) -> None:
        """Hand over what the engine has to tell."""
        if isinstance(news, Exception):
            self._error = news
        else:
            self._events.append(news)
        self._news.set()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine in this process says of its model."""

    context_length: int
    vocab_size: int
    sampling_defaults: Mapping[str, Any]


def serving_in_process(engine: Engine, tokenizer: Tokenizer, names: Sequence[str]) -> Serving:
    """An engine of this process as something to answer with. Needs a running event loop only once requests come."""
    facts = EngineFacts(engine.scheduler.max_sequence_tokens, engine.vocab_size, engine.sampling_defaults)
    reasoning, tools = chat_formats(tokenizer)
    return Serving(InProcessEngine(engine), tokenizer, facts, names, reasoning, tools)
