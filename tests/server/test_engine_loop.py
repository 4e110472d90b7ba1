"""The engine's loop, with commands that a test has written down and an engine of no cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from eightfold.config import EngineConfig
from eightfold.errors import InputError
from eightfold.server.engine_loop import EngineLoop
from eightfold.server.null_engine import NullEngine, describe
from eightfold.server.wire import Abort, Close, Command, Control, FromEngine, News, Refusal, Reply, Submit
from eightfold.types import Grammar, Request, SamplingParams, TokenEvent


class Script:
    """The other side: gives one command after the other, each when the loop asks at the turn it is meant for.

    Args:
        turns: the commands of each turn. After the last turn the loop is closed.
    """

    def __init__(self, turns: Sequence[Sequence[Command]]) -> None:
        self._turns = [list(turn) for turn in turns]
        self.sent: list[FromEngine] = []
        self.waits: list[float] = []

    def receive(self, seconds: float) -> Command | None:
        if not self._turns:
            return Close()
        self.waits.append(seconds)
        if self._turns[0]:
            return self._turns[0].pop(0)
        self._turns.pop(0)
        return None

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def events(self) -> list[TokenEvent]:
        return [event for message in self.sent if isinstance(message, News) for event in message.events]

    def started(self) -> list[str]:
        return [name for message in self.sent if isinstance(message, News) for name in message.started]

    def replies(self) -> list[Reply]:
        return [message for message in self.sent if isinstance(message, Reply)]


@pytest.fixture
def engine(tiny_checkpoint: Path) -> NullEngine:
    return NullEngine(EngineConfig(model=str(tiny_checkpoint), max_running_requests=2, context_length=64))


@pytest.fixture
def play(engine: NullEngine) -> Callable[..., Script]:
    """Run a loop over the turns that it is given, and return what came of it."""

    def run(*turns: Sequence[Command]) -> Script:
        script = Script(turns)
        EngineLoop(engine, lambda: describe(engine), script.receive, script.send, watchdog_seconds=None).run()
        engine.scheduler.check_integrity()
        return script

    return run


def ask(name: str, *, max_tokens: int = 3, prompt: Sequence[int] = (5, 6)) -> Submit:
    return Submit([Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0), 0)])


def test_a_request_runs_to_its_end(play: Callable[..., Script]) -> None:
    script = play([ask("a")], [], [], [])
    assert [(event.token_id, event.finish_reason) for event in script.events()] == [(5, None), (6, None), (5, "length")]
    assert script.started() == ["a"]
    news = [message for message in script.sent if isinstance(message, News)]
    assert news[-1].snapshot is not None
    assert (news[-1].snapshot.running, news[-1].snapshot.generated_tokens, news[-1].snapshot.num_steps) == (0, 3, 3)


def test_it_waits_only_where_there_is_nothing_to_do(play: Callable[..., Script]) -> None:
    script = play([], [ask("a", max_tokens=2)], [], [])
    assert [wait > 0 for wait in script.waits] == [True, True, False, False, True]


def test_events_of_all_requests_come_in_one_message(play: Callable[..., Script]) -> None:
    script = play([ask("a"), ask("b")], [])
    first = next(message for message in script.sent if isinstance(message, News))
    assert [event.request_id for event in first.events] == ["a", "b"]


def test_who_waits_is_told_when_it_starts(play: Callable[..., Script]) -> None:
    script = play([ask("a"), ask("b"), ask("c", max_tokens=1)], [], [], [])
    started = [message.started for message in script.sent if isinstance(message, News)]
    assert [sorted(names) for names in started[:4]] == [["a", "b"], [], [], ["c"]]


def test_an_abort_frees_at_once_and_is_told(play: Callable[..., Script], engine: NullEngine) -> None:
    script = play([ask("a", max_tokens=30)], [Abort(["a", "nobody"])], [])
    assert script.events()[-1] == TokenEvent("a", None, finish_reason="abort")
    assert len(script.events()) == 2
    assert engine.scheduler.manager.num_free_blocks == engine.scheduler.manager.num_blocks


def test_a_request_that_can_never_fit_is_refused_alone(play: Callable[..., Script]) -> None:
    script = play([ask("long", prompt=range(70)), ask("a", max_tokens=1)], [])
    (refusal,) = [message for message in script.sent if isinstance(message, Refusal)]
    assert (refusal.request_id, refusal.what, refusal.got) == ("long", "prompt", "70 tokens")
    assert [event.request_id for event in script.events()] == ["a"]


def test_a_pause_keeps_what_runs_and_the_loop_alive(play: Callable[..., Script]) -> None:
    pause, go_on = Control(1, "pause", {"abort": False}), Control(2, "continue", {})
    script = play([ask("a", max_tokens=4)], [pause], [], [], [go_on], [])
    assert [reply.number for reply in script.replies()] == [1, 2]
    assert script.replies()[0].result == {"num_aborted": 0, "num_paused": 1}
    silent = [message for message in script.sent if isinstance(message, News) and not message.events]
    assert len(silent) >= 2
    assert all(message.snapshot is not None and message.snapshot.is_paused for message in silent[:2])
    assert len(script.events()) == 3


def test_steps_are_counted_by_kind_and_a_pause_is_no_gap(
    play: Callable[..., Script], engine: NullEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))  # one tick from each reading to the next
    script = play([ask("a", max_tokens=4)], [Control(1, "pause", {"abort": False})], [], [Control(2, "continue", {})], [], [])
    (last,) = [message.snapshot for message in script.sent if isinstance(message, News) and message.snapshot is not None][-1:]
    assert (last.steps["prefill"].steps, last.steps["prefill"].tokens) == (1, 2)
    assert (last.steps["decode"].steps, last.steps["decode"].seconds) == (3, 3.0)
    assert last.steps["decode"].gap_seconds == 2.0  # of three decodes one came after the pause
    assert last.steps["mixed"].steps == 0


def test_a_pause_that_aborts_ends_running_and_waiting_requests(play: Callable[..., Script]) -> None:
    script = play([ask("a"), ask("b"), ask("c")], [Control(1, "pause", {"abort": True})], [])
    assert script.replies()[0].result == {"num_aborted": 3, "num_paused": 0}
    assert sorted(event.request_id for event in script.events() if event.finish_reason == "abort") == ["a", "b", "c"]


def test_commands_that_fail_are_refused_and_the_loop_goes_on(play: Callable[..., Script]) -> None:
    update = Control(1, "update_weights", {"model": "x", "abort": False})
    script = play([update, Control(2, "nonsense", {}), Control(3, "check", {})], [ask("a", max_tokens=1)], [])
    first, second, third = script.replies()
    assert first.refusal is not None
    assert first.refusal.what == "update_weights"
    assert second.refusal is not None
    assert second.refusal.got == "nonsense"
    assert (third.result, third.refusal) == ({}, None)
    assert len(script.events()) == 1


def test_a_step_that_raises_ends_the_loop(tiny_checkpoint: Path) -> None:
    class Broken(NullEngine):
        def step(self) -> list[TokenEvent]:
            raise RuntimeError("a kernel failed")

    engine = Broken(EngineConfig(model=str(tiny_checkpoint)))
    script = Script([[ask("a")], []])
    loop = EngineLoop(engine, lambda: describe(engine), script.receive, script.send, watchdog_seconds=None)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        loop.run()


def test_new_weights_come_with_a_new_description(tiny_checkpoint: Path) -> None:
    class Updated(NullEngine):
        def update_weights(self, model: str, **_: Any) -> None:
            self.vocab_size = 7

    engine = Updated(EngineConfig(model=str(tiny_checkpoint)))
    script = Script([[Control(1, "update_weights", {"model": "x", "abort": False})]])
    EngineLoop(engine, lambda: describe(engine), script.receive, script.send, watchdog_seconds=None).run()
    assert script.replies()[0].result["model"].vocab_size == 7


class Slow(NullEngine):
    """An engine whose grammars take a while, and of which one is refused."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.let = threading.Event()

    def compile(self, grammar: Grammar) -> None:
        assert self.let.wait(10)
        if grammar.text == "bad":
            raise InputError("guided_regex", got="bad", expected="another")


