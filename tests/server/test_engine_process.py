"""What the engine's process says before and after its loop, over a socket that the test holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from eightfold.server.process import EngineProcess
from eightfold.server.wire import Close, Codec, Command, Failure, FromEngine, Load, News, Progress, Ready

PATIENCE_MS = 60_000
CODEC = Codec()


class Talk:
    """The other side of an engine's process."""

    def __init__(self, process: EngineProcess) -> None:
        self.context = zmq.Context()
        self.socket: zmq.SyncSocket = self.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(process.address)

    def say(self, command: Command) -> None:
        self.socket.send(CODEC.encode(command))

    def hear(self) -> FromEngine:
        """The next message that is no sign of life."""
        while True:
            assert self.socket.poll(PATIENCE_MS), "it says nothing"
            message = CODEC.news.decode(self.socket.recv())
            if not isinstance(message, News):
                return message


@contextmanager
def engine(module: str) -> Iterator[tuple[Talk, EngineProcess]]:
    with EngineProcess(module) as process:
        talk = Talk(process)
        try:
            yield talk, process
        finally:
            talk.socket.close()
            talk.context.term()


def test_it_loads_tells_of_the_model_and_leaves_when_told(tiny_checkpoint: Path) -> None:
    with engine("eightfold.server.null_engine") as (talk, process):
        talk.say(Load({"model": str(tiny_checkpoint)}, 0.0, 60.0))
        ready = talk.hear()
        assert isinstance(ready, Ready)
        assert (ready.model.model_path, ready.model.vocab_size) == (str(tiny_checkpoint), 300)
        talk.say(Close())
        assert process.end(60.0) == 0


def test_progress_is_told_and_its_last_word_always(tiny_checkpoint: Path) -> None:
    with engine("tests.server.children") as (talk, _):
        talk.say(Load({"model": str(tiny_checkpoint), "revision": "reports"}, 0.0, 60.0))
        heard = talk.hear()
        told = []
        while isinstance(heard, Progress):
            told.append((heard.phase, heard.done, heard.total))
            heard = talk.hear()
        assert told[0] == ("load", 1, 5)
        assert told[-1] == ("load", 5, 5)
        assert isinstance(heard, Ready)


def test_a_model_that_is_not_there_is_a_refusal_and_code_2(tmp_path: Path) -> None:
    with engine("eightfold.server.null_engine") as (talk, process):
        talk.say(Load({"model": str(tmp_path)}, 0.0, 60.0))
        failure = talk.hear()
        assert isinstance(failure, Failure)
        assert failure.refusal is not None
        assert "config.json" in failure.message
        assert process.end(60.0) == 2


def test_whatever_breaks_is_told_before_the_end(tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with engine("tests.server.children") as (talk, process):
        talk.say(Load({"model": str(tiny_checkpoint), "revision": "breaks while it loads"}, 0.0, 60.0))
        failure = talk.hear()
        assert isinstance(failure, Failure)
        assert failure.message == "the engine broke: RuntimeError: no memory"
        assert process.end(60.0) == 1
    assert "RuntimeError: no memory" in capfd.readouterr().err
