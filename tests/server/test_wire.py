"""Messages arrive as they were sent."""

from __future__ import annotations

import msgspec
import pytest

from eightfold.errors import InputError
from eightfold.server.wire import (
    Abort,
    Close,
    Codec,
    Command,
    Control,
    Failure,
    FromEngine,
    Load,
    News,
    Progress,
    Ready,
    Refusal,
    Reply,
    ServedModel,
    Snapshot,
    Submit,
    TensorRow,
    model_from,
)
from eightfold.types import Grammar, Request, SamplingParams, TokenEvent, TokenLogprobs

PARAMS = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    logit_bias={3: -1.5},
    stop=("END", "\n"),
    stop_token_ids=(4, 5),
    seed=2**64 - 1,
    logprobs=2,
    grammar=Grammar("regex", "a+", begin_after="</think>"),
)
REQUEST = Request("cmpl-1-0", (1, 2, 3), PARAMS, 2**64 - 1)
LOGPROBS = TokenLogprobs(9, -0.25, 1, ((9, -0.25), (8, -float("inf"))))
MODEL = ServedModel(
    "folder", 64, 300, (2,), {"temperature": 0.6}, 8, 4, 16, quantization=(TensorRow("a.weight", "mxfp8", True, "", 64, 33),)
)


@pytest.mark.parametrize(
    "message",
    [
        Load({"model": "a", "seed": 2**63}, 0.0, 5.0),
        Submit([REQUEST]),
        Abort(["a"]),
        Control(1, "pause", {"abort": True}),
        Close(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_commands_arrive(message: Command) -> None:
    codec = Codec()
    assert codec.commands.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Progress("load", 1, 2**40),
        Failure("broken"),
        Failure("a: got b", Refusal("", "a", "b", "c", "")),
        Ready(MODEL),
        Refusal("cmpl-1-0", "prompt", "9 tokens", "at most 8", ""),
        News(
            [TokenEvent("a", 5, logprobs=LOGPROBS, prompt_logprobs=(LOGPROBS,)), TokenEvent("b", None, finish_reason="abort")],
            ["a"],
            12.5,
            Snapshot(running=1),
        ),
        Reply(1, {"num_aborted": 2}, None),
    ],
    ids=lambda message: type(message).__name__,
)
def test_news_arrives(message: FromEngine) -> None:
    codec = Codec()
    assert codec.news.decode(codec.encode(message)) == message


def test_what_arrives_is_checked_like_anything_else() -> None:
    codec = Codec()
    frame = codec.encode(Submit([REQUEST])).replace(b"max_tokens\x07", b"max_tokens\x00")
    with pytest.raises(msgspec.ValidationError, match="max_tokens: got 0"):
        codec.commands.decode(frame)


def test_a_refusal_is_the_error_again() -> None:
    error = InputError("prompt", got=9, expected="at most 8", remedy="Shorten it.")
    assert str(Refusal.of(error, "a").error()) == str(error)


def test_a_model_comes_out_of_a_reply() -> None:
    codec = Codec()
    reply = codec.news.decode(codec.encode(Reply(1, {"model": MODEL}, None)))
    assert isinstance(reply, Reply)
    assert model_from(reply.result["model"]) == MODEL
