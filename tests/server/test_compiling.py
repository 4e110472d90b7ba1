"""Requests that wait for a grammar while a thread compiles it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from eightfold.errors import InputError
from eightfold.server.compiling import Compilations
from eightfold.types import Grammar, Request, SamplingParams

GRAMMAR = Grammar("regex", "a+")


def request(name: str) -> Request:
    return Request(name, (1,), SamplingParams(grammar=GRAMMAR), 0)


class Compiler:
    """Compiles when it is let, and raises what it is told to."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.raises: Exception | None = None
        self.num_compiled = 0

    def compile(self, grammar: Grammar) -> None:
        assert grammar == GRAMMAR
        assert self.let.wait(10)
        self.num_compiled += 1
        if self.raises is not None:
            raise self.raises


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    found = Compiler()
    yield found
    found.let.set()


def wait_for(compilations: Compilations) -> list[tuple[Request, InputError | None]]:
    found: list[tuple[Request, InputError | None]] = []
    deadline = time.monotonic() + 10
    while compilations:
        assert time.monotonic() < deadline
        found += compilations.finished()
        time.sleep(0.001)
    return found


def test_requests_wait_until_their_grammars_are_ready_and_come_in_order(compiler: Compiler) -> None:
    compilations = Compilations(compiler.compile)
    for name in ("a", "b"):
        compilations.begin(request(name), GRAMMAR)
    assert list(compilations.finished()) == []
    assert (len(compilations), "a" in compilations, compilations.request_ids) == (2, True, ("a", "b"))
    compiler.let.set()
    assert wait_for(compilations) == [(request("a"), None), (request("b"), None)]
    compilations.close()


def test_a_refusal_comes_with_its_request(compiler: Compiler) -> None:
    compilations = Compilations(compiler.compile)
    compiler.raises = InputError("guided_regex", got="a(", expected="a pattern")
    compiler.let.set()
    compilations.begin(request("a"), GRAMMAR)
    assert wait_for(compilations) == [(request("a"), compiler.raises)]
    compilations.close()


def test_a_fault_is_not_a_refusal(compiler: Compiler) -> None:
    compilations = Compilations(compiler.compile)
    compiler.raises = RuntimeError("broken")
    compiler.let.set()
    compilations.begin(request("a"), GRAMMAR)
    with pytest.raises(RuntimeError, match="broken"):
        wait_for(compilations)
    compilations.close()


def test_what_is_discarded_is_not_compiled_and_not_told(compiler: Compiler) -> None:
    compilations = Compilations(compiler.compile)
    for name in ("a", "b", "c"):
        compilations.begin(request(name), GRAMMAR)
    assert compilations.discard("b")
    assert not compilations.discard("b")
    compiler.let.set()
    assert [item.request_id for item, _ in wait_for(compilations)] == ["a", "c"]
    assert compiler.num_compiled == 2
    compilations.close()
