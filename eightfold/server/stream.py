"""Server-sent events as bytes.

A stream's frames differ in little, so that little is all that is encoded: the rest of a frame is made once for each stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

DONE = b"data: [DONE]\n\n"
"""The end of a stream that told everything."""

Kind = Literal["text_completion", "chat.completion.chunk"]
_encode = msgspec.json.Encoder().encode


def frame(value: object) -> bytes:
    """One event with `value` as JSON, which never holds a line break of its own."""
    return b"data: " + _encode(value) + b"\n\n"


class Frames:
    """The frames of one answered body, of one shape of OpenAI's.

    Args:
        kind: the shape.
        response_id: the answer's id.
        created: when it began, in seconds since 1970.
        model: the model's name.
        with_usage: whether frames have a `usage`: null but in those that tell it.
    """

    def __init__(self, kind: Kind, response_id: str, created: int, model: str, *, with_usage: bool) -> None:
        head = _encode({"id": response_id, "object": kind, "created": created, "model": model})
        # `{"id":...,"model":"..."` and then the choices, of which there is one in a frame.
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._of_text = b',"text":' if kind == "text_completion" else b',"delta":'
        self._tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        # The frame around nothing but a text, by far the most frequent one.
        self._before = [self._opening(0)]
        is_chat = kind == "chat.completion.chunk"
        self._lead = b'{"content":' if is_chat else b""
        self._after = (b"}" if is_chat else b"") + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def text(self, index: int, text: str) -> bytes:
        """A frame with text alone: of a completion, or a chat's content."""
        while index >= len(self._before):
            self._before.append(self._opening(len(self._before)))
        return self._before[index] + self._lead + _encode(text) + self._after

    def choice(
        self,
        index: int,
        content: str | Mapping[str, Any],
        *,
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> bytes:
        """A frame with whatever a choice can hold.

        Args:
            index: which choice.
            content: the text of a completion, or the delta of a chat.
            logprobs: in the shape of the endpoint.
            finish_reason: why the choice ended; None while it goes on.
            stop_reason: what ended it, where something in the answer did; told with a `finish_reason` alone.
            usage: so far, where every frame tells it.
        """
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": finish_reason}
        if finish_reason is not None:
            rest["stop_reason"] = stop_reason
        tail = self._tail if usage is None else b',"usage":' + _encode(usage) + b"}\n\n"
        return self._opening(index) + _encode(content) + b"," + _encode(rest)[1:] + b"]" + tail

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The frame that tells what the whole body has cost, without a choice."""
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def _opening(self, index: int) -> bytes:
        return self._head + b'{"index":%d' % index + self._of_text
