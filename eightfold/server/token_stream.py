"""The token events of one request, on the HTTP side's event loop, and the ways in which they can fail to come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Literal, TypeAlias

from eightfold.errors import InputError
from eightfold.server.timing import RequestTimes
from eightfold.types import FinishReason, Request, TokenEvent

RefusalKind: TypeAlias = Literal["invalid", "queue_full"]


class EngineDiedError(Exception):
    """The engine's process broke or ended: what was asked of it has no answer."""


class RefusedError(InputError):
    """A request that the engine does not take.

    Attributes:
        kind: "queue_full" where the same request may be taken later, "invalid" where it never will be.
    """

    def __init__(self, what: str, *, got: object, expected: str, remedy: str = "", kind: RefusalKind = "invalid") -> None:
        super().__init__(what, got=got, expected=expected, remedy=remedy)
        self.kind = kind


class AnswerStream:
    """The token events of one request: an async iterator over lists of those that came since the last look.

    A slow reader sees few, long lists. What waits for it is bounded by the request's `max_tokens`.

    Args:
        request: what was asked.
        interval: tokens that are handed over at once, but for the first and the last.
        drop: called where the reader gives up before the end.

    Attributes:
        request_id: whose events they are.
        times: when things happened to the request.
    """

    def __init__(self, request: Request, interval: int, drop: Callable[[AnswerStream, FinishReason], None]) -> None:
        self.request_id = request.request_id
        self.times = RequestTimes(time.monotonic(), len(request.prompt_token_ids), request.params.max_tokens)
        self._drop = drop
        self._interval = interval
        self._events: list[TokenEvent] = []
        self._num_given = 0
        self._is_over = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[list[TokenEvent]]:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        """The events since the last call, at least one.

        Raises:
            StopAsyncIteration: the last event, which has a `finish_reason`, was given before, or the stream was aborted.
            RefusedError: the engine does not take the request.
            EngineDiedError: there is no engine any more.
        """
        while not self._is_due():
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        self._num_given += len(events)
        return events

    def abort(self, reason: FinishReason = "abort") -> None:
        """End the request where it still goes on; its reader gets no more events.

        Args:
            reason: what the end counts as: "stop" where a stop text was found in the answer.
        """
        if not self._is_over:
            self._drop(self, reason)
            self._events.clear()
            self.end()

    def put(self, event: TokenEvent) -> None:
        """Add an event. For the client alone."""
        self._events.append(event)
        if event.finish_reason is not None:
            self._is_over = True
        if self._waiter is not None and self._is_due():
            self._wake()

    def end(self, error: Exception | None = None) -> None:
        """Say that no event comes any more; those that were not read yet are still given. For the client alone."""
        self._is_over, self._error = True, error
        self._wake()

    def _is_due(self) -> bool:
        """Whether there is enough to hand over: an answer's first tokens and its last never wait for more."""
        num_events = len(self._events)
        return num_events >= self._interval or (num_events > 0 and (self._is_over or self._num_given == 0))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None
