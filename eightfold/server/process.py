"""A child process whose life is tied to this one's: neither side outlives the other, however the other ends.

Both sides hold one end of a pair of connected sockets that nobody writes to. The kernel closes a process's end when the process
is gone, also where it was killed, and the other side reads the end of the stream.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from eightfold.errors import InputError

# The child finds modules where this process does, and nothing in the folder where it happens to start.
_BOOT = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
importlib.import_module(sys.argv[2]).main(sys.argv[3:])
"""


class EngineProcess:
    """A process that an engine runs in.

    Args:
        module: its `main` is called with the address, the folder and the descriptor that `engine_process.run` takes.

    Attributes:
        address: of the socket on which the two sides talk, in a folder that this user alone can enter.
        lifeline: readable once the process is gone.
    """

    def __init__(self, module: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="eightfold-"))
        self.address = f"ipc://{self._folder / 'engine'}"
        self.lifeline, theirs = socket.socketpair()
        self.lifeline.setblocking(False)
        with theirs:
            descriptor = theirs.fileno()
            arguments = [json.dumps(sys.path), module, self.address, str(self._folder), str(descriptor)]
            # A group of its own keeps the terminal's Ctrl-C away from it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                process_group=0,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(0.0)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def end(self, patience: float) -> int | None:
        """Have the process gone, and remove what it left.

        Args:
            patience: seconds that it has to leave by itself.

        Returns:
            Its exit code, negative for a signal; None where even the kernel could not end it yet.
        """
        try:
            code: int | None = self._wait(patience)
            if code is None:
                self._process.kill()
                code = self._wait(10.0)
            return code
        finally:
            self.lifeline.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, seconds: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; clients that connect wait until somebody accepts them.

    Raises:
        InputError: the address is taken, or is none of this machine's.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise InputError("--host and --port", got=f"{host}:{port} ({error})", expected="an address that is free") from error
