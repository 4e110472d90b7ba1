"""The HTTP of the load generator: responses cut anywhere, connections that are kept, and what is no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from eightfold.benchmarks.client import Address, DisconnectedError, EventParser, HttpClient, ResponseParser
from eightfold.errors import InputError

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED += b"5\r\nhello\r\n1;name=x\r\n,\r\n6\r\n world\r\n0\r\nTrailer: x\r\n\r\n"
RESPONSES = {
    "chunks": (CHUNKED, 200, b"hello, world"),
    "a length": (b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\nhello", 404, b"hello"),
    "nothing": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    "an empty body": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b""),
    "an interim head": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_cut_at_every_byte_is_the_same(name: str) -> None:
    data, status, body = RESPONSES[name]
    for cut in range(len(data) + 1):
        parser = ResponseParser()
        found = b"".join([*parser.push(data[:cut]), *parser.push(data[cut:])])
        assert (parser.status, found, parser.has_ended, parser.closes) == (status, body, True, False), cut
    parser = ResponseParser()
    assert b"".join(piece for byte in data for piece in parser.push(bytes([byte]))) == body
    assert parser.has_ended


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert b"".join(parser.push(b"HTTP/1.0 200 OK\r\n\r\nhel")) == b"hel"
    assert b"".join(parser.push(b"lo")) == b"lo"
    assert (parser.has_ended, parser.ends_with_connection, parser.closes) == (False, True, True)


@pytest.mark.parametrize("data", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"])
def test_what_is_no_http_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"first line is 'SSH|invalid literal"):
        list(ResponseParser().push(data))


def test_events_cut_at_every_byte_are_the_same() -> None:
    text = b'data: {"a": 1}\r\n\r\n: a comment\n\nevent: x\ndata:two\ndata: lines\n\nid: 3\n\ndata: [DONE]\n\n'
    expected = [b'{"a": 1}', b"two\nlines", b"[DONE]"]
    for cut in range(len(text) + 1):
        parser = EventParser()
        assert parser.push(text[:cut]) + parser.push(text[cut:]) == expected, cut
    assert EventParser().push(b"data: unfinished\n") == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:30000", Address("127.0.0.1", 30000, False, "")),
        ("https://example.org/v1/", Address("example.org", 443, True, "")),
        ("http://[::1]:80/proxy", Address("::1", 80, False, "/proxy")),
    ],
)
def test_addresses(url: str, expected: Address) -> None:
    assert Address.parse(url) == expected
    assert expected.authority.endswith(f":{expected.port}")


@pytest.mark.parametrize("url", ["", "127.0.0.1:30000", "ftp://a", "http://", "http://a:b", "http://a?b", "http://a:99999"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"--base-url: got .*; expected a URL such as http://127\.0\.0\.1:30000"):
        Address.parse(url)


@pytest.mark.parametrize("key", ["a b", "a\nInjected: x", "ключ"])
def test_a_key_that_would_break_the_header_is_refused(key: str) -> None:
    with pytest.raises(InputError, match="--api-key: got spaces"):
        HttpClient(Address.parse("http://a"), key)


class Server:
    """Answers each request on a connection with the next of some byte strings, then closes it."""

    def __init__(self, *connections: tuple[bytes, ...]) -> None:
        self.connections = [list(answers) for answers in connections]
        self.opened = 0
        self.heads: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers = self.connections[self.opened]
        self.opened += 1
        for answer in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))
            writer.write(answer)
            await writer.drain()
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[HttpClient]:
    listener = await asyncio.start_server(server, "127.0.0.1", 0)
    client = HttpClient(Address.parse(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"), "secret")
    try:
        yield client
    finally:
        client.close()
        listener.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def test_a_connection_is_kept_and_a_body_comes_in_pieces_with_their_time() -> None:
    async def run() -> None:
        server = Server((OK, CHUNKED))
        async with serving(server) as client:
            first = await client.request("GET", "/a")
            assert (first.status, first.body) == (200, b"ok")
            pieces: list[tuple[bytes, float]] = []
            second = await client.request("POST", "/b", b"{}", reader=lambda piece, now: pieces.append((piece, now)))
            assert (second.status, second.body) == (200, b"")
            assert b"".join(piece for piece, _ in pieces) == b"hello, world"
            assert all(now > 0 for _, now in pieces)
        assert server.opened == 1
        assert server.heads[1].startswith(b"POST /b HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nAuthorization: Bearer secret\r\n" in server.heads[1]

    asyncio.run(run())


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    async def run() -> None:
        server = Server((OK,), (OK,))
        async with serving(server) as client:
            for _ in range(2):
                assert (await client.request("GET", "/a")).body == b"ok"
        assert server.opened == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "before a response"),
        (CHUNKED[:-30], "in the middle of a response"),
        (b"no http at all\r\n\r\n", "the response is no HTTP: its first line is 'no http at all'"),
    ],
)
def test_a_response_that_is_cut_is_an_error(answer: bytes, message: str) -> None:
    async def run() -> None:
        async with serving(Server((answer,))) as client:
            with pytest.raises(DisconnectedError, match=message):
                await client.request("GET", "/a")

    asyncio.run(run())


def test_a_body_that_ends_with_the_connection_is_whole() -> None:
    async def run() -> None:
        async with serving(Server((b"HTTP/1.1 200 OK\r\n\r\nhello",))) as client:
            assert (await client.request("GET", "/a")).body == b"hello"

    asyncio.run(run())
