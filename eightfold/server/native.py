"""SGLang's own routes: `/generate`, which its benchmark and trainers call, and `/tokenize` and `/detokenize`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from eightfold.errors import InputError
from eightfold.server.answers import (
    Answer,
    Piece,
    Prompt,
    Serving,
    encode_text,
    gathered,
    make_answers,
    renamed,
    serve,
    served_name,
)
from eightfold.server.context import describe, serving_of, stall_seconds
from eightfold.server.logprobs import LOWEST, token_text
from eightfold.server.messages import check_tools, encode_chat
from eightfold.server.protocol import Body, ChatBody, GenerationBody, check_body, decode_json, parse_body
from eightfold.server.sending import EventStream, documented, json_response, whole_response
from eightfold.server.stream import DONE, frame
from eightfold.server.structure import grammar_of
from eightfold.types import SamplingParams, TokenLogprobs

DEFAULT_NEW_TOKENS = 128

router = APIRouter()


class NativeSampling(Body):
    """SGLang's `sampling_params`, where they have names of their own; the others are OpenAI's."""

    max_new_tokens: int = Field(
        DEFAULT_NEW_TOKENS, description="a whole number from 0 to 2^31 - 1; 0 computes the prompt alone"
    )
    min_new_tokens: int = Field(0, description="a whole number from 0 to 2^31 - 1")
    temperature: float | None = Field(None, description="a finite number, at least 0 (0 is greedy)")
    top_p: float | None = Field(None, description="a number above 0 and at most 1")
    top_k: int | None = Field(None, description="a whole number from 1 to 2^31 - 1, or 0 or -1 for all tokens")
    min_p: float | None = Field(None, description="a number in [0, 1]")
    repetition_penalty: float | None = Field(None, description="a finite number above 0 (1 is none)")
    presence_penalty: float = Field(0.0, description="a number in [-2, 2]")
    frequency_penalty: float = Field(0.0, description="a number in [-2, 2]")
    logit_bias: dict[str, float] = Field({}, description="an object of token ids, as texts, with numbers in [-100, 100]")
    sampling_seed: int | None = Field(None, description="a whole number from -2^63 to 2^64 - 1")
    stop: str | list[str] = Field([], description="a text, or a list of texts")
    stop_token_ids: list[int] = Field([], description="a list of token ids")
    ignore_eos: bool = Field(False, description="true or false")
    skip_special_tokens: bool = Field(True, description="true or false")
    no_stop_trim: bool = Field(False, description="true or false")
    n: int = Field(1, description="a whole number from 1 to 128")
    regex: str | None = Field(None, description="a regular expression")
    json_schema: str | None = Field(None, description="a JSON schema, as a text")

    def as_openai(self) -> dict[str, Any]:
        """The same under OpenAI's names."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        # Where no answer is wanted, one token is generated and not told.
        given["max_new_tokens"] = self.max_new_tokens or 1
        return {_OPENAI_NAMES.get(name, name): value for name, value in given.items()}


_OPENAI_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    "regex": "guided_regex",
    "json_schema": "guided_json",
}


class GenerateBody(Body):
    """The body of `/generate`. One prompt gets an object, several get a list of them."""

    text: str | list[str] | None = Field(None, description="a text, or a list of texts")
    input_ids: list[int] | list[list[int]] | None = Field(None, description="a list of token ids, or a list of such lists")
    sampling_params: dict[str, Any] = Field({}, description="an object of sampling parameters, for all prompts")
    stream: bool = Field(False, description="true or false")
    rid: str | None = Field(None, description="a text, which comes back as the answer's id")
    model: str | None = Field(None, description="the name of the model that is served, or nothing")
    return_logprob: bool = Field(False, description="true or false")
    logprob_start_len: int = Field(-1, description="a position in the prompt to tell log probabilities from; -1 tells none")
    top_logprobs_num: int = Field(0, description="a whole number from 0 to 20")
    return_text_in_logprobs: bool = Field(False, description="true or false")

    def params(self) -> SamplingParams:
        """The engine's parameters.

        Raises:
            InputError: a value out of range; `what` is its path in the body.
        """
        wants_prompt = self.return_logprob and self.logprob_start_len >= 0
        own = {
            "logprobs": self.top_logprobs_num if self.return_logprob else None,
            "prompt_logprobs": self.top_logprobs_num if wants_prompt else None,
        }
        try:
            given = check_body(self.sampling_params, NativeSampling)
        except InputError as error:
            path = "sampling_params" if error.what == "body" else f"sampling_params.{error.what}"
            raise renamed(error, **{error.what: path}) from error
        try:
            body = check_body(given.as_openai(), GenerationBody)
            grammar = grammar_of(body)
            if grammar is not None:
                grammar = replace(grammar, name=_native_path(grammar.name))
            return body.sampling(max_tokens=body.max_tokens, grammar=grammar, **own)
        except InputError as error:
            raise renamed(error, **{error.what: _native_path(error.what)}) from error

    @property
    def max_new_tokens(self) -> int:
        """Tokens that are asked for at most. Of parameters that were checked."""
        given: int | None = self.sampling_params.get("max_new_tokens")
        return DEFAULT_NEW_TOKENS if given is None else given


