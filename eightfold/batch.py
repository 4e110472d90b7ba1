"""OpenAI's batch format without a server: JSON lines of requests in, JSON lines of answers out, in the same order.

Each line is an object with a `custom_id`, the `method` POST, a `url` and a `body`. Bodies are those of the server, read by the
same code, so that a file gives here what it gives there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import uuid4

import msgspec

from eightfold.errors import InputError
from eightfold.llm import LLM
from eightfold.server.answers import Serving
from eightfold.server.chat import ChatReply
from eightfold.server.completion import CompletionReply
from eightfold.server.errors import answer_to
from eightfold.server.inprocess import serving_in_process
from eightfold.server.protocol import ChatBody, CompletionBody, check_body, decode_json

URLS = ("/v1/chat/completions", "/v1/completions")

_FIELDS = ("custom_id", "method", "url", "body")


def run_batch(llm: LLM, lines: Iterable[str], write: Callable[[str], object], *, names: tuple[str, ...]) -> int:
    """Answer a batch.

    Args:
        llm: answers; nobody else uses it meanwhile.
        lines: the file's lines; empty ones are passed over.
        write: takes one line of the answer, without its line break, as soon as it and all before it are there.
        names: what bodies may call the model.

    Returns:
        How many requests got an error.
    """
    return asyncio.run(_run(serving_in_process(llm.engine, llm.tokenizer, names), lines, write, _at_once(llm)))


def _at_once(llm: LLM) -> int:
    """Requests that are open at once: as many as can run, and as many again so that there is always one waiting."""
    return 2 * llm.config.max_running_requests


async def _run(serving: Serving, lines: Iterable[str], write: Callable[[str], object], at_once: int) -> int:
    open_tasks: deque[asyncio.Task[dict[str, Any]]] = deque()
    seen: set[str] = set()
    num_failed = 0

    async def finish_first() -> None:
        nonlocal num_failed
        record = await open_tasks.popleft()
        num_failed += record["response"]["status_code"] != 200
        write(msgspec.json.encode(record).decode())

    try:
        for line in lines:
            if line.strip():
                open_tasks.append(asyncio.create_task(_answer(serving, line, seen)))
            if len(open_tasks) >= at_once:
                await finish_first()
        while open_tasks:
            await finish_first()
    finally:
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)
    return num_failed


async def _answer(serving: Serving, line: str, seen: set[str]) -> dict[str, Any]:
    """The record of one line."""
    custom_id: object = None
    try:
        value = decode_json(line.encode())
        custom_id = value.get("custom_id") if isinstance(value, Mapping) else None
        status, body = 200, await _reply(serving, _checked(value, seen))
    except InputError as error:
        refusal = answer_to(error)
        status, body = refusal.status, refusal.body
    return {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": uuid4().hex, "body": body},
        "error": None,
    }


def _checked(value: object, seen: set[str]) -> Mapping[str, Any]:
    """A line's object, whose fields are all there and make sense."""
    if not isinstance(value, Mapping):
        raise InputError("line", got=repr(value), expected="a JSON object")
    for name in value:
        if name not in _FIELDS:
            raise InputError(str(name), got="a field that is unknown", expected=f"one of {', '.join(_FIELDS)}")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or custom_id in seen:
        raise InputError("custom_id", got=repr(custom_id), expected="a text that no line before it has")
    seen.add(custom_id)
    for name, choices in (("method", ("POST",)), ("url", URLS)):
        if value.get(name) not in choices:
            raise InputError(name, got=repr(value.get(name)), expected=" or ".join(choices))
    return value


async def _reply(serving: Serving, value: Mapping[str, Any]) -> dict[str, Any]:
    response_id = uuid4().hex
    if value["url"] == URLS[0]:
        chat = check_body(value.get("body"), ChatBody)
        _refuse_stream(chat.stream)
        return await (await ChatReply.prepare(serving, chat, f"chatcmpl-{response_id}")).whole()
    completion = check_body(value.get("body"), CompletionBody)
    _refuse_stream(completion.stream)
    return await (await CompletionReply.prepare(serving, completion, f"cmpl-{response_id}")).whole()


def _refuse_stream(streams: bool) -> None:
    if streams:
        raise InputError("stream", got=True, expected="false: a batch has whole answers")
