"""Where a server stands, and what it answers there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eightfold.server.config import ServerConfig
from eightfold.server.errors import UnavailableError
from eightfold.server.state import AppState
from eightfold.server.token_stream import EngineDiedError
from eightfold.server.wire import Failure, ServedModel, Snapshot
from eightfold.text import Tokenizer
from tests.tiny_tokenizer import save_text_checkpoint

MODEL = ServedModel("/m", 64, 300, (), {}, 2, 8, 16)


def state(**of_client: Any) -> AppState:
    client: Any = SimpleNamespace(
        **{"state": "loading", "model": None, "failure": None, "progress": ("load", 1, 4), "silent_seconds": 0.0} | of_client
    )
    client.snapshot = Snapshot()
    return AppState(ServerConfig(health_stall_seconds=5.0), client, ("tiny",))


def test_loading_is_told_with_its_share() -> None:
    loading = state()
    assert loading.phase == "loading"
    with pytest.raises(UnavailableError, match="the model is loading, load 25%"):
        _ = loading.serving
    with pytest.raises(UnavailableError, match="the model is loading"):
        _ = loading.model


def test_a_loaded_model_is_served_and_replaced(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = Tokenizer.load(save_text_checkpoint(tmp_path_factory.mktemp("state")))
    ready = state(state="ready", model=MODEL)
    ready.serve(MODEL, tokenizer)
    assert ready.phase == "ready"
    assert ready.serving is ready.shared.serving
    other = ServedModel("/other", 64, 300, (), {}, 2, 8, 16)
    ready.replace_model(other)
    assert (ready.model, ready.serving.facts) == (other, other)
    ready.is_draining = True
    with pytest.raises(UnavailableError, match="shutting down"):
        _ = ready.serving


def test_a_dead_engine_says_why_whatever_else_is_so() -> None:
    dead = state(state="dead", failure=Failure("out of memory"))
    dead.is_draining = True
    assert dead.phase == "dead"
    with pytest.raises(EngineDiedError, match="out of memory"):
        _ = dead.serving


def test_silence_beyond_the_limit_is_a_stall() -> None:
    assert not state(silent_seconds=4.9).is_stalled
    assert state(silent_seconds=5.1).is_stalled


def test_numbers_of_its_own_requests_differ() -> None:
    one = state()
    assert [one.next_number() for _ in range(3)] == [1, 2, 3]
