from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from eightfold.errors import CheckpointError
from eightfold.hub import resolve
from eightfold.hub.resolve import resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def hub(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> list[tuple[str, dict[str, Any]]]:
    """Put `answer` in the hub's place; returns the list that the calls are written to."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(name: str, **kwargs: Any) -> str:
        calls.append((name, kwargs))
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(resolve, "snapshot_download", snapshot_download)
    return calls


def refusal(kind: type[Any]) -> Exception:
    error: Exception = kind("refused", response=MagicMock(headers={}))
    return error


def test_a_folder_is_itself(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder


def test_the_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("USERPROFILE", str(folder.parent))
    assert resolve_model(f"~/{folder.name}") == folder


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "model.Q4_1.gguf"])
def test_a_folder_with_other_weights_is_refused_and_names_them(tmp_path: Path, file: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=rf"no \*\.safetensors but {file}.*save_pretrained"):
        resolve_model(str(tmp_path))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors; expected a folder"):
        resolve_model(str(tmp_path))


def test_a_file_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the file .*model\.safetensors; expected a folder"):
        resolve_model(str(folder / "model.safetensors"))


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "../a/b", "a/b/c", "smol lm"])
def test_what_is_nothing_at_all_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"no folder; expected a folder, a hub id such as owner/name, or an alias: smollm2"
    ):
        resolve_model(name)


def test_a_slip_in_an_alias_gets_the_nearest() -> None:
    with pytest.raises(CheckpointError, match=r"Did you mean smollm2\?"):
        resolve_model("smolm2")


def test_an_alias_is_converted(smollm2_path: Path) -> None:
    assert (smollm2_path / "model.safetensors").is_file()
    assert resolve_model("smollm2") == smollm2_path


def test_a_hub_id_is_fetched_without_code_or_other_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub(monkeypatch, folder)
    assert resolve_model("owner/name", revision="v1") == folder
    [(name, kwargs)] = calls
    assert (name, kwargs["revision"]) == ("owner/name", "v1")
    assert not {"*.py", "*.bin", "*.gguf", "*"} & set(kwargs["allow_patterns"])


def test_a_repository_without_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, tmp_path)
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        resolve_model("owner/name")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("ConnectError: no route"), r"owner/name, which .*cannot be fetched.*no route.*Offline, give"),
        (OSError("the disk is full"), "the disk is full"),
        (refusal(GatedRepoError), "owner/name, which is gated.*hf auth login"),
        (refusal(RepositoryNotFoundError), "owner/name, which is neither a folder nor on the hub"),
        (refusal(RevisionNotFoundError), "revision: got v1; expected a branch, tag or commit of owner/name"),
    ],
)
def test_each_refusal_of_the_hub_says_what_would_work(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    hub(monkeypatch, error)
    with pytest.raises(CheckpointError, match=words):
        resolve_model("owner/name", revision="v1")


def test_only_a_hub_id_has_revisions(folder: Path) -> None:
    for name in (str(folder), "smollm2", "smolm2"):
        with pytest.raises(CheckpointError, match="revision: got v1; expected none"):
            resolve_model(name, revision="v1")


def test_bytes_from_the_hub_are_reported_and_nothing_is_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = hub(monkeypatch, folder)
    reports: list[tuple[str, int, int]] = []
    resolve_model("owner/name", report=lambda *report: reports.append(report))
    bar_class = calls[0][1]["tqdm_class"]
    with bar_class(name="huggingface_hub.snapshot_download", total=0, unit="B", disable=None) as bytes_bar:
        bytes_bar.total += 100  # as the hub does when it learns of a file
        bytes_bar.update(30)
        bytes_bar.update(70)
    with bar_class(total=3, desc="Fetching 3 files") as files_bar:
        files_bar.update(1)
    assert reports == [("download", 30, 100), ("download", 100, 100)]
    assert capfd.readouterr() == ("", "")
