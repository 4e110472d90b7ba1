"""An inspection says what loading then does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eightfold.config import EngineConfig
from eightfold.errors import CheckpointError, InputError
from eightfold.inspection import Inspection, bound_backends, by_layer, worst_tensors
from eightfold.kernels.hardware import detect
from eightfold.kernels.selection import Kernels
from eightfold.models.loader import load, open_checkpoint, plan, read_model
from eightfold.quant.mxfp8 import fold, quantize, sqnr_db
from eightfold.quant.policy import Policy
from tests.models.checkpoints import case, save_checkpoint, save_config


def inspect(folder: Path, **values: Any) -> Inspection:
    return Inspection(EngineConfig(model=str(folder), **({"quantization": "mxfp8"} | values)))


@pytest.mark.parametrize("name", ["llama-gqa", "llama-tied", "llama-odd-48", "qwen2"])
@pytest.mark.parametrize("head", [False, True])
def test_it_agrees_with_what_loading_does(name: str, head: bool, tmp_path: Path) -> None:
    folder = save_checkpoint(case(name), tmp_path)
    inspection = inspect(folder, quantize_lm_head=head)
    kernels = Kernels(detect("cpu"), torch.float32)
    model, checkpoint = read_model(folder), open_checkpoint(folder)
    report = load(model, checkpoint, plan(model, checkpoint, Policy("mxfp8", (), head), kernels), kernels)
    seen = list(inspection.tensors())
    assert tuple(tensor.name for tensor in seen) == inspection.names
    assert [(tensor.name, tensor.decision, tensor.bytes_before, tensor.bytes_after) for tensor in seen] == [
        (tensor.name, tensor.decision, tensor.bytes_before, tensor.bytes_after) for tensor in report.tensors
    ]
    chosen = {(use.operation.partition(" ")[0], use.backend, use.declined) for use in inspection.backends()}
    assert chosen == {(use.operation.partition(" ")[0], use.backend, use.declined) for use in bound_backends(model)}


def test_it_measures_the_noise_of_each_quantized_tensor(tmp_path: Path) -> None:
    folder = save_checkpoint(case("llama-gqa"), tmp_path)
    tensors = {tensor.name: tensor for tensor in inspect(folder).tensors()}
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(folder / "model.safetensors")[name]
    assert tensors[name].sqnr_db == sqnr_db(weight, quantize(weight))
    assert tensors[name].fold_error == fold(quantize(weight)).relative_error
    norm = tensors["model.norm.weight"]
    assert (norm.sqnr_db, norm.fold_error, norm.backend) == (None, None, None)


def test_a_tied_head_shows_at_the_embedding(tmp_path: Path) -> None:
    folder = save_checkpoint(case("llama-tied"), tmp_path)
    (embedding,) = (tensor for tensor in inspect(folder).tensors() if tensor.name == "model.embed_tokens.weight")
    assert (embedding.decision.quantized, embedding.backend is None) == (False, False)


def test_nan_in_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_checkpoint(case("llama-gqa"), tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        list(inspect(folder).tensors())


def test_what_cannot_be_loaded_cannot_be_inspected(tmp_path: Path) -> None:
    folder = save_checkpoint(case("llama-gqa"), tmp_path)
    with pytest.raises(InputError, match="warp, which is no backend"):
        inspect(folder, fp8_gemm_backend="warp")
    with pytest.raises(InputError, match="no_such"):
        inspect(folder, quantization_ignored_layers=("no_such",))


@pytest.mark.parametrize("fused", [False, True])
def test_experts_are_measured_one_by_one(fused: bool, tmp_path: Path) -> None:
    folder = save_checkpoint(case("nemotron-mixed"), tmp_path, fused=fused)
    tensors = {tensor.name: tensor for tensor in inspect(folder).tensors()}
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mixer.experts.up_proj[3]" if fused else "backbone.layers.1.mixer.experts.3.up_proj.weight"
    weight = stored["model.layers.1.mixer.experts.up_proj"][3] if fused else stored[name]
    assert tensors[name].sqnr_db == sqnr_db(weight, quantize(weight))
    assert tensors[name].fold_error == fold(quantize(weight)).relative_error
    assert tensors[name].bytes_before == weight.nbytes
    assert tensors[name].bytes_after == quantize(weight).nbytes
    assert tensors[name].backend in ("cpu", "reference")
    assert sum(tensor.bytes_before for tensor in tensors.values()) == sum(tensor.nbytes for tensor in stored.values())


def test_the_worst_come_first(tmp_path: Path) -> None:
    folder = save_checkpoint(case("nemotron-mixed"), tmp_path)
    tensors = list(inspect(folder).tensors())
    worst = worst_tensors(tensors, 4)
    noise = [tensor.sqnr_db for tensor in tensors if tensor.sqnr_db is not None]
    assert [tensor.sqnr_db for tensor in worst] == sorted(noise)[:4]
    layers = by_layer(tensors)
    assert layers[0].worst == worst[0].name
    assert layers[0].sqnr_db_min == worst[0].sqnr_db
    assert [layer.sqnr_db_min for layer in layers] == sorted(layer.sqnr_db_min for layer in layers)
    assert {layer.layer for layer in layers} == {f"backbone.layers.{index}" for index in range(6)}
    assert all(layer.sqnr_db_min <= layer.sqnr_db_mean for layer in layers)


def test_the_low_latency_product_is_shown(tmp_path: Path) -> None:
    folder = save_checkpoint(case("nemotron-latent"), tmp_path)
    uses = [use for use in inspect(folder).backends() if use.operation.startswith("low latency")]
    assert sum(use.count for use in uses) == 4  # two on the way in and out of each of two layers


def test_a_configuration_alone_is_inspected_with_dummy_weights(tmp_path: Path) -> None:
    folder = save_config(case("nemotron-latent"), tmp_path)
    inspection = Inspection(EngineConfig(model=str(folder), quantization="mxfp8", load_format="dummy"))
    tensors = list(inspection.tensors())
    assert [tensor.name for tensor in tensors] == list(inspection.names)
    noise = [tensor.sqnr_db for tensor in tensors if tensor.sqnr_db is not None]
    assert 30 < min(noise) <= max(noise) < 33  # what Gaussian values lose
