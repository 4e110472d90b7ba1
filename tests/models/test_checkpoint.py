"""Reading a folder of safetensors, and every way in which it can be damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eightfold.errors import CheckpointError, InputError
from eightfold.models.checkpoint import INDEX_NAME, Checkpoint, read_generation_config, read_json

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.ones(2, 2, dtype=torch.bfloat16),
    "c.bias": torch.zeros(5, dtype=torch.float16),
}


def save_one(folder: Path) -> Path:
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def save_sharded(folder: Path) -> Path:
    shards = {"model-1.safetensors": ["a.weight"], "model-2.safetensors": ["b.weight", "c.bias"]}
    for file, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def edit_index(folder: Path, **changes: str | None) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    for name, file in changes.items():
        if file is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = file
    (folder / INDEX_NAME).write_text(json.dumps(index))


@pytest.mark.parametrize("save", [save_one, save_sharded])
def test_every_tensor_is_read_once_with_its_header(tmp_path: Path, save: object) -> None:
    assert callable(save)
    checkpoint = Checkpoint(save(tmp_path))
    found = {info.name: (info, tensor.clone()) for info, tensor in checkpoint.read()}
    assert found.keys() == TENSORS.keys()
    for name, (info, tensor) in found.items():
        assert torch.equal(tensor, TENSORS[name])
        assert (info.shape, info.nbytes) == (tuple(tensor.shape), tensor.nbytes)
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    assert torch.equal(checkpoint.read_one("b.weight"), TENSORS["b.weight"])


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = save_one(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: got a damaged file of \d+ bytes"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 100])
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: got a damaged file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"metadata": {}}', '{"weight_map": {"a": 1}}', "\x80"])
def test_a_corrupt_index_is_named(tmp_path: Path, text: str) -> None:
    save_sharded(tmp_path)
    (tmp_path / INDEX_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: got"):
        Checkpoint(tmp_path)


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    (save_sharded(tmp_path) / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: got no such file"):
        Checkpoint(tmp_path)


def test_an_index_that_names_a_tensor_its_shard_lacks(tmp_path: Path) -> None:
    edit_index(save_sharded(tmp_path), **{"d.weight": "model-1.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor d\.weight: got no such tensor in model-1\.safetensors"):
        Checkpoint(tmp_path)


def test_an_index_that_names_the_wrong_shard(tmp_path: Path) -> None:
    edit_index(save_sharded(tmp_path), **{"a.weight": "model-2.safetensors"})
    edit_index(tmp_path, **{"b.weight": "model-1.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor a\.weight: got no such tensor in model-2"):
        Checkpoint(tmp_path)


def test_an_index_outside_the_folder_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    save_one(tmp_path)
    edit = {"weight_map": {"a.weight": "../model.safetensors"}}
    (inside / INDEX_NAME).write_text(json.dumps(edit))
    with pytest.raises(CheckpointError, match=r"\.\./model\.safetensors"):
        Checkpoint(inside)


def test_a_tensor_in_two_shards_names_both(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    save_file({"a.weight": TENSORS["a.weight"], "b.weight": TENSORS["b.weight"]}, tmp_path / "model-1.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.weight: got it in model-1\.safetensors and in model-2\.safetensors"):
        Checkpoint(tmp_path)


def test_a_folder_without_weights_names_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"got no \*\.safetensors; expected a folder with safetensors weights"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"but pytorch_model\.bin.*save_pretrained writes safetensors"):
        Checkpoint(tmp_path)


def test_several_files_without_an_index_are_refused_unless_one_is_the_model(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"y": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"2 weight files \(one\.safetensors, two\.safetensors"):
        Checkpoint(tmp_path)
    save_one(tmp_path)
    assert Checkpoint(tmp_path).tensors.keys() == TENSORS.keys()


def test_json_files_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: got no such file"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{,}")
    with pytest.raises(CheckpointError, match=r"config\.json: got damaged JSON"):
        read_json(tmp_path / "config.json")


def test_generation_config_gives_sampling_values_and_end_tokens_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert read_generation_config(tmp_path).eos_token_ids == {2}
    (tmp_path / "generation_config.json").write_text(
        '{"eos_token_id": [5, 6], "temperature": 0.6, "top_k": 20, "max_length": 9}'
    )
    found = read_generation_config(tmp_path)
    assert found.eos_token_ids == {2, 5, 6}
    assert dict(found.sampling) == {"temperature": 0.6, "top_k": 20}
    (tmp_path / "generation_config.json").write_text('{"top_p": 3}')
    with pytest.raises(InputError, match="top_p"):
        read_generation_config(tmp_path)
