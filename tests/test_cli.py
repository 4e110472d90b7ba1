"""The program: every bad input, help, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eightfold import __version__
from eightfold.cli import BAD_INPUT, INTERRUPTED, main
from eightfold.hub import resolve
from tests.bad_inputs import BAD_INPUTS, MODEL, BadInput, damaged
from tests.tiny_tokenizer import save_text_checkpoint

COMMANDS = ("generate", "chat", "inspect", "doctor", "demo")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("bad", [item for item in BAD_INPUTS if item.arguments], ids=lambda item: item.name)
def test_bad_input_is_one_message_and_exit_code_2(
    bad: BadInput, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(damaged(checkpoint, bad, tmp_path))
    arguments = [folder if word == MODEL else word for word in bad.arguments or ()]
    assert main(arguments) == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    for word in bad.words:
        assert word in err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"eightfold {__version__}\n"
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from eightfold.cli import main; main(['--help']); main(['generate', '--help'])\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'huggingface_hub', 'numpy', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(command in done.stdout for command in COMMANDS)


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(resolve, "resolve_model", interrupt)
    monkeypatch.setattr("eightfold.inspection.resolve_model", interrupt)
    assert main(["inspect", "some/model"]) == INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_signal_exits_with_130_and_no_traceback() -> None:
    code = "import sys; from eightfold.cli import main; print('ready', flush=True); sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "generate", "some/model", "--input", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.3)  # until it waits for its prompts
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == INTERRUPTED
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_a_broken_pipe_is_quiet() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "eightfold", "--version"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")
