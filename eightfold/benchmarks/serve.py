"""A load generator for any server of OpenAI's API: `eightfold bench serve`.

It first asks the server how it counts tokens (two short prompts and two longer ones), so that prompts have about the lengths of
the workload without a tokenizer; what is reported is the server's own count, from the last chunk of each stream. Requests come
as a Poisson process or as a closed loop. A failure is counted by its kind.

The generator reports on itself: its share of a core, and how late it sent a request that had a time. Where the share nears one,
the figures are the generator's and not the server's.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from eightfold.benchmarks.client import Address, DisconnectedError, EventParser, HttpClient
from eightfold.benchmarks.measures import Answer, summarize
from eightfold.benchmarks.traffic import CONVERSATIONS, Fixed, Mix, Passages, Prompt, TokenRate, make_prompts
from eightfold.errors import InputError

Backend = Literal["openai-chat", "openai-completions"]
ROUTES: Mapping[Backend, str] = {"openai-chat": "/v1/chat/completions", "openai-completions": "/v1/completions"}
# Characters of the prompts that show how the server counts.
_PROBES = (60, 600)
# Parts of a chat delta that are generated text.
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")
BUSY_SHARE = 0.8
"""Of a core, above which the generator may be what is measured."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What to ask of which server.

    Attributes:
        base_url: address of the API, with or without `/v1`.
        model: its name there; empty takes the first that the server lists.
        api_key: for `Authorization: Bearer`.
        backend: which route.
        num_prompts: requests that are measured.
        request_rate: requests a second of a Poisson process; infinity sends as soon as `max_concurrency` allows.
        max_concurrency: requests at once; None is no limit.
        mix: lengths.
        seed: of lengths, passages and arrivals.
        num_warmups: requests before, one at a time, that are not measured.
        ignore_eos: whether to ask for all tokens of the workload's length.
        temperature: of sampling.
        extra_body: further fields of each request.
        timeout: seconds for one request.
        goodput: limits in milliseconds by metric.
    """

    base_url: str
    model: str = ""
    api_key: str = ""
    backend: Backend = "openai-chat"
    num_prompts: int = 200
    request_rate: float = math.inf
    max_concurrency: int | None = None
    mix: Mix = CONVERSATIONS
    seed: int = 0
    num_warmups: int = 1
    ignore_eos: bool = True
    temperature: float = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0
    goodput: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend not in ROUTES:
            raise InputError("--backend", got=self.backend, expected=" or ".join(get_args(Backend)))
        for name, least in (("num_prompts", 1), ("max_concurrency", 1), ("num_warmups", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(_flag(name), got=value, expected=f"at least {least}")
        for name in ("request_rate", "timeout"):
            if not getattr(self, name) > 0:
                raise InputError(_flag(name), got=getattr(self, name), expected="more than 0")


@dataclass(slots=True)
class Run:
    """A finished run, or as much of it as there was.

    Attributes:
        answers: requests that ended.
        unfinished: requests that were under way when it was interrupted.
        interrupted: whether it was.
        start: on the clock of the answers.
        duration: seconds.
        client_share: of a core that the generator used.
        model: the name that was asked for.
    """

    answers: list[Answer] = field(default_factory=list)
    unfinished: int = 0
    interrupted: bool = False
    start: float = 0.0
    duration: float = 0.0
    client_share: float = 0.0
    model: str = ""


def lengths(input_len: int | None, output_len: int | None) -> Mix:
    """The mix of lengths: conversations, except where a length is fixed."""
    for name, value in (("input_len", input_len), ("output_len", output_len)):
        if value is not None and value < 1:
            raise InputError(_flag(name), got=value, expected="at least 1")
    return Mix(
        CONVERSATIONS.input if input_len is None else Fixed(input_len),
        CONVERSATIONS.output if output_len is None else Fixed(output_len),
    )


def run(workload: Workload, text: str, *, progress: Callable[[int], None] | None = None) -> Run:
    """`measure` in an event loop of its own; Ctrl-C ends it early, a second one at once."""
    return asyncio.run(measure(workload, text, progress=progress))


async def measure(workload: Workload, text: str, *, progress: Callable[[int], None] | None = None) -> Run:
    """Put the load on the server. Cancelling it once ends it early, with what was measured so far.

    Args:
        workload: what to ask.
        text: from which prompts are taken.
        progress: called with the number of requests that ended.

    Raises:
        InputError: the server cannot be reached, refuses the first request, or does not count tokens.
    """
    client = HttpClient(Address.parse(workload.base_url), workload.api_key)
    random = np.random.default_rng(workload.seed)
    try:
        api = Api(client, workload, workload.model or await first_model(client, workload))
        passages = Passages(text, random)
        rate = await api.token_rate(passages)
        count = workload.num_warmups + workload.num_prompts
        prompts = make_prompts(passages, workload.mix, rate, count=count, rate=workload.request_rate, random=random)
        for prompt in prompts[: workload.num_warmups]:
            warm = await api.answer(prompt, 0.0)
            if warm.error:
                what = f"{warm.error}: {warm.detail}"
                raise InputError("the first request", got=what, expected="a stream that ends with its usage")
        return await _load(api, prompts[workload.num_warmups :], progress)
    finally:
        client.close()


async def first_model(client: HttpClient, workload: Workload) -> str:
    """The first model that the server lists."""
    reply = await _ask(client, workload, "GET", "/v1/models")
    try:
        return str(reply["data"][0]["id"])
    except (LookupError, TypeError):
        raise InputError("/v1/models", got=json.dumps(reply), expected="a list of models", remedy="Give --model.") from None


class Api:
    """One route of OpenAI's API, asked for one model.

    Args:
        client: connections to the server.
        workload: which route, and what every request says.
        model: its name there.
    """

    def __init__(self, client: HttpClient, workload: Workload, model: str) -> None:
        self.model = model
        self.workload = workload
        self._client = client
        self._route = ROUTES[workload.backend]

    def body(self, text: str, max_tokens: int, *, stream: bool) -> bytes:
        """The request's JSON."""
        is_chat = self.workload.backend == "openai-chat"
        body: dict[str, Any] = {
            "model": self.model,
            **({"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}),
            "max_tokens": max_tokens,
            "temperature": self.workload.temperature,
        }
        if self.workload.ignore_eos:
            body["ignore_eos"] = True
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(body | dict(self.workload.extra_body)).encode()

    async def token_rate(self, passages: Passages) -> TokenRate:
        """How the server counts the tokens of a prompt."""
        tokens = []
        for characters in _PROBES:
            total = 0
            for _ in range(2):
                body = self.body(passages.take(characters), 1, stream=False)
                reply = await _ask(self._client, self.workload, "POST", self._route, body)
                try:
                    total += int(reply["usage"]["prompt_tokens"])
                except (LookupError, TypeError, ValueError):
                    what = json.dumps(reply.get("usage"))
                    raise InputError("usage", got=what, expected="the tokens of the prompt in each response") from None
            tokens.append(total / 2)
        return TokenRate.fit((_PROBES[0], round(tokens[0])), (_PROBES[1], round(tokens[1])))

    async def answer(self, prompt: Prompt, scheduled: float) -> Answer:
        """Send one request and read its stream to the end; a failure is part of the result."""
        answer = Answer(scheduled)
        reader = AnswerReader(answer)
        body = self.body(prompt.text, prompt.output_len, stream=True)
        answer.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self.workload.timeout):
                response = await self._client.request("POST", self._route, body, reader=reader)
        except TimeoutError:
            answer.error, answer.detail = "timeout", f"no end after {self.workload.timeout:g} s"
        except DisconnectedError as error:
            answer.error, answer.detail = "connection closed", str(error)
        except OSError as error:
            answer.error, answer.detail = "no connection", str(error)
        else:
            if response.status != 200:
                answer.error, answer.detail = f"http {response.status}", _message(response.body)
            else:
                reader.end()
        answer.ended = time.perf_counter()
        return answer


class AnswerReader:
    """Takes one stream of a server, and notes when text comes and what the usage chunk says.

    Args:
        answer: where it is noted.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._events = EventParser()
        self._is_done = False
        self._has_usage = False

    def __call__(self, piece: bytes, now: float) -> None:
        """Take bytes that came at this time."""
        for data in self._events.push(piece):
            if data == b"[DONE]":
                self._is_done = True
                continue
            try:
                self._take(json.loads(data), now)
            except (ValueError, LookupError, TypeError, AttributeError):
                self._fail("broken frame", data.decode("utf-8", "replace"))

    def end(self) -> None:
        """Note what the stream lacks."""
        if not self._is_done:
            self._fail("no end", "the stream ended without [DONE]")
        elif not self._has_usage:
            self._fail("no usage", "the stream has no chunk with usage")
        elif not self._answer.frame_times:
            self._fail("no text", f"finish_reason {self._answer.finish_reason or 'missing'}, and no text")

    def _take(self, frame: Mapping[str, Any], now: float) -> None:
        answer = self._answer
        if choices := frame.get("choices"):
            choice = choices[0]
            delta = choice.get("delta")
            # A completion has its text in the choice itself.
            if choice.get("text") if delta is None else any(delta.get(key) for key in _TEXT_KEYS):
                answer.frame_times.append(now)
            if choice.get("finish_reason"):
                answer.finish_reason = str(choice["finish_reason"])
        if usage := frame.get("usage"):
            self._has_usage = True
            answer.prompt_tokens = int(usage["prompt_tokens"])
            answer.completion_tokens = int(usage["completion_tokens"])
            answer.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if error := frame.get("error"):
            self._fail("error event", str(error.get("message") if isinstance(error, Mapping) else error))

    def _fail(self, kind: str, detail: str) -> None:
        if not self._answer.error:
            self._answer.error, self._answer.detail = kind, detail


def result(workload: Workload, run: Run) -> dict[str, Any]:
    """What the JSON line holds, beside where it ran."""
    return {
        "backend": workload.backend,
        "base_url": workload.base_url,
        "model_id": run.model,
        "num_prompts": workload.num_prompts,
        "request_rate": "inf" if math.isinf(workload.request_rate) else workload.request_rate,
        "max_concurrency": workload.max_concurrency,
        "lengths": workload.mix.describe(),
        "seed": workload.seed,
        "interrupted": run.interrupted,
        "unfinished": run.unfinished,
        "client_share": run.client_share,
        **summarize(run.answers, start=run.start, duration=run.duration, limits=workload.goodput),
    }


async def _load(api: Api, prompts: Sequence[Prompt], progress: Callable[[int], None] | None) -> Run:
    workload = api.workload
    run = Run(model=api.model)
    limit = asyncio.Semaphore(workload.max_concurrency) if workload.max_concurrency is not None else None
    under_way = 0

    async def send(prompt: Prompt) -> None:
        nonlocal under_way
        async with AsyncExitStack() as stack:
            if limit is not None:
                await stack.enter_async_context(limit)
            # In a closed loop a request is due when its place becomes free.
            scheduled = time.perf_counter() if math.isinf(workload.request_rate) else origin + prompt.arrival
            under_way += 1
            run.answers.append(await api.answer(prompt, scheduled))
            under_way -= 1
        if progress is not None:
            progress(len(run.answers))

    tasks: list[asyncio.Task[None]] = []
    cpu_start = time.thread_time()
    run.start = time.perf_counter()
    origin = run.start - prompts[0].arrival
    try:
        for prompt in prompts:
            if (delay := origin + prompt.arrival - time.perf_counter()) > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(send(prompt)))
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        run.interrupted, run.unfinished = True, under_way
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    run.duration = time.perf_counter() - run.start
    run.client_share = (time.thread_time() - cpu_start) / run.duration
    return run


async def _ask(client: HttpClient, workload: Workload, method: str, route: str, body: bytes = b"") -> dict[str, Any]:
    """The JSON object of a response, for what must work before anything is measured."""
    url = workload.base_url.rstrip("/").removesuffix("/v1") + route
    try:
        async with asyncio.timeout(workload.timeout):
            response = await client.request(method, route, body)
        reply = json.loads(response.body) if response.status == 200 else None
    except TimeoutError:
        raise InputError(url, got=f"nothing for {workload.timeout:g} s", expected="a response") from None
    except OSError as error:
        raise InputError(url, got=str(error), expected="a server that listens") from None
    except ValueError:
        raise InputError(url, got=response.body[:200].decode("utf-8", "replace"), expected="JSON") from None
    if response.status != 200:
        remedy = "Give --no-ignore-eos." if "ignore_eos" in _message(response.body) else ""
        raise InputError(url, got=f"{response.status}: {_message(response.body)}", expected="200", remedy=remedy)
    if not isinstance(reply, dict):
        raise InputError(url, got=response.body[:200].decode("utf-8", "replace"), expected="a JSON object")
    return reply


def _message(body: bytes) -> str:
    """What an error body says: OpenAI's message, or the text."""
    text = body.decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:300]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
