"""`scripts/install_torch.py` never takes a build of several gigabytes while a smaller one can be had."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/install_torch.py"
WHEEL, UV, PLAIN = "+cpu", "--torch-backend", "torch"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_torch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def attempts(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs the script on a pretended machine; what it tried, shortened, the last one having succeeded."""

    def run(*, gpu: bool = False, machine: str = "x86_64", failing: tuple[str, ...] = (), installed: bool = False) -> list[str]:
        tried: list[str] = []

        def pretended(command: list[str], **_: Any) -> SimpleNamespace:
            if "-L" in command:
                return SimpleNamespace(returncode=0 if gpu else 9)
            kind = next((word for word in (WHEEL, UV) if word in " ".join(command)), command[-1])
            tried.append(kind)
            return SimpleNamespace(returncode=int(kind in failing))

        monkeypatch.setattr(subprocess, "run", pretended)
        monkeypatch.setattr(script.shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(script.platform, "machine", lambda: machine)
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(script.importlib.util, "find_spec", lambda _: object() if installed else None)
        assert script.main() == int(tried[-1:] != [] and tried[-1] in failing)
        return tried

    return run


def test_what_is_there_stays(attempts: Callable[..., list[str]]) -> None:
    assert attempts(installed=True) == []


def test_a_gpu_gets_the_usual_build(attempts: Callable[..., list[str]]) -> None:
    assert attempts(gpu=True) == [PLAIN]


def test_other_processors_get_the_usual_build_which_is_small_there(attempts: Callable[..., list[str]]) -> None:
    assert attempts(machine="aarch64") == [PLAIN]


def test_without_a_gpu_a_wheel_at_hand_comes_first_then_uv(attempts: Callable[..., list[str]]) -> None:
    assert attempts() == [WHEEL]
    assert attempts(failing=(WHEEL,)) == [WHEEL, "uv", UV]


def test_the_large_build_is_the_last_resort_and_is_announced(
    attempts: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert attempts(failing=(WHEEL, "uv")) == [WHEEL, "uv", PLAIN]
    assert attempts(failing=(WHEEL, UV)) == [WHEEL, "uv", UV, PLAIN]
    assert capsys.readouterr().err.count("several gigabytes") == 2


def test_a_failure_is_the_exit_status(attempts: Callable[..., list[str]]) -> None:
    assert attempts(gpu=True, failing=(PLAIN,)) == [PLAIN]
