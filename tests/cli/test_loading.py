"""What a command, and the server's engine, tell of a checkpoint whose tensors are not all used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eightfold.cli import main
from eightfold.server.real_engine import load
from eightfold.server.wire import Load
from tests.models.checkpoints import Case, case, save_checkpoint
from tests.tiny_tokenizer import save

NOTE = "1 tensor is not used: heads that draft tokens ahead, for speculative decoding"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with a draft head, and with a vocabulary that holds the byte-level tokenizer's."""

    def wide() -> object:
        config = case("nemotron-mixed").make_config()
        config.vocab_size = 300
        return config

    folder = save(save_checkpoint(Case("wide", wide), tmp_path_factory.mktemp("hybrid")))  # type: ignore[arg-type]
    tensors = load_file(folder / "model.safetensors") | {"mtp.layers.0.mixer.q_proj.weight": torch.zeros(2, 2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_command_says_on_stderr_what_was_passed_over(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--quantization", "mxfp8", "--max-total-tokens", "1024", "--temperature", "0", "--max-tokens", "4")
    assert main(["generate", str(checkpoint), "hello", *flags]) == 0
    assert NOTE in capsys.readouterr().err.splitlines()


def test_the_server_learns_of_it(checkpoint: Path) -> None:
    _, describe = load(Load({"model": str(checkpoint), "max_total_tokens": 256}, 0.0, 60.0), lambda *_: None)
    assert describe().notes == (NOTE,)
