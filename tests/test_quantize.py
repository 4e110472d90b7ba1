"""Writing checkpoints in MXFP8: the bits of quantizing on arrival, whole folders or none."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from eightfold import quantize as writing
from eightfold.errors import CheckpointError, InputError
from eightfold.models.loader import read_tensors
from eightfold.quant.fp8 import widen
from eightfold.quant.mxfp8 import MXTensor, ScaleRule
from eightfold.quant.policy import Policy
from eightfold.quantize import Format, parse_bytes, quantize_checkpoint
from tests.models.checkpoints import case, save_checkpoint
from tests.models.quantized import rewrite, to_fp8
from tests.models.test_stored import answer, load_all, same

FORMATS: tuple[Format, ...] = ("native", "modelopt", "compressed-tensors")


@pytest.mark.parametrize("dialect", FORMATS)
@pytest.mark.parametrize("name", ["llama-gqa", "llama-tied", "nemotron-latent", "mixtral", "granite-hybrid"])
def test_what_is_written_loads_as_what_is_quantized_on_arrival(name: str, dialect: Format, tmp_path: Path) -> None:
    source = save_checkpoint(case(name), tmp_path / "source")
    expected = load_all(source, Policy("mxfp8"))[2]
    done = quantize_checkpoint(str(source), tmp_path / "out", dialect=dialect)
    found = load_all(tmp_path / "out")[2]
    assert found.keys() == expected.keys()
    assert [key for key in expected if not same(found[key], expected[key])] == []
    assert len(done.quantized) >= 6
    assert done.bytes_after == sum(tensor.nbytes for tensor in load_file(tmp_path / "out/model.safetensors").values())


@pytest.mark.parametrize("dialect", FORMATS)
def test_the_real_model_answers_as_it_does_when_quantized_on_arrival(
    smollm2_path: Path, dialect: Format, tmp_path: Path
) -> None:
    quantize_checkpoint(str(smollm2_path), tmp_path / "out", dialect=dialect, max_shard_bytes=60 * 10**6)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) >= 3
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (smollm2_path / "tokenizer.json").read_bytes()
    assert answer(tmp_path / "out") == answer(smollm2_path, "mxfp8")


def test_transformers_reads_the_native_dialect(tmp_path: Path) -> None:
    source = save_checkpoint(case("llama-gqa"), tmp_path / "source", dtype=torch.bfloat16)
    quantize_checkpoint(str(source), tmp_path / "out", dialect="native")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs = model.state_dict()
    ours = dict(read_tensors(tmp_path / "out"))
    assert sum(isinstance(value, MXTensor) for value in ours.values()) == 21
    for name, value in ours.items():
        assert torch.equal(theirs[name].float(), widen(value)), name


def test_the_reader_of_compressed_tensors_reads_its_dialect(tmp_path: Path) -> None:
    config_class: Any = importlib.import_module("compressed_tensors.quantization").QuantizationConfig
    compressors: Any = importlib.import_module("compressed_tensors.compressors").BaseCompressor
    source = save_checkpoint(case("llama-gqa"), tmp_path / "source", dtype=torch.bfloat16)
    quantize_checkpoint(str(source), tmp_path / "out", dialect="compressed-tensors")
    inner = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    scheme = config_class.model_validate(inner).config_groups["group_0"]
    reader = compressors.get_value_from_registry(inner["format"])
    stored = load_file(tmp_path / "out/model.safetensors")
    quantized = {name: value for name, value in read_tensors(tmp_path / "out") if isinstance(value, MXTensor)}
    assert len(quantized) == 21
    for name, value in quantized.items():
        state = {"weight": stored[name], "weight_scale": stored[f"{name}_scale"]}
        assert torch.equal(reader.decompress(state, scheme)["weight"].float(), widen(value)), name


@pytest.mark.parametrize("size", ["20KB", "60KB", "1GB"])
def test_shards(size: str, tmp_path: Path) -> None:
    source = save_checkpoint(case("llama-gqa"), tmp_path / "source")
    done = quantize_checkpoint(str(source), tmp_path / "out", dialect="native", max_shard_bytes=parse_bytes(size))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == done.shards
    assert (done.shards > 1) == (size != "1GB") == (tmp_path / "out/model.safetensors.index.json").exists()
    for file in files:
        stored = load_file(file)
        whole = {name for name in stored if not name.endswith("_scale_inv")}
        assert sum(tensor.nbytes for tensor in stored.values()) <= parse_bytes(size) or len(whole) == 1
    assert load_all(tmp_path / "out")[1].bytes_after == done.bytes_after


def test_layers_to_keep_and_the_other_rule(tmp_path: Path) -> None:
    source = save_checkpoint(case("llama-gqa"), tmp_path / "source")
    expected = load_all(source, Policy("mxfp8", ("layers.1", "down_proj")))[2]
    done = quantize_checkpoint(str(source), tmp_path / "out", dialect="modelopt", ignore=("layers.1", "down_proj"))
    found = load_all(tmp_path / "out")[2]
    assert [key for key in expected if not same(found[key], expected[key])] == []
    assert done.kept["model.layers.1.self_attn.q_proj.weight"] == "ignored by layers.1"
    quantize_checkpoint(str(source), tmp_path / "floor", dialect="native", rule=ScaleRule.FLOOR)
    assert any(not same(load_all(tmp_path / "floor")[2][key], found[key]) for key in found if "o_proj" in key)


def test_another_dialect_has_the_same_bits(tmp_path: Path) -> None:
    source = save_checkpoint(case("nemotron-mixed"), tmp_path / "source")
    quantize_checkpoint(str(source), tmp_path / "native", dialect="native")
    done = quantize_checkpoint(str(tmp_path / "native"), tmp_path / "modelopt", dialect="modelopt")
    assert done.sqnr_db == {}
    assert json.loads((tmp_path / "modelopt/hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "MXFP8"
    first, second = (dict(read_tensors(tmp_path / name)) for name in ("native", "modelopt"))
    assert first.keys() == second.keys()
    assert all(same(first[name], second[name]) for name in first)


def test_other_fp8_is_rounded_twice_only_where_that_is_asked_for(tmp_path: Path) -> None:
    source = to_fp8(save_checkpoint(case("llama-gqa"), tmp_path / "source"), "channel")
    with pytest.raises(InputError, match="--requantize"):
        quantize_checkpoint(str(source), tmp_path / "out", dialect="native")
    quantize_checkpoint(str(source), tmp_path / "out", dialect="native", requantize=True)
    assert sum(isinstance(value, MXTensor) for value in load_all(tmp_path / "out")[2].values()) == 12


def test_where_it_fails_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_checkpoint(case("llama-gqa"), tmp_path / "source")
    rewrite(source, lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj\.weight: got .*nan"):
        quantize_checkpoint(str(source), tmp_path / "out", dialect="native", max_shard_bytes=20000)
    assert [item.name for item in tmp_path.iterdir()] == ["source"]
    monkeypatch.setattr(writing, "_card", lambda *_: pytest.fail("the last step"))
    rewrite(source, lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"].fill_(1.0))
    with pytest.raises(pytest.fail.Exception, match="the last step"):
        quantize_checkpoint(str(source), tmp_path / "out", dialect="native")
    assert [item.name for item in tmp_path.iterdir()] == ["source"]


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    source = save_checkpoint(case("llama-gqa"), tmp_path / "source")
    with pytest.raises(InputError, match=r"OUT: got .*source, which exists; expected a folder to make"):
        quantize_checkpoint(str(source), source, dialect="native")


def test_the_card_and_the_progress(tmp_path: Path) -> None:
    source = save_checkpoint(case("llama-gqa"), tmp_path / "source")
    seen: list[tuple[str, int, int]] = []
    done = quantize_checkpoint(str(source), tmp_path / "out", dialect="native", report=lambda *news: seen.append(news))
    assert seen[-1] == ("quantize", done.bytes_before, done.bytes_before)
    card = (tmp_path / "out/README.md").read_text()
    worst = min(done.sqnr_db, key=lambda name: done.sqnr_db[name])
    assert f"{done.sqnr_db[worst]:.2f} in {worst}" in card
    assert f"{len(done.quantized)} |" in card


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("200mb", 2 * 10**8), ("1.5KB", 1500), ("77", 77)])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "five", "-1GB", "0", "1TB", "1GBK"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match=r"--max-shard-size: got .*; expected a size such as 5GB"):
        parse_bytes(text)
