"""Flags are made from the fields of the configuration."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from eightfold.cli import app, main
from eightfold.cli.flags import flag_names
from eightfold.config import EngineConfig
from eightfold.types import SamplingParams

COMMANDS = ("generate", "chat", "inspect", "doctor", "demo")


def flags_of(command: str) -> set[str]:
    group: Any = typer.main.get_command(app)
    return {name for param in group.commands[command].params for name in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_field_is_a_flag_with_its_aliases(command: str) -> None:
    expected = {name for item in fields(EngineConfig) if item.name != "model" for name in flag_names(item)}
    expected |= {name for item in fields(SamplingParams) if item.name not in ("seed", "grammar") for name in flag_names(item)}
    assert expected <= flags_of(command)
    assert {"--model-path", "--disable-radix-cache", "--random-seed", "--max-new-tokens"} <= flags_of(command)


def test_every_flag_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    group: Any = typer.main.get_command(app)
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        assert not [param.name for param in group.commands[command].params if not param.help]
    assert "Smallest set of tokens" in capsys.readouterr().out


def test_values_reach_the_engine_and_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Spy:
        engine = SimpleNamespace(loaded=SimpleNamespace(report=SimpleNamespace(notes=())))

        def __init__(self, **options: Any) -> None:
            seen.update(options)

        def generate(self, prompts: list[str], params: SamplingParams) -> list[Any]:
            seen.update(prompts=prompts, params=params)
            return []

    monkeypatch.setattr("eightfold.llm.LLM", Spy)
    line = (
        "generate --model-path some/model one two --quantization mxfp8 --quantization-ignored-layers a.b,c "
        "--quantization-ignored-layers d --disable-radix-cache --random-seed 7 --max-new-tokens 9 --stop END --stop , "
        "--stop-token-ids 3 --logit-bias 5=-1.5 --no-skip-special-tokens --ignore-eos --top-k 4"
    )
    with pytest.raises(ValueError, match="argument 2 is shorter"):  # the spy answers nothing
        main(line.split())
    report = seen.pop("report")
    assert report is None  # stderr is no terminal
    assert seen == {
        "model": "some/model",
        "quantization": "mxfp8",
        "quantization_ignored_layers": ("a.b", "c", "d"),
        "disable_prefix_cache": True,
        "seed": 7,
        "prompts": ["one", "two"],
        "params": SamplingParams(
            max_tokens=9,
            stop=("END", ","),
            stop_token_ids=(3,),
            logit_bias={5: -1.5},
            skip_special_tokens=False,
            ignore_eos=True,
            top_k=4,
        ),
    }
