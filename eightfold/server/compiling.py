"""Requests that wait for their grammars: those are compiled in another thread, so that a large one stalls nobody's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from eightfold.errors import InputError
from eightfold.types import Grammar, Request


class Compilations:
    """One thread that compiles, and the requests that it compiles for, in the order in which they came.

    Args:
        compile_grammar: leaves the result where the engine finds it at once; called in the thread.
    """

    def __init__(self, compile_grammar: Callable[[Grammar], None]) -> None:
        self._compile = compile_grammar
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._waiting: dict[str, tuple[Request, Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of the requests that wait."""
        return tuple(self._waiting)

    def begin(self, request: Request, grammar: Grammar) -> None:
        """Have a request wait, whose id is not in use here."""
        self._waiting[request.request_id] = request, self._executor.submit(self._compile, grammar)

    def discard(self, request_id: str) -> bool:
        """Forget a request; whether it was there."""
        found = self._waiting.pop(request_id, None)
        if found is not None:
            found[1].cancel()
        return found is not None

    def finished(self) -> Iterator[tuple[Request, InputError | None]]:
        """The requests that wait no longer, each once, with the refusal of its grammar.

        Raises:
            Exception: what else went wrong while a grammar was compiled, which is a fault of the engine.
        """
        for request_id, (request, future) in [item for item in self._waiting.items() if item[1][1].done()]:
            del self._waiting[request_id]
            error = future.exception()
            if error is not None and not isinstance(error, InputError):
                raise error
            yield request, error

    def close(self) -> None:
        """Begin no further one. What is being compiled goes on for as long as it takes, and is not waited for here."""
        self._executor.shutdown(wait=False, cancel_futures=True)