def guided(name: str, text: str = "good") -> Submit:
    params = SamplingParams(max_tokens=2, temperature=0.0, grammar=Grammar("regex", text))
    return Submit([Request(name, (5, 6), params, 0)])


def test_a_grammar_that_compiles_holds_up_nobody(tiny_checkpoint: Path) -> None:
    engine = Slow(EngineConfig(model=str(tiny_checkpoint), max_running_requests=4, context_length=64))
    script = Script([[guided("slow"), guided("refused", "bad"), guided("aborted"), ask("quick")], [Abort(["aborted"])]])
    loop = EngineLoop(engine, lambda: describe(engine), script.receive, script.send, watchdog_seconds=None)
    deadline = time.monotonic() + 20

    def receive(seconds: float) -> Command | None:
        ended = {event.request_id for event in script.events() if event.finish_reason is not None}
        if "quick" in ended:
            engine.let.set()
        assert time.monotonic() < deadline
        return script.receive(seconds) if script._turns or "slow" in ended else None

    loop._receive = receive
    loop.run()
    ends = {event.request_id: event.finish_reason for event in script.events() if event.finish_reason is not None}
    assert ends == {"aborted": "abort", "quick": "length", "slow": "length"}
    assert list(ends) == ["aborted", "quick", "slow"]
    (refusal,) = (message for message in script.sent if isinstance(message, Refusal))
    assert (refusal.request_id, refusal.what) == ("refused", "guided_regex")
    waiting = [
        message.snapshot.waiting for message in script.sent if isinstance(message, News) and message.snapshot is not None
    ]
    assert max(waiting) >= 2
    engine.scheduler.check_integrity()


def test_pausing_with_abort_ends_those_that_wait_for_grammars(tiny_checkpoint: Path) -> None:
    engine = Slow(EngineConfig(model=str(tiny_checkpoint), max_running_requests=4, context_length=64))
    script = Script([[guided("a"), guided("b"), Control(1, "pause", {"abort": True})], []])
    EngineLoop(engine, lambda: describe(engine), script.receive, script.send, watchdog_seconds=None).run()
    engine.let.set()
    assert [(event.request_id, event.finish_reason) for event in script.events()] == [("a", "abort"), ("b", "abort")]
    assert script.replies()[0].result["num_aborted"] == 2
