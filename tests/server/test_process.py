"""Two processes that live and die together."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

import pytest

from eightfold.errors import InputError
from eightfold.server.process import EngineProcess, listen

NULL = "eightfold.server.null_engine"


def test_a_process_that_is_told_nothing_ends_with_its_parents_end_of_the_line() -> None:
    with EngineProcess(NULL) as process:
        folder = Path(process.address.removeprefix("ipc://")).parent
        assert folder.stat().st_mode & 0o077 == 0  # nobody else can enter
        assert os.getpgid(process.pid) == process.pid  # Ctrl-C does not reach it
        readable, _, _ = select.select([process.lifeline], [], [], 0)
        assert readable == []
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_the_lifeline_tells_of_a_process_that_was_killed() -> None:
    with EngineProcess(NULL) as process:
        os.kill(process.pid, 9)
        readable, _, _ = select.select([process.lifeline], [], [], 60)
        assert readable == [process.lifeline]
        assert process.end(60.0) == -9


def test_a_module_that_is_not_there_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    with EngineProcess("eightfold.server.no_such_engine") as process:
        assert process.end(60.0) == 1
    assert "No module named 'eightfold.server.no_such_engine'" in capfd.readouterr().err


def test_a_listener_takes_a_free_port_and_refuses_a_taken_one() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
        with pytest.raises(InputError, match=rf"--host and --port: got 127.0.0.1:{port} .* expected an address that is free"):
            listen("127.0.0.1", port)
    with pytest.raises(InputError, match=r"no-such-host\.invalid"):
        listen("no-such-host.invalid", 0)
