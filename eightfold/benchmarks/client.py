"""HTTP/1.1 for a load generator: kept connections, bodies as they arrive, and each piece with its time of arrival.

A general client spends more on a streamed token than a good server does, and then measures itself. This one is an asyncio
protocol: the time is taken when bytes come from the socket, and nothing stands between them and the reader.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from eightfold._version import __version__
from eightfold.errors import InputError

Reader = Callable[[bytes, float], None]
"""Takes a piece of a body and the `time.perf_counter` of its arrival."""


class DisconnectedError(ConnectionError):
    """The connection ended before the response did."""


@dataclass(slots=True)
class Response:
    """A status line and the body that came with it.

    Attributes:
        status: the HTTP status.
        body: the whole body; empty where a reader took it.
    """

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Address:
    """Where an API is.

    Attributes:
        host, port, secure: of the connection.
        path: in front of every route, without a slash at its end.
    """

    host: str
    port: int
    secure: bool
    path: str

    @staticmethod
    def parse(url: str) -> Address:
        """From a URL such as `http://127.0.0.1:30000`, with or without a final `/v1`.

        Raises:
            InputError: it is no such URL.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InputError("--base-url", got=url, expected="a URL such as http://127.0.0.1:30000")
        secure = parts.scheme == "https"
        return Address(parts.hostname, port or (443 if secure else 80), secure, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class HttpClient:
    """Requests to one address over connections that are kept and used again.

    Args:
        address: of the API.
        api_key: for `Authorization: Bearer`; empty sends none.
    """

    def __init__(self, address: Address, api_key: str = "") -> None:
        if any(not "!" <= character <= "~" for character in api_key):
            raise InputError("--api-key", got="spaces, control characters or characters beyond ASCII", expected="a key")
        self._address = address
        self._idle: list[_Connection] = []
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = (
            f"Host: {address.authority}\r\nUser-Agent: eightfold/{__version__}\r\nAccept: */*\r\n"
            f"{authorization}Content-Type: application/json\r\n"
        )

    async def request(self, method: str, route: str, body: bytes = b"", *, reader: Reader | None = None) -> Response:
        """Send a request and wait for the end of its response. Cancelling it closes the connection.

        Args:
            method: GET or POST.
            route: path below the address, such as `/v1/models`.
            body: JSON.
            reader: takes the body of a response of status 200, piece by piece; None keeps it for the result.

        Raises:
            OSError: no connection, or `DisconnectedError` in the middle of a response.
        """
        head = f"{method} {self._address.path}{route} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        payload = head.encode("ascii") + body
        while True:
            connection = self._kept()
            is_kept = connection is not None
            if connection is None:
                connection = await self._connect()
            try:
                response = await connection.exchange(payload, reader)
            except DisconnectedError:
                # A server may close a kept connection at the moment at which a request is sent on it.
                if is_kept and not connection.has_received:
                    continue
                raise
            except BaseException:
                connection.close()
                raise
            if connection.is_open:
                self._idle.append(connection)
            return response

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().close()

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        address = self._address
        _, connection = await loop.create_connection(_Connection, address.host, address.port, ssl=address.secure or None)
        return connection


class _Connection(asyncio.Protocol):
    """One connection, which carries one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.has_received = False
        self._transport: asyncio.Transport | None = None
        self._pending: asyncio.Future[Response] | None = None
        self._reader: Reader | None = None
        self._parser = ResponseParser()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002, a protocol's signature
        self.is_open = False
        if self._pending is not None and not self._pending.done():
            if self._parser.ends_with_connection:
                self._finish()
            else:
                what = "in the middle of a response" if self.has_received else "before a response"
                self._pending.set_exception(DisconnectedError(f"the server closed the connection {what}"))

    async def exchange(self, payload: bytes, reader: Reader | None) -> Response:
        """Write a request; the response when it has ended."""
        if self._transport is None or not self.is_open:
            raise DisconnectedError("the connection is closed")
        self._parser = ResponseParser()
        self._reader = reader
        self.has_received = False
        self._pending = asyncio.get_running_loop().create_future()
        self._transport.write(payload)
        return await self._pending

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.has_received = True
        if self._pending is None or self._pending.done():
            self.close()  # nothing was asked
            return
        parser = self._parser
        try:
            for piece in parser.push(data):
                if self._reader is not None and parser.status == 200:
                    self._reader(piece, now)
                else:
                    parser.body += piece
        except ValueError as error:
            self._pending.set_exception(DisconnectedError(f"the response is no HTTP: {error}"))
            self.close()
            return
        if parser.has_ended:
            self._finish()

    def close(self) -> None:
        """Close it, whatever is under way."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def _finish(self) -> None:
        parser = self._parser
        if parser.closes:
            self.close()
        if self._pending is not None:
            self._pending.set_result(Response(parser.status, bytes(parser.body)))


class ResponseParser:
    """One HTTP/1.1 response, pushed in as pieces that may be cut anywhere.

    Attributes:
        status: once the head is there.
        body: for whoever keeps the pieces.
        has_ended: whether the whole response was pushed.
        closes: whether the server will close the connection after it.
        ends_with_connection: whether only the end of the connection ends the body.
    """

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.has_ended = False
        self.closes = False
        self.ends_with_connection = False
        self._buffer = b""
        self._advance = self._head
        # Bytes that are still to come of the body or of the chunk.
        self._remaining = 0

    def push(self, data: bytes) -> Iterator[bytes]:
        """The pieces of the body in these bytes.

        Raises:
            ValueError: this is no HTTP.
        """
        self._buffer = self._buffer + data if self._buffer else data
        position = 0
        while not self.has_ended:
            position, piece, waits = self._advance(position)
            if piece:
                yield piece
            if waits:
                break
        self._buffer = self._buffer[position:]

    # Each state takes the position in the buffer and gives the new one, a piece of the body, and whether it needs more bytes.

    def _head(self, position: int) -> tuple[int, bytes, bool]:
        end = self._buffer.find(b"\r\n\r\n", position)
        if end < 0:
            return position, b"", True
        first, *lines = self._buffer[position:end].decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise ValueError(f"its first line is {first[:80]!r}")
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in lines)}
        self.status = int(words[1])
        self.closes = headers.get("connection", "close" if words[0] == "HTTP/1.0" else "") == "close"
        if 100 <= self.status < 200:
            return end + 4, b"", False  # another head follows
        if headers.get("transfer-encoding", "").endswith("chunked"):
            self._advance = self._chunk_size
        elif self.status in (204, 304):
            self.has_ended = True
        elif "content-length" in headers:
            self._remaining = int(headers["content-length"])
            self._advance = self._plain
            self.has_ended = self._remaining == 0
        else:
            self.ends_with_connection = self.closes = True
            self._advance = self._unbounded
        return end + 4, b"", False

    def _chunk_size(self, position: int) -> tuple[int, bytes, bool]:
        end = self._buffer.find(b"\r\n", position)
        if end < 0:
            return position, b"", True
        self._remaining = int(self._buffer[position:end].partition(b";")[0], 16)
        self._advance = self._chunk if self._remaining else self._trailer
        return end + 2, b"", False

    def _chunk(self, position: int) -> tuple[int, bytes, bool]:
        piece = self._buffer[position : position + self._remaining]
        self._remaining -= len(piece)
        position += len(piece)
        if self._remaining or len(self._buffer) < position + 2:
            return position, piece, True
        self._advance = self._chunk_size
        return position + 2, piece, False

    def _trailer(self, position: int) -> tuple[int, bytes, bool]:
        end = self._buffer.find(b"\r\n", position)
        if end < 0:
            return position, b"", True
        self.has_ended = end == position
        return end + 2, b"", False

    def _plain(self, position: int) -> tuple[int, bytes, bool]:
        piece = self._buffer[position : position + self._remaining]
        self._remaining -= len(piece)
        self.has_ended = self._remaining == 0
        return position + len(piece), piece, True

    def _unbounded(self, position: int) -> tuple[int, bytes, bool]:
        return len(self._buffer), self._buffer[position:], True


class EventParser:
    """The data of server-sent events, from pieces that may be cut anywhere."""

    def __init__(self) -> None:
        self._buffer = b""

    def push(self, piece: bytes) -> list[bytes]:
        """The data of the events that these bytes complete; comments and other fields are passed over."""
        if b"\r" in piece:
            piece = piece.replace(b"\r", b"")  # only an end of a line has one: JSON escapes it
        buffer = self._buffer + piece if self._buffer else piece
        *events, self._buffer = buffer.split(b"\n\n")
        found = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                found.append(event[6:])
                continue
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines))
        return found
