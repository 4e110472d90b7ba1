from __future__ import annotations

from eightfold.server.tools.deltas import (
    Call,
    CallArguments,
    CallStart,
    ContentText,
    Delta,
    Parsed,
    ReasoningText,
    call_id,
    gather,
    short_call_id,
)


def test_deltas_make_an_answer() -> None:
    deltas: list[Delta] = [
        ReasoningText("a"),
        ContentText("b"),
        CallStart(0, "x", "f"),
        CallArguments(0, "{"),
        CallStart(1, "y", "g"),
        CallArguments(0, "}"),
        ContentText("c"),
        ReasoningText("d"),
    ]
    assert gather(deltas) == Parsed("bc", "ad", [Call("x", "f", "{}"), Call("y", "g", "")])
    assert gather([]) == Parsed("", "", [])


def test_ids_differ_and_have_the_forms_that_clients_know() -> None:
    assert call_id() != call_id()
    assert call_id().startswith("call_")
    assert len(call_id()) == 29
    assert short_call_id() != short_call_id()
