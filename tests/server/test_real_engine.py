"""The real engine as the server's process makes it: with grammars, and with all that users may want to know of it."""

from __future__ import annotations

from pathlib import Path

from eightfold.server.real_engine import load
from eightfold.server.wire import Load
from eightfold.types import Grammar, SamplingParams


def test_it_loads_and_says_everything_of_the_model(tiny_checkpoint: Path) -> None:
    seen: list[str] = []
    options = {"model": str(tiny_checkpoint), "quantization": "mxfp8", "max_total_tokens": 256, "page_size": 8}
    _, describe = load(Load(options, 0.0, 60.0), lambda phase, done, total: seen.append(phase))
    served = describe()
    assert seen
    assert (served.model_path, served.num_blocks, served.block_size) == (str(tiny_checkpoint), 32, 8)
    decisions = {row.name: row.decision for row in served.quantization}
    assert decisions["model.layers.0.self_attn.q_proj.weight"] == "mxfp8"
    assert decisions["model.norm.weight"] == "kept"
    assert ("max_total_tokens", "256", "user") in [(row.name, row.value, row.kind) for row in served.config]
    assert {row.operation for row in served.backends} >= {"linear mxfp8", "attention"}


def test_grammars_work_before_and_after_other_weights(tiny_checkpoint: Path) -> None:
    engine, _ = load(Load({"model": str(tiny_checkpoint), "max_total_tokens": 256}, 0.0, 60.0), lambda *_: None)
    params = SamplingParams(max_tokens=20, temperature=0.0, grammar=Grammar.regex("[ab]{3}"))
    for _ in range(2):
        compiler = engine.grammar_compiler
        assert compiler is not None
        engine.add(engine.make_request("a", [5, 6], params))
        tokens = []
        while engine.has_work:
            tokens += [event.token_id for event in engine.step()]
        assert len(tokens) >= 3
        engine.update_weights(str(tiny_checkpoint))
        assert engine.grammar_compiler is not compiler
