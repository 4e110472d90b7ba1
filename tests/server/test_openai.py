"""OpenAI's own client, malformed requests and clients that leave, against the routes on a socket."""

from __future__ import annotations

import asyncio
import json
import random
import string
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from eightfold.llm import LLM
from eightfold.server.protocol import ChatBody, CompletionBody
from tests.pretended import check_idle, counting, make_llm, saying
from tests.server.inline import listening, wait_until
from tests.server.live import LiveServer, eventually, live_server
from tests.tiny_tokenizer import save_text_checkpoint

TEXT = "hello wörld €!"
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    llm = make_llm(saying(TEXT))
    with listening(llm) as base:
        yield base
    check_idle(llm)


def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)


def test_the_client_gets_whole_answers(address: str) -> None:
    with client(address) as api:
        chat = api.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, n=2, user="me")
        assert [choice.message.content for choice in chat.choices] == [TEXT, TEXT]
        assert chat.choices[0].logprobs is not None
        assert chat.choices[0].logprobs.content is not None
        assert chat.choices[0].logprobs.content[0].token == "hello"
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        completion = api.completions.create(
            model="tiny", prompt=["hello", "a"], max_tokens=30, echo=True, logprobs=1, extra_body={"top_k": 5}
        )
        assert [choice.text for choice in completion.choices] == ["hello" + TEXT, "a" + TEXT]
        assert completion.choices[0].logprobs is not None
        assert completion.choices[0].logprobs.token_logprobs is not None
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 24


def test_the_client_gets_streams(address: str) -> None:
    with client(address) as api:
        parts = list(
            api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True})
        )
        assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == TEXT
        assert parts[-1].usage is not None
        assert parts[-1].usage.completion_tokens == 12
        texts = [part.choices[0].text for part in api.completions.create(model="tiny", prompt="a", max_tokens=30, stream=True)]
        assert "".join(texts) == TEXT
        with api.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
            assert stream.get_final_completion().choices[0].message.content == TEXT


def test_the_asynchronous_client_gets_the_same(address: str) -> None:
    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as api:
            whole = await api.chat.completions.create(model="tiny", messages=MESSAGES)
            assert whole.choices[0].message.content == TEXT
            stream = await api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            assert "".join([part.choices[0].delta.content or "" async for part in stream]) == TEXT
            done = await api.completions.create(model="tiny", prompt="a", max_tokens=30)
            assert done.choices[0].text == TEXT
            pieces = await api.completions.create(model="tiny", prompt="a", max_tokens=30, stream=True)
            assert "".join([part.choices[0].text async for part in pieces]) == TEXT

    asyncio.run(talk())


def test_the_client_understands_refusals(address: str) -> None:
    with client(address) as api:
        with pytest.raises(openai.BadRequestError, match="temperature: got -1") as caught:
            api.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError, match="expected tiny"):
            api.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="prompt: got 101 tokens; expected at most 63"):
            api.completions.create(model="tiny", prompt="a" * 100, stream=True)


# What may be put in a field, so that most of it is wrong.
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    2**70,
    0.5,
    -1e300,
    "",
    "x",
    [],
    [1],
    ["a", 1],
    [[]],
    {},
    {"a": 1},
    [[[1]]],
    "\ud800",
]


def malformed(number: int) -> tuple[str, bytes]:
    """A request that has at least one fault for certain."""
    rng = random.Random(number)
    is_chat = rng.random() < 0.5
    path, kind = ("/v1/chat/completions", ChatBody) if is_chat else ("/v1/completions", CompletionBody)
    body: dict[str, Any] = {"messages": MESSAGES} if is_chat else {"prompt": "a"}
    body |= {"stream": rng.random() < 0.5}
    for name in rng.sample(sorted(kind.model_fields), 2):
        body[name] = rng.choice(VALUES)
    match rng.randrange(5):
        case 0:
            body["".join(rng.choices(string.ascii_letters, k=9))] = rng.choice(VALUES)
        case 1:
            body["n"] = rng.choice([0, 129, "1", [1], 1.5])
        case 2:
            body["messages" if is_chat else "prompt"] = rng.choice([7, {}, [], [[]], [None], "a" * 500 if not is_chat else "a"])
        case 3:
            body["logit_bias"] = rng.choice([{"a": 1}, {"1": 1000}, [1], 5, {"99999": 1}])
        case _:
            raw = json.dumps(body).encode()
            return path, raw[: rng.randrange(len(raw))] + rng.choice([b"", b"\xff", b"}{", b"\x00"])
    return path, json.dumps(body).encode()


def test_every_malformed_request_gets_one_refusal(address: str) -> None:
    with httpx.Client(base_url=address, timeout=60) as http:
        for number in range(500):
            path, raw = malformed(number)
            response = http.post(path, content=raw)
            assert response.status_code in (400, 404), (number, raw, response.text)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"].startswith(f"{error['param']}: got "), (number, raw, error)


