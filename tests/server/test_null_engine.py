"""The engine of no cost: what it answers, and that its books are real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eightfold.config import EngineConfig
from eightfold.errors import CheckpointError, InputError
from eightfold.server.null_engine import NullEngine, describe
from eightfold.types import Request, SamplingParams, TokenEvent


def run(engine: NullEngine) -> list[TokenEvent]:
    events = []
    while engine.has_work:
        events += engine.step()
        engine.scheduler.check_integrity()
    return events


def request(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), 0)


def test_it_repeats_the_prompt_until_it_is_told_to_stop(tiny_checkpoint: Path) -> None:
    engine = NullEngine(EngineConfig(model=str(tiny_checkpoint), max_running_requests=2, chunked_prefill_size=4))
    engine.add(request("a", (5, 6, 7), 5))
    engine.add(request("b", tuple(range(40, 50)), 2))
    events = run(engine)
    assert [event.token_id for event in events if event.request_id == "a"] == [5, 6, 7, 5, 6]
    assert [event.token_id for event in events if event.request_id == "b"] == [40, 41]
    assert [event.finish_reason for event in events if event.finish_reason] == ["length", "length"]
    assert engine.scheduler.manager.num_free_blocks == engine.scheduler.manager.num_blocks


def test_an_abort_frees_what_it_held(tiny_checkpoint: Path) -> None:
    engine = NullEngine(EngineConfig(model=str(tiny_checkpoint)))
    engine.add(request("a", (5,), 50))
    engine.step()
    event = engine.abort("a")
    assert event is not None
    assert event.finish_reason == "abort"
    assert run(engine) == []


def test_it_says_what_it_serves(tiny_checkpoint: Path) -> None:
    engine = NullEngine(EngineConfig(model=str(tiny_checkpoint), page_size=8, max_total_tokens=64))
    served = describe(engine)
    assert (served.num_blocks, served.block_size, served.context_length) == (8, 8, 64)
    with pytest.raises(InputError, match="update_weights: got /x; expected an engine with weights"):
        engine.update_weights("/x")


def test_settings_without_a_vocabulary_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": "many"}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"config\.json: got TypeError\(\"a vocab_size of 'many'\"\)"):
        NullEngine(EngineConfig(model=str(tmp_path)))
