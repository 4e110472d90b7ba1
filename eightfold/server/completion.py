"""Answers to `/v1/completions`: a whole body, or the frames of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from eightfold.errors import InputError
from eightfold.server.answers import (
    Answer,
    Piece,
    Prompt,
    Serving,
    Usage,
    encode_text,
    gathered,
    make_answers,
    serve,
    served_name,
)
from eightfold.server.logprobs import completion_logprobs, joined, prompt_logprobs
from eightfold.server.protocol import CompletionBody
from eightfold.server.stream import DONE, Frames
from eightfold.server.structure import grammar_of


class CompletionReply:
    """One body, checked and ready to be answered once, whole or as a stream.

    Args:
        serving: what answers.
        body: what was asked.
        response_id: the id of the response, not used before.
        prompts: the body's prompts.

    Raises:
        InputError: a value that the model cannot take. `what` is the field.
    """

    def __init__(self, serving: Serving, body: CompletionBody, response_id: str, prompts: list[Prompt]) -> None:
        self._serving = serving
        self._body = body
        self._id = response_id
        self._created = int(time.time())
        self._model = served_name(serving, body.model)
        self._answers = make_answers(serving, response_id, prompts, body.params(grammar_of(body)), hidden=body.max_tokens == 0)
        self._echoes = [self._echo(answer.prompt) for answer in self._answers]

    @classmethod
    async def prepare(cls, serving: Serving, body: CompletionBody, response_id: str) -> CompletionReply:
        """Tokenize the prompts and check everything.

        Raises:
            InputError: a value that cannot be used. `what` is the field; an unknown model is an `UnknownModelError`.
        """
        served_name(serving, body.model)
        return cls(serving, body, response_id, await _prompts(serving, body))

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        pieces = await gathered(self._serving.engine, self._answers)
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(answer, of_it) for answer, of_it in zip(self._answers, pieces, strict=True)],
            "usage": Usage.of(self._answers).as_json(),
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as the frames of a stream, the last of which ends it."""
        body = self._body
        frames = Frames("text_completion", self._id, self._created, self._model, with_usage=body.include_usage)
        waits = [body.echo] * len(self._answers)  # for the frame that begins with the prompt
        async with aclosing(serve(self._serving.engine, self._answers)) as pieces:
            async for piece in pieces:
                index = piece.answer.index
                if not (waits[index] or piece.logprobs or piece.finish_reason or body.continuous_usage):
                    if piece.text:
                        yield frames.text(index, piece.text)
                    continue
                parts = [self._logprobs(piece)] if piece.logprobs else []
                text = piece.text
                if waits[index]:
                    waits[index] = False
                    text = self._echoes[index] + text
                    parts = [*self._prompt_logprobs(piece.answer), *parts]
                yield frames.choice(
                    index,
                    text,
                    logprobs=joined(parts) if parts else None,
                    finish_reason=piece.finish_reason,
                    stop_reason=piece.stop_reason,
                    usage=Usage.of(self._answers).as_json() if body.continuous_usage else None,
                )
        if body.include_usage:
            yield frames.usage(Usage.of(self._answers).as_json())
        yield DONE

    def _choice(self, answer: Answer, pieces: Sequence[Piece]) -> dict[str, Any]:
        parts = [*self._prompt_logprobs(answer), *(self._logprobs(piece) for piece in pieces if piece.logprobs)]
        return {
            "index": answer.index,
            "text": self._echoes[answer.index] + "".join(piece.text for piece in pieces),
            "logprobs": joined(parts) if parts else None,
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
        }

    def _echo(self, prompt: Prompt) -> str:
        """The prompt, where the answer begins with it."""
        if not self._body.echo:
            return ""
        if prompt.text is not None:
            return prompt.text
        return self._serving.tokenizer.decode(prompt.token_ids, skip_special_tokens=self._body.skip_special_tokens)

    def _prompt_logprobs(self, answer: Answer) -> list[dict[str, list[Any]]]:
        """Those of the prompt, where they are told; none, or one part."""
        if not self._body.echo or self._body.logprobs is None:
            return []
        return [prompt_logprobs(self._serving.tokenizer, answer.prompt.token_ids, answer.prompt.logprobs)]

    def _logprobs(self, piece: Piece) -> dict[str, list[Any]]:
        return completion_logprobs(
            self._serving.tokenizer, piece.logprobs, piece.offsets, start=len(self._echoes[piece.answer.index])
        )


async def _prompts(serving: Serving, body: CompletionBody) -> list[Prompt]:
    """The prompts of a body, in any of their four shapes."""
    given = body.prompt
    if isinstance(given, str):
        return [await _of_text(serving, given, "prompt")]
    if not given:
        raise InputError("prompt", got="an empty list", expected="at least one prompt")
    items: list[Any] = [given] if isinstance(given[0], int) else list(given)
    names = ["prompt"] if isinstance(given[0], int) else [f"prompt[{index}]" for index in range(len(given))]
    return [
        await _of_text(serving, item, name) if isinstance(item, str) else Prompt(item, None, name)
        for item, name in zip(items, names, strict=True)
    ]


async def _of_text(serving: Serving, text: str, name: str) -> Prompt:
    return Prompt(await encode_text(serving.tokenizer, text, serving.facts, name), text, name)
