"""What happens to every request before its route: an id, a log line, the key, the size of the body, and a limit of time.

Plain ASGI: a wrapper that reads a response on its way would hold back its stream.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from uuid import uuid4

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eightfold.server.errors import BodyTooLargeError, ErrorAnswer, answer_to

logger = logging.getLogger(__name__)

PUBLIC = frozenset({"/health", "/ready", "/"})
"""Paths that need no key: what probes ask, and the chat page, a file that asks its user for the key."""
PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Paths that are asked all the time: they are logged as debugging alone, and nobody waits for them at the end."""
ADMIN = frozenset({"/abort_request", "/flush_cache", "/pause_generation", "/continue_generation", "/update_weights_from_disk"})
"""Paths that need the admin key, where there is one."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_LOGGED_BYTES = 100_000


class Identified:
    """Gives each request an id, the client's `X-Request-Id` where it sent one, and logs a line at its end.

    Args:
        app: what answers.
        log_bodies: whether the log has the bodies too.

    Attributes:
        num_open: requests that are being answered, without probes.
    """

    def __init__(self, app: ASGIApp, *, log_bodies: bool = False) -> None:
        self.num_open = 0
        self._app = app
        self._log_bodies = log_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        is_probe = scope["path"] in PROBES
        began, status, body = time.perf_counter(), 0, bytearray()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        async def receive_and_keep() -> Message:
            message = await receive()
            if len(body) < _LOGGED_BYTES:
                body.extend(message.get("body", b"")[: _LOGGED_BYTES - len(body)])
            return message

        self.num_open += not is_probe
        try:
            await self._app(scope, receive_and_keep if self._log_bodies else receive, send_with_id)
        finally:
            self.num_open -= not is_probe
            logger.log(
                logging.DEBUG if is_probe else logging.INFO,
                "%s %s %s in %.3f s, id %s%s",
                scope["method"],
                scope["path"],
                status or "without an answer",
                time.perf_counter() - began,
                request_id,
                f", body {bytes(body).decode(errors='replace')!r}" if self._log_bodies and body else "",
            )


class Keyed:
    """Lets those in who have the key.

    Args:
        app: what answers them.
        api_key: for every path but the public ones.
        admin_api_key: for the admin paths; it opens all others too. None leaves them to `api_key`.
    """

    def __init__(self, app: ASGIApp, api_key: str, admin_api_key: str | None) -> None:
        self._app = app
        keys = [f"Bearer {key}".encode() for key in (api_key, admin_api_key) if key is not None]
        self._all, self._admin = keys, keys[-1:]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "http" and scope["path"] not in PUBLIC:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            accepted = self._admin if scope["path"] in ADMIN else self._all
            if not any(secrets.compare_digest(given, key) for key in accepted):
                await _unknown_key(scope["path"] in ADMIN and self._admin != self._all, given).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _unknown_key(is_admin: bool, given: bytes) -> ErrorAnswer:
    got = "a key that is not accepted" if given else "no key"
    which = "--admin-api-key" if is_admin else "--api-key"
    message = f"Authorization: got {got}; expected Bearer and the server's {which}"
    return ErrorAnswer(401, message, "authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class SameOrigin:
    """Refuses what a web page of another origin has a browser send, unless its origin is allowed.

    Without it a page that somebody happens to read could have its reader's browser post to a server on the reader's machine:
    that the page may not read the answer does not keep the server from acting.

    Args:
        app: what answers the others.
        allowed: further origins; `*` is all.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "http" and "*" not in self._allowed:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and origin not in self._allowed and origin.partition("://")[2] != headers.get("host"):
                message = f"Origin: got {origin}; expected this server's own pages, or one of --allowed-origins"
                answer = ErrorAnswer(403, message, "permission_error", code="origin_not_allowed")
                await answer.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Guarded:
    """Keeps what nobody foresaw from the web server, which would cut the connection after an answer that was whole.

    Args:
        app: what answers, errors of its own included.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and log the error that its answer could not tell of."""
        is_ended = False

        async def watch(message: Message) -> None:
            nonlocal is_ended
            is_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            if not is_ended:
                raise
            logger.exception("%s %s failed", scope.get("method"), scope.get("path"))


class Limited:
    """Refuses bodies that are too large, by their announced length or while they come.

    Args:
        app: what answers the others.
        max_bytes: the largest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or int(announced) > self._max_bytes:
            response = answer_to(BodyTooLargeError(self._max_bytes)).response()
            response.headers["connection"] = "close"  # the rest of the body would be taken for the next request
            await response(scope, receive, send)
            return
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise BodyTooLargeError(self._max_bytes)
            return message

        await self._app(scope, receive_limited, send)


class Timed:
    """Ends requests that take too long, with an error: as the response, or as the last event of a stream.

    Args:
        app: what answers.
        seconds: for one request.
    """

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_started = is_stream = is_ended = False

        async def watch(message: Message) -> None:
            nonlocal is_started, is_stream, is_ended
            if message["type"] == "http.response.start":
                is_started = True
                is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
            elif not message.get("more_body", False):
                is_ended = True
            await send(message)

        try:
            async with asyncio.timeout(self._seconds) as limit:
                await self._app(scope, receive, watch)
        except TimeoutError:
            if not limit.expired():
                raise
            answer = answer_to(TimeoutError(f"the request took more than {self._seconds:g} seconds, the --request-timeout"))
            if not is_started:
                await answer.response()(scope, receive, send)
            elif not is_ended:
                event = b"data: " + msgspec.json.encode(answer.body) + b"\n\n" if is_stream else b""
                await send({"type": "http.response.body", "body": event, "more_body": False})


def wrapped(app: ASGIApp, layers: Sequence[Callable[[ASGIApp], ASGIApp]]) -> ASGIApp:
    """An app within layers, the first of which is the innermost."""
    for layer in layers:
        app = layer(app)
    return app