def test_a_client_that_leaves_ends_its_request() -> None:
    never = threading.Event()

    def slowly(sequence: Any) -> int:
        if sequence.num_output_tokens > 2:
            never.wait(0.2)  # the whole answer would take many seconds
        return counting()(sequence)

    llm = make_llm(slowly)
    asked = {"messages": MESSAGES, "stream": True, "n": 3}
    with listening(llm) as base, httpx.Client(base_url=base, timeout=60) as http:
        with http.stream("POST", "/v1/chat/completions", json=asked) as response:
            assert response.status_code == 200
            next(response.iter_raw())
        wait_until(lambda: not llm.engine.has_work)
    check_idle(llm)
    assert set(llm.engine.scheduler.counters.finished) == {"abort"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_greedy_answers_do_not_depend_on_the_other_clients(checkpoint: Path) -> None:
    llm = LLM(checkpoint, dtype="float32", max_total_tokens=4096)
    bodies = [
        {"prompt": "hello"[: 1 + number % 5] * (1 + number // 5), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        for number in range(32)
    ]
    with listening(llm) as base, httpx.Client(base_url=base, timeout=120) as http:

        def whole(body: dict[str, Any]) -> str:
            return str(http.post("/v1/completions", json=body).json()["choices"][0]["text"])

        def streamed(body: dict[str, Any]) -> str:
            lines = http.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
            frames = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            return "".join(frame["choices"][0]["text"] for frame in frames)

        alone = [whole(body) for body in bodies]
        with ThreadPoolExecutor(32) as pool:
            assert list(pool.map(whole, bodies)) == alone
            assert list(pool.map(streamed, bodies)) == alone
    assert len(set(alone)) > 5


# A real model, in the processes that users start.

ADDRESS_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "number": {"type": "integer"}},
    "required": ["city", "number"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def live(smollm2_path: Path) -> Iterator[LiveServer]:
    with live_server(smollm2_path, "--served-model-name", "smollm2", "--max-total-tokens", "8192") as server:
        yield server
        eventually(server.is_idle)


def test_a_real_model_answers_whole_and_in_pieces(live: LiveServer) -> None:
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    with client(live.url) as api:
        whole = api.chat.completions.create(model="smollm2", messages=question, temperature=0, max_completion_tokens=16, seed=1)
        text = whole.choices[0].message.content
        assert text is not None
        assert "Paris" in text
        stream = api.chat.completions.create(
            model="smollm2", messages=question, temperature=0, max_completion_tokens=16, stream=True
        )
        assert "".join(part.choices[0].delta.content or "" for part in stream) == text
        again = api.chat.completions.create(model="smollm2", messages=question, temperature=0, max_completion_tokens=16)
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == 32


def test_a_real_model_answers_the_asynchronous_client(live: LiveServer) -> None:
    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60) as api:
            asked: dict[str, Any] = {"model": "smollm2", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
            whole = await api.completions.create(**asked)
            stream = await api.completions.create(**asked, stream=True)
            assert "".join([part.choices[0].text async for part in stream]) == whole.choices[0].text

    asyncio.run(talk())


def test_a_real_model_scores_a_prompt(live: LiveServer) -> None:
    """As lm-eval asks for log-likelihoods."""
    with client(live.url) as api:
        scored = api.completions.create(
            model="smollm2", prompt="The capital of France is Paris", echo=True, logprobs=1, max_tokens=1, temperature=0
        )
        told = scored.choices[0].logprobs
        assert told is not None
        assert told.tokens is not None
        assert told.token_logprobs is not None
        assert told.top_logprobs is not None
        assert told.tokens[:6] == ["The", " capital", " of", " France", " is", " Paris"]
        assert told.token_logprobs[5] == max(told.top_logprobs[5].values())
        alone = api.completions.create(
            model="smollm2", prompt="The capital of France is Paris", echo=True, logprobs=1, max_tokens=0
        )
        assert alone.choices[0].logprobs is not None
        assert alone.choices[0].logprobs.token_logprobs == pytest.approx(told.token_logprobs[:6], abs=1e-4, nan_ok=True)


def test_a_real_model_keeps_to_a_schema(live: LiveServer) -> None:
    with client(live.url) as api:
        answer = api.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "An address in Paris, please."}],
            temperature=0,
            max_tokens=60,
            response_format={"type": "json_schema", "json_schema": {"name": "address", "schema": ADDRESS_SCHEMA}},
        )
        assert answer.choices[0].finish_reason == "stop"
        parsed = json.loads(answer.choices[0].message.content or "")
        assert set(parsed) == {"city", "number"}
        assert isinstance(parsed["number"], int)
