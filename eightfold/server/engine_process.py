"""What every engine's process does around its loop: it talks to the other side, and ends when that side is gone."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeAlias

import zmq

from eightfold.errors import InputError
from eightfold.server.engine_loop import EngineLoop, RunsRequests
from eightfold.server.wire import Codec, Command, Failure, FromEngine, Load, Ready, Refusal, ServedModel
from eightfold.server.wire import Progress as ProgressMessage
from eightfold.types import Progress

LoadEngine: TypeAlias = Callable[[Load, Progress], tuple[RunsRequests, Callable[[], ServedModel]]]
"""Makes an engine, and a function that says what the other side is to know of it."""

_REPORT_SECONDS = 0.1
_FIRST_MESSAGE_SECONDS = 60.0


class Link:
    """The engine's side of the connection.

    Args:
        address: where the other side listens.
    """

    def __init__(self, address: str) -> None:
        self._codec = Codec()
        self._context = zmq.Context()
        self._socket: zmq.SyncSocket = self._context.socket(zmq.PAIR)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 1000)):
            self._socket.setsockopt(option, value)
        self._socket.connect(address)

    def receive(self, seconds: float) -> Command | None:
        """The next command; None where none comes within `seconds`."""
        if seconds > 0 and not self._socket.poll(int(seconds * 1000)):
            return None
        try:
            return self._codec.commands.decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def send(self, message: FromEngine) -> None:
        """Send a message, without waiting for anybody to read it."""
        self._socket.send(self._codec.encode(message))

    def close(self) -> None:
        """Hand over what was sent, and end."""
        self._socket.close()
        self._context.term()


def run(arguments: Sequence[str], load_engine: LoadEngine) -> None:
    """Be the process of an engine, and never return.

    Args:
        arguments: the address of the other side, the folder that it lies in, and the descriptor of the lifeline.
        load_engine: makes the engine.
    """
    address, folder, descriptor = arguments
    # How this process ends is the other side's decision, also where a supervisor signals all processes of a group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    lifeline = socket.socket(fileno=int(descriptor))
    lifeline.set_inheritable(False)
    threading.Thread(target=_end_with, args=(lifeline, folder), daemon=True).start()
    link = Link(address)
    code = _serve(link, load_engine)
    link.close()
    sys.stderr.flush()
    # Without the interpreter's own end, in which a library's threads can hang.
    os._exit(code)


def _serve(link: Link, load_engine: LoadEngine) -> int:
    """Load, and run until the end; the exit code is 0 where the other side wanted the end."""
    load = link.receive(_FIRST_MESSAGE_SECONDS)
    if not isinstance(load, Load):
        return 0
    try:
        engine, describe = load_engine(load, _reporter(link))
        link.send(Ready(describe()))
        EngineLoop(engine, describe, link.receive, link.send, watchdog_seconds=load.watchdog_seconds).run()
    except InputError as error:
        link.send(Failure(str(error), Refusal.of(error)))
        return 2
    except BaseException as error:  # whatever it is, the other side has to hear of it
        traceback.print_exc()
        link.send(Failure(f"the engine broke: {type(error).__name__}: {error}"))
        return 1
    return 0


def _end_with(lifeline: socket.socket, folder: str) -> None:
    """Wait for the end of the other side, and end this one."""
    lifeline.recv(1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _reporter(link: Link) -> Progress:
    """Passes on a few reports a second, and the last one of each phase."""
    last = 0.0

    def report(phase: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > _REPORT_SECONDS or done == total:
            last = now
            link.send(ProgressMessage(phase, done, total))

    return report
