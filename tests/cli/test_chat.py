"""Conversations with a pretended model, and one with a tiny checkpoint."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eightfold.cli import chat, main
from eightfold.llm import LLM
from eightfold.types import SamplingParams
from tests.pretended import check_idle, counting, make_llm, saying
from tests.tiny_tokenizer import save_text_checkpoint

SMALL = ("--max-total-tokens", "1024", "--temperature", "0", "--max-tokens", "4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., chat.Conversation]:
    """Has a conversation with a pretended model, whose input is the given text."""

    def run(llm: LLM, text: str, **options: Any) -> chat.Conversation:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        conversation = chat.Conversation(llm, SamplingParams(max_tokens=20, seed=0), **options)
        conversation.run()
        check_idle(llm)
        return conversation

    return run


def test_a_conversation_remembers_and_forgets(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    llm = make_llm(saying("yes"))
    conversation = talk(llm, "one\n\ntwo\n", system="be")
    assert [message["content"] for message in conversation.messages] == ["be", "one", "yes", "two", "yes"]
    assert capsys.readouterr().out == "yes\nyes\n"
    conversation = talk(llm, "one\n/reset\ntwo\n/exit\nthree\n", system="be")
    assert [message["content"] for message in conversation.messages] == ["be", "two", "yes"]


def test_commands_are_explained(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    talk(make_llm(saying("yes")), "/help\n/rest\n/what\n")
    out, err = capsys.readouterr()
    assert all(command in out for command in chat.COMMANDS)
    assert "Did you mean /reset?" in err
    assert "/help lists" in err


def test_a_message_that_is_too_long_is_refused_and_the_talk_goes_on(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talk(make_llm(saying("yes")), f"{'a' * 100}\nhi\n")
    assert "tokens" in capsys.readouterr().err
    assert [message["content"] for message in conversation.messages] == ["hi", "yes"]


def test_a_message_that_is_no_text_is_refused_and_the_talk_goes_on(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talk(make_llm(saying("yes")), "a\udcff\nhi\n")
    assert "surrogate" in capsys.readouterr().err
    assert [message["content"] for message in conversation.messages] == ["hi", "yes"]


def test_an_interrupt_stops_the_answer_and_not_the_program(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    calls = iter(range(1000))
    choose = counting()

    def interrupted(sequence: Any) -> int:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return choose(sequence)

    conversation = talk(make_llm(interrupted), "one\ntwo\n")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "abc [stopped]"
    assert len(out[1]) == 20
    assert conversation.messages[1]["content"] == "abc"


def test_chat_works_through_a_pipe(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/exit\n"))
    assert main(["chat", str(checkpoint), *SMALL]) == 0
    assert capsys.readouterr().err == ""