def _native_path(name: str) -> str:
    """Where a field of OpenAI's, or what is within it, stands in a body of `/generate`."""
    if name in ("logprobs", "prompt_logprobs"):
        return "top_logprobs_num"
    first, dot, rest = name.partition(".")
    ours = {theirs: own for own, theirs in _OPENAI_NAMES.items()}
    return f"sampling_params.{ours.get(first, first)}{dot}{rest}"


class GenerateReply:
    """One body of `/generate`, checked and ready to be answered once.

    Args:
        serving: what answers.
        body: what was asked.
        response_id: for the engine, not used before.
        prompts: the body's prompts.

    Raises:
        InputError: a value that the model cannot take. `what` is the field.
    """

    def __init__(self, serving: Serving, body: GenerateBody, response_id: str, prompts: Sequence[Prompt]) -> None:
        self._serving = serving
        self._body = body
        self._id = response_id
        self._started = time.perf_counter()
        params = body.params()
        self._answers = make_answers(serving, response_id, prompts, params, hidden=body.max_new_tokens == 0)
        self._is_batch = len(self._answers) > 1 or isinstance(_shape(body), list)

    @classmethod
    async def prepare(cls, serving: Serving, body: GenerateBody, response_id: str) -> GenerateReply:
        """Tokenize the prompts and check everything.

        Raises:
            InputError: a value that cannot be used. `what` is the field; an unknown model is an `UnknownModelError`.
        """
        served_name(serving, body.model)
        return cls(serving, body, response_id, await _prompts(serving, body))

    async def whole(self) -> object:
        """One object, or a list of them."""
        pieces = await gathered(self._serving.engine, self._answers)
        told = [self._told(answer, of_it) for answer, of_it in zip(self._answers, pieces, strict=True)]
        return told if self._is_batch else told[0]

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Frames, each with all of an answer's text so far, as SGLang has it."""
        pieces: list[list[Piece]] = [[] for _ in self._answers]
        async with aclosing(serve(self._serving.engine, self._answers)) as news:
            async for piece in news:
                answer = piece.answer
                pieces[answer.index].append(piece)
                if piece.text or piece.logprobs or piece.finish_reason:
                    told = self._told(answer, pieces[answer.index])
                    yield frame({**told, "index": answer.index} if self._is_batch else told)
        yield DONE

    def _told(self, answer: Answer, pieces: Sequence[Piece]) -> dict[str, Any]:
        """An answer as far as it has come."""
        last = pieces[-1]
        meta: dict[str, Any] = {
            "id": f"{self._id}_{answer.index}" if self._is_batch else self._id,
            "finish_reason": _finish_reason(last, answer.num_tokens),
            "prompt_tokens": len(answer.prompt.token_ids),
            "completion_tokens": answer.num_tokens,
            "cached_tokens": answer.prompt.num_cached_tokens,
            "e2e_latency": time.perf_counter() - self._started,
        }
        if self._body.return_logprob:
            meta |= self._logprobs("output", [item for piece in pieces for item in piece.logprobs])
            if self._body.logprob_start_len >= 0:
                meta |= self._of_prompt(answer.prompt)
        return {
            "text": "".join(piece.text for piece in pieces),
            "output_ids": [token_id for piece in pieces for token_id in piece.token_ids],
            "meta_info": meta,
        }

    def _of_prompt(self, prompt: Prompt) -> dict[str, Any]:
        """The prompt's log probabilities from where they were asked for; the first token has none."""
        start = self._body.logprob_start_len
        told = self._logprobs("input", prompt.logprobs[max(0, start - 1) :])
        if start == 0:
            told["input_token_logprobs"].insert(0, self._entry(prompt.token_ids[0], None))
            if "input_top_logprobs" in told:
                told["input_top_logprobs"].insert(0, None)
        return told

    def _logprobs(self, of: str, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        told: dict[str, Any] = {f"{of}_token_logprobs": [self._entry(item.token_id, item.logprob) for item in logprobs]}
        if self._body.top_logprobs_num:
            told[f"{of}_top_logprobs"] = [[self._entry(token, logprob) for token, logprob in item.top] for item in logprobs]
        return told

    def _entry(self, token_id: int, logprob: float | None) -> list[Any]:
        text = token_text(self._serving.tokenizer.token_bytes(token_id)) if self._body.return_text_in_logprobs else None
        return [None if logprob is None else max(logprob, LOWEST), token_id, text]


def _finish_reason(piece: Piece, num_tokens: int) -> dict[str, Any] | None:
    match piece.finish_reason:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": piece.stop_reason}
        case "length":
            return {"type": "length", "length": num_tokens}
    return {"type": "abort"}


def _shape(body: GenerateBody) -> object:
    """The prompt, or the list of prompts, with token ids made a tuple, so that a list is a batch."""
    if (body.text is None) == (body.input_ids is None):
        got = "neither" if body.text is None else "both"
        raise InputError("text", got=f"{got} of text and input_ids", expected="one of the two")
    if body.input_ids is not None:
        is_one = bool(body.input_ids) and isinstance(body.input_ids[0], int)
        return tuple(body.input_ids) if is_one else body.input_ids
    return body.text


async def _prompts(serving: Serving, body: GenerateBody) -> list[Prompt]:
    given, name = _shape(body), "text" if body.input_ids is None else "input_ids"
    if given == []:
        raise InputError(name, got="an empty list", expected="at least one prompt")
    items = given if isinstance(given, list) else [given]
    prompts = []
    for index, item in enumerate(items):
        path = f"{name}[{index}]" if isinstance(given, list) else name
        token_ids = await encode_text(serving.tokenizer, item, serving.facts, path) if isinstance(item, str) else list(item)
        prompts.append(Prompt(token_ids, item if isinstance(item, str) else None, path))
    return prompts


class TokenizeBody(Body):
    """The body of `/tokenize`: a prompt, or several."""

    model: str | None = Field(None, description="the name of the model that is served, or nothing")
    prompt: str | list[str] = Field(description="a text, or a list of texts")
    add_special_tokens: bool = Field(True, description="true or false")


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = Field(None, description="the name of the model that is served, or nothing")
    tokens: list[int] | list[list[int]] = Field(description="a list of token ids, or a list of such lists")
    skip_special_tokens: bool = Field(False, description="true or false")


@router.post("/generate", openapi_extra=documented(GenerateBody))
async def generate(request: Request) -> Response:
    """Go on from prompts, in SGLang's words."""
    serving = serving_of(request)
    body = parse_body(await request.body(), GenerateBody)
    reply = await GenerateReply.prepare(serving, body, body.rid or f"gen-{uuid4().hex}")
    if body.stream:
        return EventStream(reply.stream(), describe=describe, stall_seconds=stall_seconds(request))
    return await whole_response(request, reply.whole())


@router.post("/tokenize", openapi_extra=documented(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, of a list of texts, or of a conversation as `/v1/chat/completions` takes it."""
    serving = serving_of(request)
    value = decode_json(await request.body())
    if isinstance(value, Mapping) and value.get("messages") is not None:
        if value.get("prompt") is not None:
            raise InputError("prompt", got="both of prompt and messages", expected="one of the two")
        chat = check_body(value, ChatBody)
        served_name(serving, chat.model)
        check_tools(chat.tools)
        return _tokenized(serving, await encode_chat(serving.tokenizer, chat, with_tools=chat.tool_choice != "none"))
    body = check_body(value, TokenizeBody)
    served_name(serving, body.model)
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    add = body.add_special_tokens
    each = [await encode_text(serving.tokenizer, text, serving.facts, "prompt", add_special_tokens=add) for text in texts]
    return _tokenized(serving, each[0] if isinstance(body.prompt, str) else each)


@router.post("/detokenize", openapi_extra=documented(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """The text of token ids; under SGLang's name and under vLLM's."""
    serving = serving_of(request)
    body = parse_body(await request.body(), DetokenizeBody)
    served_name(serving, body.model)
    is_one = not body.tokens or isinstance(body.tokens[0], int)
    lists: list[Any] = [body.tokens] if is_one else list(body.tokens)
    for token_id in (token_id for token_ids in lists for token_id in token_ids):
        if not 0 <= token_id < serving.facts.vocab_size:
            raise InputError("tokens", got=token_id, expected=f"token ids from 0 to {serving.facts.vocab_size - 1}")
    texts = [serving.tokenizer.decode(token_ids, skip_special_tokens=body.skip_special_tokens) for token_ids in lists]
    told = texts[0] if is_one else texts
    return json_response({"text": told, "prompt": told})


def _tokenized(serving: Serving, tokens: list[Any]) -> Response:
    count = [len(item) for item in tokens] if tokens and isinstance(tokens[0], list) else len(tokens)
    return json_response({"tokens": tokens, "count": count, "max_model_len": serving.facts.context_length})
