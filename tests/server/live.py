"""A server in a process of its own, as a user starts it, for tests that talk to it over sockets."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx

DEADLINE = 60.0
"""Seconds after which a test fails that waits for something."""

T = TypeVar("T")


def eventually(look: Callable[[], T], is_so: Callable[[T], bool] = bool, *, within: float = DEADLINE) -> T:
    """What `look` returns once it is so."""
    deadline = time.monotonic() + within
    while not is_so(seen := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"after {within:g} s it is still {seen!r}")
        time.sleep(0.01)
    return seen


def processes() -> dict[int, int]:
    """Every process that is not a zombie, with its parent."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}


@dataclass
class LiveServer:
    """A server that was started.

    Attributes:
        process: the HTTP process.
        url: where it listens.
        lines: what it wrote to stdout and stderr so far.
        headers: what `client` sends, such as the key.
    """

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)
    headers: Mapping[str, str] = field(default_factory=dict)
    _fresh: queue.Queue[str | None] = field(default_factory=queue.Queue)

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client with the server's address."""
        return httpx.Client(base_url=self.url, headers=dict(self.headers), timeout=DEADLINE, trust_env=False, **options)

    def get(self, path: str) -> httpx.Response:
        """One answer, over a connection of its own."""
        with self.client() as client:
            return client.get(path)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """One answer, over a connection of its own. `body` is an object, or bytes that are sent as they are."""
        with self.client() as client:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            return client.post(path, **content, **options)

    def metric(self, name: str) -> float:
        """A number of /metrics; the sum where several have the name."""
        text = self.get("/metrics").text.splitlines()
        found = [float(line.rpartition(" ")[2]) for line in text if line.startswith((f"{name}{{", f"{name} "))]
        if not found:
            raise AssertionError(f"/metrics has no {name}")
        return sum(found)

    def is_idle(self) -> bool:
        """Whether no request runs or waits, and none holds a part of the cache."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names)

    def children(self) -> set[int]:
        """The ids of the processes that the server started, and of those that they started."""
        parents = processes()
        found = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found - {self.process.pid}

    def wait_ready(self) -> None:
        """Wait until the model is loaded."""
        self.wait_line("ready on ")

    def wait_line(self, start: str) -> str:
        """The first line of output with this beginning, from now on."""
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                line = self._fresh.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"no line begins with {start!r}:\n" + "".join(self.lines))
            if line.startswith(start):
                return line

    def signal(self, number: int) -> None:
        """Send a signal to the HTTP process."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code, once the process has ended."""
        return self.process.wait(DEADLINE)

    def read(self, stream: IO[str]) -> None:
        """Collect output, until its end."""
        for line in stream:
            self.lines.append(line)
            self._fresh.put(line)
        self._fresh.put(None)


@contextmanager
def live_server(model: Path | str, *flags: str, ready: bool = True, api_key: str | None = None) -> Iterator[LiveServer]:
    """A server on a free port, ended with all its processes at the end of the block.

    Args:
        model: MODEL of the command line.
        flags: further words of it.
        ready: whether to wait until the model is loaded.
        api_key: the server's key, which `client` sends.
    """
    key = () if api_key is None else ("--api-key", api_key)
    command = [sys.executable, "-m", "eightfold", "serve", str(model), "--port", "0", *key, *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, process_group=0
    ) as process:
        assert process.stdout is not None
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        server = LiveServer(process, headers=headers)
        reader = threading.Thread(target=server.read, args=(process.stdout,), daemon=True)
        reader.start()
        children: set[int] = set()
        try:
            server.url = server.wait_line("listening on ").split()[2].rstrip(",")
            if ready:
                server.wait_ready()
            children = server.children()
            yield server
        except BaseException:
            sys.stdout.write("".join(server.lines))  # pytest shows it beside the failure
            raise
        finally:
            if process.poll() is None:
                children = server.children()
                process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE)
            eventually(lambda: children & set(processes()), lambda left: not left)
            reader.join(DEADLINE)
