"""The engine's loop, in a process of its own: commands, one step, and one message with all that came of it."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from eightfold.engine.scheduler import Scheduler
from eightfold.errors import InputError
from eightfold.server.compiling import Compilations
from eightfold.server.wire import (
    Abort,
    Close,
    Command,
    Control,
    FromEngine,
    News,
    Refusal,
    Reply,
    ServedModel,
    Snapshot,
    StepRow,
    Submit,
)
from eightfold.types import Grammar, Request, TokenEvent

SNAPSHOT_SECONDS = 0.1
"""Time between two snapshots of the numbers while there is work."""
BEAT_SECONDS = 0.25
"""Time between two signs of life while there is none."""
_COMPILING_SECONDS = 0.005


class RunsRequests(Protocol):
    """What the loop needs of an engine."""

    scheduler: Scheduler

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def compile(self, grammar: Grammar) -> None:
        """Do, in any thread, what `add` of a request with this grammar would take long for."""

    def add(self, request: Request) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request."""

    def step(self) -> list[TokenEvent]:
        """Compute one batch."""

    def update_weights(self, model: str) -> None:
        """Put other weights in the place of these."""


class EngineLoop:
    """Runs an engine on behalf of another process.

    Args:
        engine: nobody else steps it.
        describe: what the other side is to know of the model.
        receive: the next command, waited for as many seconds; None where none came.
        send: takes a message.
        watchdog_seconds: a turn that takes longer ends this process, with the stacks of its threads on stderr; None never does.
    """

    def __init__(
        self,
        engine: RunsRequests,
        describe: Callable[[], ServedModel],
        receive: Callable[[float], Command | None],
        send: Callable[[FromEngine], None],
        *,
        watchdog_seconds: float | None,
    ) -> None:
        self._engine = engine
        self._describe = describe
        self._receive = receive
        self._send = send
        self._watchdog_seconds = watchdog_seconds
        self._watched_at = 0.0
        self._num_steps = 0
        self._is_paused = False
        self._is_closed = False
        self._ended: list[TokenEvent] = []  # of requests that were aborted between two steps
        self._unstarted: set[str] = set()
        self._compilations = Compilations(engine.compile)
        self._told_at = 0.0

    def run(self) -> None:
        """Go on until told to close, or until a step raises."""
        try:
            while not self._is_closed:
                self._feed_watchdog()
                self._obey()
                self._turn()
        finally:
            self._compilations.close()
            self._stop_watchdog()

    def _obey(self) -> None:
        """Take all commands that have come; wait for one where there is nothing else to do."""
        is_idle = not self._ended and (self._is_paused or not self._engine.has_work)
        idle_seconds = _COMPILING_SECONDS if self._compilations else BEAT_SECONDS
        command = self._receive(idle_seconds if is_idle else 0.0)
        while command is not None and not self._is_closed:
            match command:
                case Submit():
                    for request in command.requests:
                        self._take(request)
                case Abort():
                    self._abort(command.request_ids)
                case Control():
                    self._send(self._control(command))
                case Close():
                    self._is_closed = True
            command = self._receive(0.0)
        for request, refusal in self._compilations.finished():
            if refusal is None:
                self._add(request)
            else:
                self._send(Refusal.of(refusal, request.request_id))

    def _turn(self) -> None:
        """One step, where there is work, and one message."""
        if self._is_closed:
            return
        began = time.monotonic()
        events, self._ended = self._ended, []
        started: list[str] = []
        if self._engine.has_work and not self._is_paused:
            events += self._engine.step()
            self._num_steps += 1
            if self._unstarted:
                started = self._newly_started(events)
        now = time.monotonic()
        is_last = not self._engine.has_work
        snapshot = None
        if is_last or self._is_paused or now - self._told_at >= SNAPSHOT_SECONDS:
            snapshot, self._told_at = self._snapshot(), now
        if events or started or snapshot is not None:
            self._send(News(events, started, began, snapshot))

    def _take(self, request: Request) -> None:
        grammar = request.params.grammar
        if request.request_id in self._compilations:
            error = InputError("request_id", got=request.request_id, expected="one that is not in use")
            self._send(Refusal.of(error, request.request_id))
        elif grammar is None:
            self._add(request)
        else:
            self._compilations.begin(request, grammar)

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except InputError as error:
            self._send(Refusal.of(error, request.request_id))
        else:
            self._unstarted.add(request.request_id)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._unstarted.discard(request_id)
            if self._compilations.discard(request_id):
                self._ended.append(TokenEvent(request_id, None, finish_reason="abort"))
            elif (event := self._engine.abort(request_id)) is not None:
                self._ended.append(event)

    def _newly_started(self, events: Sequence[TokenEvent]) -> list[str]:
        """The requests that left the queue in this step: those that ended in it, and the youngest of those that run."""
        started = [event.request_id for event in events if event.request_id in self._unstarted]
        self._unstarted.difference_update(started)
        for sequence in reversed(self._engine.scheduler.running):
            request_id = sequence.request.request_id
            if request_id in self._unstarted:
                self._unstarted.remove(request_id)
                started.append(request_id)
            elif request_id not in started:
                break
        return started

    def _control(self, command: Control) -> Reply:
        self._stop_watchdog()  # loading weights takes as long as it takes
        try:
            return Reply(command.number, self._do(command.command, command.arguments), None)
        except InputError as error:
            return Reply(command.number, {}, Refusal.of(error))

    def _do(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        engine, scheduler = self._engine, self._engine.scheduler
        match command:
            case "flush_cache":
                scheduler.manager.flush()
                return {}
            case "pause":
                self._is_paused = True
                scheduler.counters.steps.rest()
                return {"num_aborted": self._abort_all() if arguments.get("abort") else 0, "num_paused": _num_live(scheduler)}
            case "continue":
                self._is_paused = False
                return {}
            case "update_weights":
                num_aborted = self._abort_all() if arguments.get("abort") else 0
                engine.update_weights(arguments["model"])
                return {"num_aborted": num_aborted, "model": self._describe()}
            case "check":
                scheduler.check_integrity()
                return {}
        raise InputError("command", got=command, expected="one that the engine's process knows")

    def _abort_all(self) -> int:
        scheduler = self._engine.scheduler
        live = [item.request.request_id for item in (*scheduler.running, *scheduler.waiting)]
        live += self._compilations.request_ids
        self._abort(live)
        return len(live)

    def _snapshot(self) -> Snapshot:
        scheduler = self._engine.scheduler
        counters, manager = scheduler.counters, scheduler.manager
        return Snapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._compilations),
            num_blocks=manager.num_blocks,
            free_blocks=manager.num_free_blocks,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            prefix_lost=counters.prefix_tokens_lost,
            preemptions=counters.preemptions,
            num_steps=self._num_steps,
            steps={
                kind: StepRow(totals.steps, totals.tokens, totals.seconds, totals.gap_seconds)
                for kind, totals in counters.steps.totals.items()
            },
            is_paused=self._is_paused,
        )

    def _feed_watchdog(self) -> None:
        """Put off the end that comes where a turn takes too long. It comes from a thread that needs no interpreter."""
        seconds, now = self._watchdog_seconds, time.monotonic()
        if seconds is not None and now - self._watched_at > min(1.0, seconds / 4):
            faulthandler.dump_traceback_later(seconds, exit=True)
            self._watched_at = now

    def _stop_watchdog(self) -> None:
        if self._watched_at:
            faulthandler.cancel_dump_traceback_later()
            self._watched_at = 0.0


def _num_live(scheduler: Scheduler) -> int:
    return len(scheduler.running) + len(scheduler.waiting)
