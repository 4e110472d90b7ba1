"""A command line that carries SGLang's flags over gets a sentence for each."""

from __future__ import annotations

import pytest

from eightfold.cli import BAD_INPUT, main
from eightfold.cli.sglang import REFUSED_FLAGS
from tests.cli.test_flags import flags_of

COMMANDS = ("generate", "chat", "inspect", "doctor", "demo")


@pytest.mark.parametrize("flag", sorted(REFUSED_FLAGS))
def test_a_flag_of_sglang_is_refused_with_a_sentence(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "some/model", "hello", f"{flag}=1"]) == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"eightfold: {flag}: {REFUSED_FLAGS[flag]}\n"


def test_no_flag_is_both_built_and_refused() -> None:
    assert not set(REFUSED_FLAGS) & {flag for command in COMMANDS for flag in flags_of(command)}
