"""The engine's process, as the HTTP process sees it: requests go out, streams of token events come back. No HTTP here.

Everything runs on one event loop. The descriptor of the engine's socket is watched; what has arrived is read whole, and every
stream whose events came is woken once: there is no task and no queue for a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import zmq

from eightfold.server.process import EngineProcess
from eightfold.server.timing import Recorder
from eightfold.server.token_stream import AnswerStream, EngineDiedError, RefusedError
from eightfold.server.wire import (
    Abort,
    Close,
    Codec,
    Command,
    Control,
    Failure,
    FromEngine,
    Load,
    News,
    Progress,
    Ready,
    Refusal,
    Reply,
    ServedModel,
    Snapshot,
    Submit,
)
from eightfold.types import FinishReason, Request

logger = logging.getLogger(__name__)

EngineState: TypeAlias = Literal["loading", "ready", "dead"]

_MOST_MESSAGES = 32
"""Messages that are read before other work of the event loop has its turn."""

_RATE_SECONDS = 1.0
"""Time over which the rate of generation is told."""


class EngineClient:
    """An engine in a process of its own. Its methods belong to one event loop.

    Args:
        process: where the engine runs. It is the client's from now on.
        options: keywords of `EngineConfig`.
        null_step_seconds: how long a step of the null engine takes.
        max_queued_requests: requests that may wait beside those that can run.
        stream_interval: tokens that a stream hands over at once, but for its first and its last.
        watchdog_seconds: a turn of the engine's loop that takes longer ends its process.
        on_progress: told how far loading is.

    Attributes:
        state: "dead" once there is no engine any more.
        model: what is served; None while it loads.
        snapshot: the last numbers that the engine sent.
        progress: how far loading is: phase, units done, units in all.
        failure: why the engine is dead; None while it lives.
        rate: tokens generated a second, lately.
        finished: how many requests ended, by reason.
        recorder: how long requests took.
    """

    def __init__(
        self,
        process: EngineProcess,
        options: Mapping[str, Any],
        *,
        null_step_seconds: float = 0.0,
        max_queued_requests: int = 4096,
        stream_interval: int = 1,
        watchdog_seconds: float = 300.0,
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.state: EngineState = "loading"
        self.model: ServedModel | None = None
        self.snapshot = Snapshot()
        self.rate = 0.0
        self.progress = ("start", 0, 0)
        self.failure: Failure | None = None
        self.finished: Counter[FinishReason] = Counter()
        self.recorder = Recorder()
        self._load = Load(dict(options), null_step_seconds, watchdog_seconds)
        self._max_queued_requests = max_queued_requests
        self._stream_interval = stream_interval
        self._on_progress = on_progress
        self._codec = Codec()
        self._streams: dict[str, AnswerStream] = {}
        self._num_reserved = 0
        self._controls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_controls = 0
        self._last_heard = self._rated_at = time.monotonic()
        self._rated_tokens = 0
        self._changed = asyncio.Event()
        self._context = zmq.Context()
        self._socket: zmq.SyncSocket = self._context.socket(zmq.PAIR)
        self._process: EngineProcess | None = process

    @property
    def pid(self) -> int | None:
        """The id of the engine's process; None where there is none."""
        return None if self._process is None else self._process.pid

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, with those that the engine, amid a long step, has not looked at yet."""
        return max(self.snapshot.waiting, self.num_open - self.snapshot.running)

    @property
    def silent_seconds(self) -> float:
        """Time since the engine's loop was last heard of; 0 while it loads or does what `control` asked for."""
        if self.state != "ready" or self._controls:
            return 0.0
        return time.monotonic() - self._last_heard

    async def start(self) -> None:
        """Have the engine load its model."""
        process = self._process
        if process is None:
            raise self._death()
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(process.address)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.FD, self._read)
        loop.add_reader(process.lifeline.fileno(), self._on_end)
        self._send(self._load)

    async def loaded(self) -> ServedModel:
        """The model, once it is loaded.

        Raises:
            EngineDiedError: loading failed; `failure` says why.
        """
        while self.model is None:
            if self.state == "dead":
                raise self._death()
            self._changed.clear()
            await self._changed.wait()
        return self.model

    async def died(self) -> Failure:
        """Wait for the engine's end, and say why it came."""
        while self.failure is None or self.state != "dead":
            self._changed.clear()
            await self._changed.wait()
        return self.failure

    def reserve(self, count: int) -> None:
        """Keep places for requests that are submitted one after the other. `release` gives back those that were not used.

        Raises:
            RefusedError: too many wait already.
            EngineDiedError: there is no engine any more.
        """
        if self.state == "dead" or self.model is None:
            raise self._death()
        limit, num_taken = self.model.max_running_requests + self._max_queued_requests, self.num_open + self._num_reserved
        if num_taken + count > limit:
            places = "one place" if count == 1 else f"{count} places"
            raise RefusedError(
                "the queue",
                got=f"{num_taken} requests that are not done, and {places} asked for",
                expected=f"at most {limit} in all: --max-running-requests and --max-queued-requests together",
                remedy="Try again later.",
                kind="queue_full",
            )
        self._num_reserved += count

    def release(self, count: int) -> None:
        """Give back places that were reserved."""
        self._num_reserved -= count

    def submit(self, request: Request, *, reserved: bool = False) -> AnswerStream:
        """Queue a request.

        Args:
            request: what to queue.
            reserved: whether it takes a place that was reserved for it.

        Raises:
            RefusedError: too many wait already, or its id is in use.
            EngineDiedError: there is no engine any more.
        """
        if self.state == "dead" or self.model is None:
            raise self._death()
        if not reserved:
            self.reserve(1)
        self.release(1)
        if request.request_id in self._streams:
            # Only clients of /generate choose ids, and call them so. Ours ends with the number of the answer.
            raise RefusedError("rid", got=request.request_id.rpartition("-")[0], expected="one that is not in use")
        stream = self._streams[request.request_id] = AnswerStream(request, self._stream_interval, self._drop)
        try:
            self._send(Submit([request]))
        except BaseException:
            del self._streams[request.request_id]  # it was not sent, so nothing would ever end it
            raise
        return stream

    def _drop(self, stream: AnswerStream, reason: FinishReason) -> None:
        """Forget a stream that nobody reads any more, and end its request."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._finish(stream, reason, time.monotonic())
            self._send(Abort([stream.request_id]))

    def abort(self, request_id: str) -> int:
        """End the requests of this id, and those whose ids are this one and a suffix behind a dash.

        Their readers get a last event with the reason "abort".

        Returns:
            How many there were.
        """
        found = [name for name in self._streams if name == request_id or name.startswith(f"{request_id}-")]
        self._send(Abort(found))
        return len(found)

    def abort_all(self) -> int:
        """End every request; how many there were. Their readers get a last event with the reason "abort"."""
        self._send(Abort(list(self._streams)))
        return len(self._streams)

    def fail_all(self, error: Exception) -> int:
        """End every request at once in an error; how many there were."""
        streams, now = list(self._streams.values()), time.monotonic()
        self.abort_all()
        self._streams.clear()
        for stream in streams:
            self._finish(stream, "abort", now)
            stream.end(error)
        return len(streams)

    async def control(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Have the engine do something between two steps, and wait for it.

        Args:
            command: "flush_cache", "pause", "continue" or "update_weights".
            arguments: of the command.

        Raises:
            InputError: the engine refuses.
            EngineDiedError: there is no engine, or it broke over this.
        """
        if self.state != "ready":
            raise self._death()
        self._num_controls += 1
        number = self._num_controls
        future = self._controls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Control(number, command, arguments))
            result: dict[str, Any] = await future
            return result
        finally:
            self._controls.pop(number, None)
            self._last_heard = time.monotonic()

    async def close(self, patience: float = 5.0) -> None:
        """End the engine's process. Streams that are still open end in an error.

        Args:
            patience: seconds that the process has to leave by itself.
        """
        process, self._process = self._process, None
        if process is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.FD)
        loop.remove_reader(process.lifeline.fileno())
        self._send(Close())
        self._bury(Failure("the server leaves"))
        # Closing the process's lifeline ends it where it does not read its messages.
        code = await asyncio.to_thread(process.end, patience)
        if code != 0:
            logger.warning("the engine's process ended with code %s", code)
        self._hang_up()

    def kill(self) -> None:
        """End the engine's process at once, without waiting for anything else."""
        process, self._process = self._process, None
        if process is not None:
            process.end(0.0)
            self._hang_up()

    def _hang_up(self) -> None:
        """Give up the socket: nobody is at its other end any more."""
        self._socket.close(linger=0)
        self._context.term()

    def _send(self, message: Command) -> None:
        if self.state == "dead":
            return
        self._socket.send(self._codec.encode(message))
        # Sending can take the descriptor's notice of what arrived meanwhile.
        if self._has_news():
            asyncio.get_running_loop().call_soon(self._read)

    def _has_news(self) -> bool:
        events = self._socket.getsockopt(zmq.EVENTS)
        return isinstance(events, int) and bool(events & zmq.POLLIN)

    def _read(self) -> None:
        """Take in what has arrived. The descriptor tells of news once, so all must be read, or another turn be asked for."""
        if self._process is None:
            return
        for _ in range(_MOST_MESSAGES):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(self._codec.news.decode(frame))
        asyncio.get_running_loop().call_soon(self._read)

    def _take(self, message: FromEngine) -> None:
        self._last_heard = now = time.monotonic()
        match message:
            case News():
                self._deliver(message, now)
            case Refusal():
                stream = self._streams.pop(message.request_id, None)
                if stream is not None:
                    stream.end(RefusedError(message.what, got=message.got, expected=message.expected, remedy=message.remedy))
            case Reply():
                self._answer(message)
            case Progress():
                self.progress = (message.phase, message.done, message.total)
                if self._on_progress is not None:
                    self._on_progress(*self.progress)
            case Ready():
                self.model, self.state = message.model, "ready"
                self._changed.set()
            case Failure():
                self.failure = message  # its process ends next

    def _deliver(self, news: News, now: float) -> None:
        if news.snapshot is not None:
            self._take_snapshot(news.snapshot, now)
        streams, recorder = self._streams, self.recorder
        for request_id in news.started:
            if (stream := streams.get(request_id)) is not None:
                recorder.start(stream.times, news.step_began)
        for event in news.events:
            stream = streams.get(event.request_id)
            if stream is None:
                continue
            if event.token_id is not None:
                recorder.token(stream.times, now)
            if event.finish_reason is not None:
                del streams[event.request_id]
                self._finish(stream, event.finish_reason, now)
            stream.put(event)

    def _take_snapshot(self, snapshot: Snapshot, now: float) -> None:
        self.snapshot = snapshot
        if (seconds := now - self._rated_at) >= _RATE_SECONDS:
            self.rate = (snapshot.generated_tokens - self._rated_tokens) / seconds
            self._rated_at, self._rated_tokens = now, snapshot.generated_tokens

    def _finish(self, stream: AnswerStream, reason: FinishReason, now: float) -> None:
        self.finished[reason] += 1
        self.recorder.finish(stream.times, now)

    def _answer(self, reply: Reply) -> None:
        future = self._controls.get(reply.number)
        if future is None or future.done():
            return
        if reply.refusal is None:
            future.set_result(reply.result)
        else:
            future.set_exception(reply.refusal.error())

    def _on_end(self) -> None:
        """The process is gone."""
        process, self._process = self._process, None
        if process is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.lifeline.fileno())
        loop.remove_reader(self._socket.FD)
        with contextlib.suppress(zmq.Again):  # what it said before
            while True:
                self._take(self._codec.news.decode(self._socket.recv(zmq.NOBLOCK)))
        code = process.end(1.0)
        self._hang_up()
        self._bury(self.failure or Failure(f"the engine's process ended with code {code}"))

    def _bury(self, failure: Failure) -> None:
        """Tell everybody who waits that there is no engine any more."""
        self.state, self.failure = "dead", failure
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end(self._death())
        for future in self._controls.values():
            if not future.done():
                future.set_exception(self._death())
        self._changed.set()

    def _death(self) -> EngineDiedError:
        return EngineDiedError("the engine is still loading" if self.failure is None else self.failure.message)
