"""A server from its start to its end: listen, load, serve, drain, leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
import uvloop

from eightfold.server.app import make_app
from eightfold.server.bridge import EngineClient
from eightfold.server.config import ServerConfig
from eightfold.server.errors import UnavailableError
from eightfold.server.process import EngineProcess
from eightfold.server.reading import NO_FORMAT
from eightfold.server.reasoning import reasoning_format
from eightfold.server.state import AppState
from eightfold.server.token_stream import EngineDiedError
from eightfold.server.tools.detect import tool_format
from eightfold.text import Tokenizer

logger = logging.getLogger(__name__)

SUCCESS, ENGINE_DIED = 0, 1
"""Exit codes. A second signal leaves with 128 and its number."""

_LAST_WORDS_SECONDS = 5.0
"""Time that responses have to go out when their requests have ended."""

T = TypeVar("T")


def serve(
    options: Mapping[str, Any],
    config: ServerConfig,
    listener: socket.socket,
    process: EngineProcess,
    say: Callable[[str], object],
) -> int:
    """Serve until a signal or the engine's end.

    Args:
        options: of the engine: keywords of `EngineConfig`.
        config: of the server.
        listener: listens already.
        process: where the engine runs.
        say: takes the lines for whoever started the server.

    Returns:
        The exit code.

    Raises:
        InputError: a model that cannot be loaded, or a value that it does not fit.
    """
    logging.basicConfig(
        stream=sys.stderr, level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    web_log = logging.getLogger("uvicorn.error")
    web_log.setLevel(logging.WARNING)
    web_log.addFilter(_is_news)
    return uvloop.run(Server(options, config, listener, process, say).run())


def _is_news(record: logging.LogRecord) -> bool:
    """Whether the web server tells of a fault, and not of a client that we dropped, or were still sending to at the end."""
    return not str(record.msg).startswith(("ASGI callable returned without completing response", "Cancel %s running task(s)"))


class WebServer(uvicorn.Server):
    """uvicorn, without its own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `Server`."""
        yield


class Server:
    """One run of a server. Takes what `serve` takes."""

    def __init__(
        self,
        options: Mapping[str, Any],
        config: ServerConfig,
        listener: socket.socket,
        process: EngineProcess,
        say: Callable[[str], object],
    ) -> None:
        # The model's own formats are looked for when it is there; a name that nobody knows need not wait so long.
        if config.reasoning_parser not in (None, NO_FORMAT):
            reasoning_format(config.reasoning_parser)
        if config.tool_call_parser not in (None, NO_FORMAT):
            tool_format(config.tool_call_parser)
        self._config = config
        self._listener = listener
        self._say = say
        self._client = EngineClient(
            process,
            options,
            null_step_seconds=config.null_step_ms / 1000,
            max_queued_requests=config.max_queued_requests,
            stream_interval=config.stream_interval,
            watchdog_seconds=config.watchdog_timeout,
        )
        self._model_name = str(options["model"])
        self._needs_tokenizer = options.get("load_format") != "dummy"
        self._state = AppState(config, self._client, config.served_model_name or (self._model_name,))
        self._app = make_app(self._state)
        self._web = WebServer(
            uvicorn.Config(
                self._app.asgi,
                http="httptools",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                backlog=2048,
                timeout_graceful_shutdown=int(_LAST_WORDS_SECONDS),
            )
        )
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal or the engine's end, and return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        await self._client.start()
        web = asyncio.create_task(self._web.serve(sockets=[self._listener]))
        try:
            self._say(f"listening on {self.address}, loading {self._model_name}")
            code = await self._until_the_end()
        finally:
            self._web.should_exit = True
            await web
            await self._client.close()
        return code

    @property
    def address(self) -> str:
        """Where clients find the server."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _until_the_end(self) -> int:
        began = time.monotonic()
        stopped = asyncio.create_task(self._stop.wait())
        try:
            loading = asyncio.create_task(self._load())
            await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                loading.cancel()
                return SUCCESS
            loading.result()
            self._say(f"ready on {self.address} after {time.monotonic() - began:.1f} s")
            died = asyncio.create_task(self._client.died())
            await asyncio.wait({died, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not died.done():
                died.cancel()
                return await self._drain()
            logger.error("%s", died.result().message)
            await self._until(lambda: not self._app.requests.num_open, _LAST_WORDS_SECONDS)
            return ENGINE_DIED
        except EngineDiedError as error:
            failure = self._client.failure
            if failure is not None and failure.refusal is not None:
                raise failure.refusal.error() from error
            logger.error("%s", error)
            return ENGINE_DIED
        finally:
            stopped.cancel()

    async def _load(self) -> None:
        """Wait for the model, read its tokenizer, and begin to answer."""
        model = await self._client.loaded()
        template = self._config.chat_template
        text = None if template is None else Path(template).read_text(encoding="utf-8")
        tokenizer = await asyncio.to_thread(
            Tokenizer.load, Path(model.model_path), chat_template=text, required=self._needs_tokenizer
        )
        self._state.serve(model, tokenizer)
        for row in model.config:
            logger.info("%s: %s (%s%s)", row.name, row.value, row.kind, f": {row.why}" if row.why else "")
        for note in model.notes:
            logger.info("%s", note)

    async def _drain(self) -> int:
        """Take no new requests, let those that run end, and abort those that do not."""
        self._state.is_draining = True
        if self._client.snapshot.is_paused:
            told = UnavailableError("the server is shutting down, and generation is paused", "shutting_down")
            logger.info("shutting down: ended %d requests, which wait for generation to go on", self._client.fail_all(told))
        num_open, seconds = self._app.requests.num_open, self._config.shutdown_timeout
        logger.info("shutting down: %d requests have %g seconds to end; another signal leaves at once", num_open, seconds)
        if not await self._until(lambda: not self._app.requests.num_open, seconds):
            logger.warning("aborting %d requests that did not end in time", self._client.num_open)
            self._client.abort_all()
            await self._until(lambda: not self._app.requests.num_open, _LAST_WORDS_SECONDS)
        return SUCCESS

    async def _until(self, is_so: Callable[[], bool], seconds: float) -> bool:
        """Whether something comes to be so within a time, while there is an engine."""
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._client.kill()
            sys.stderr.flush()
            os._exit(128 + number)
        self._stop.set()
