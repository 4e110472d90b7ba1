"""Answers to `/v1/chat/completions`: a whole body, or the frames of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from eightfold.server.answers import Piece, Prompt, Serving, Usage, gathered, make_answers, serve, served_name
from eightfold.server.logprobs import chat_logprobs
from eightfold.server.messages import check_tools, encode_chat
from eightfold.server.protocol import ChatBody
from eightfold.server.reading import offered_tools, reading_of
from eightfold.server.reasoning import AnswerParser
from eightfold.server.stream import DONE, Frames
from eightfold.server.tools.deltas import CallArguments, CallStart, ContentText, Delta, Parsed, ReasoningText, gather


class ChatReply:
    """One body, checked and ready to be answered once, whole or as a stream.

    Args:
        serving: what answers.
        body: what was asked.
        response_id: the id of the response, not used before.
        token_ids: the conversation.

    Raises:
        InputError: a value that the model cannot take. `what` is the field.
    """

    def __init__(self, serving: Serving, body: ChatBody, response_id: str, token_ids: list[int]) -> None:
        self._serving = serving
        self._body = body
        self._id = response_id
        self._created = int(time.time())
        self._model = served_name(serving, body.model)
        reading = reading_of(serving, body, token_ids)
        params = body.params(serving.facts.context_length - len(token_ids), reading.grammar)
        self._make_parser = reading.make_parser
        self._answers = make_answers(serving, response_id, [Prompt(token_ids, None, "messages")], params, shown=reading.shown)

    @classmethod
    async def prepare(cls, serving: Serving, body: ChatBody, response_id: str) -> ChatReply:
        """Render and tokenize the conversation and check everything.

        Raises:
            InputError: a value that cannot be used. `what` is the field; an unknown model is an `UnknownModelError`.
        """
        served_name(serving, body.model)
        check_tools(body.tools)
        with_tools = bool(offered_tools(body))
        return cls(serving, body, response_id, await encode_chat(serving.tokenizer, body, with_tools=with_tools))

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        pieces = await gathered(self._serving.engine, self._answers)
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(index, of_it) for index, of_it in enumerate(pieces)],
            "usage": Usage.of(self._answers).as_json(),
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as the frames of a stream, the last of which ends it."""
        body = self._body
        frames = Frames("chat.completion.chunk", self._id, self._created, self._model, with_usage=body.include_usage)
        messages = [Message(self._make_parser, parallel=self._body.parallel_tool_calls) for _ in self._answers]
        begun = [False] * len(messages)
        async with aclosing(serve(self._serving.engine, self._answers)) as pieces:
            async for piece in pieces:
                index, written = piece.answer.index, b""
                if not begun[index]:
                    begun[index] = True
                    written = frames.choice(index, {"role": "assistant", "content": ""})
                written += self._frames_of(frames, messages[index], piece)
                if written:
                    yield written
        if body.include_usage:
            yield frames.usage(Usage.of(self._answers).as_json())
        yield DONE

    def _frames_of(self, frames: Frames, message: Message, piece: Piece) -> bytes:
        """The frames of one piece; its log probabilities go with the first of them."""
        body, index = self._body, piece.answer.index
        deltas = message.take(piece)
        usage = Usage.of(self._answers).as_json() if body.continuous_usage else None
        if usage is None and not piece.logprobs:
            written = b"".join(
                frames.text(index, delta.text) if isinstance(delta, ContentText) else frames.choice(index, as_json(delta))
                for delta in deltas
            )
        else:
            told = [as_json(delta) for delta in deltas] or ([{}] if piece.logprobs else [])
            logprobs = {"content": self._logprobs(piece), "refusal": None} if piece.logprobs else None
            written = b"".join(
                frames.choice(index, delta, logprobs=None if number else logprobs, usage=usage)
                for number, delta in enumerate(told)
            )
        if piece.finish_reason is None:
            return written
        return written + frames.choice(
            index, {}, finish_reason=message.finish_reason(piece), stop_reason=piece.stop_reason, usage=usage
        )

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        message = Message(self._make_parser, parallel=self._body.parallel_tool_calls)
        parsed = gather(delta for piece in pieces for delta in message.take(piece))
        logprobs = [item for piece in pieces for item in self._logprobs(piece)]
        return {
            "index": index,
            "message": message_json(parsed),
            "logprobs": {"content": logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": message.finish_reason(pieces[-1]),
            "stop_reason": pieces[-1].stop_reason,
        }

    def _logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        return chat_logprobs(self._serving.tokenizer, piece.logprobs, self._body.top_logprobs or 0)


class Message:
    """A message of the assistant as it comes: plain content, or what a reader makes of the text.

    Args:
        make_parser: reads reasoning and tool calls; None where the text is the content.
        parallel: whether further calls after the first are told.
    """

    def __init__(self, make_parser: Callable[[], AnswerParser] | None, *, parallel: bool = True) -> None:
        self._parser = make_parser() if make_parser is not None else None
        self._parallel = parallel
        self._has_calls = False

    def take(self, piece: Piece) -> list[Delta]:
        """What a piece of the answer tells."""
        if self._parser is None:
            return [ContentText(piece.text)] if piece.text else []
        deltas = self._parser.push(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            deltas = [*deltas, *self._parser.finish()]
        if not self._parallel:
            deltas = [delta for delta in deltas if not (isinstance(delta, CallStart | CallArguments) and delta.index > 0)]
        self._has_calls = self._has_calls or any(isinstance(delta, CallStart) for delta in deltas)
        return deltas

    def finish_reason(self, piece: Piece) -> str | None:
        """Why the answer ended with `piece`, where it did."""
        return "tool_calls" if self._has_calls and piece.finish_reason == "stop" else piece.finish_reason


def as_json(delta: Delta) -> dict[str, Any]:
    """A delta in OpenAI's words."""
    match delta:
        case ContentText(text):
            return {"content": text}
        case ReasoningText(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message_json(parsed: Parsed) -> dict[str, Any]:
    """A whole message in OpenAI's words."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.calls
        ]
    return message
