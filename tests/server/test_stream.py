"""Frames: bytes that parse to OpenAI's objects, whatever the text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eightfold.server.stream import DONE, Frames, Kind, frame

HEAD = {"id": "x-1", "created": 7, "model": 'a "model"'}


def frames(kind: Kind = "text_completion", *, with_usage: bool = False) -> Frames:
    return Frames(kind, "x-1", 7, 'a "model"', with_usage=with_usage)


def parsed(written: bytes) -> Any:
    assert written.startswith(b"data: ")
    assert written.endswith(b"\n\n")
    assert b"\n" not in written[:-2]
    return json.loads(written[6:])


def choice(content: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"index": 0} | content | {"logprobs": None, "finish_reason": None} | rest


@given(text=st.text(), index=st.integers(0, 5), with_usage=st.booleans())
def test_any_text_passes_through(text: str, index: int, with_usage: bool) -> None:
    usage = {"usage": None} if with_usage else {}
    told = parsed(frames(with_usage=with_usage).text(index, text))
    assert told == HEAD | {"object": "text_completion", "choices": [choice({"text": text}, index=index)]} | usage
    told = parsed(frames("chat.completion.chunk", with_usage=with_usage).text(index, text))
    delta = choice({"delta": {"content": text}}, index=index)
    assert told == HEAD | {"object": "chat.completion.chunk", "choices": [delta]} | usage


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_text_alone_is_a_choice_like_any_other(with_usage: bool) -> None:
    plain = frames(with_usage=with_usage)
    assert parsed(plain.text(2, "a")) == parsed(plain.choice(2, "a"))
    chat = frames("chat.completion.chunk", with_usage=with_usage)
    assert parsed(chat.text(2, "a")) == parsed(chat.choice(2, {"content": "a"}))


def test_the_end_of_a_choice_has_its_reasons() -> None:
    told = parsed(frames().choice(0, "a", finish_reason="stop", stop_reason="x", logprobs={"tokens": []}))
    ended = choice({"text": "a"}, finish_reason="stop", stop_reason="x", logprobs={"tokens": []})
    assert told["choices"] == [ended]
    assert parsed(frames().choice(0, "a", finish_reason="length"))["choices"][0]["stop_reason"] is None


def test_usage_stands_beside_choices_or_alone() -> None:
    usage = {"total_tokens": 3}
    assert parsed(frames(with_usage=True).choice(0, "a", usage=usage))["usage"] == usage
    assert parsed(frames(with_usage=True).usage(usage)) == HEAD | {"object": "text_completion", "choices": [], "usage": usage}


def test_other_frames_are_json_and_the_last_is_not() -> None:
    assert parsed(frame({"error": "a\nb"})) == {"error": "a\nb"}
    assert DONE == b"data: [DONE]\n\n"
