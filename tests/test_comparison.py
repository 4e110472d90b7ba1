"""Two checkpoints compared: by hand, across dialects, and with each kind of difference planted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eightfold import comparison
from eightfold.comparison import TensorComparison, compare, difference, same_bits, worst_different
from eightfold.errors import CheckpointError
from eightfold.quant.fp8 import from_blocks
from eightfold.quant.mxfp8 import MXTensor, quantize, sqnr_db
from tests.models.checkpoints import case, save_checkpoint
from tests.models.quantized import DIALECTS, Dialect, Tensors, rewrite, to_fp8, to_mxfp8

DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"


def outcomes(a: Path, b: Path) -> dict[str, TensorComparison]:
    return {item.name: item for item in compare(a, b)}


def kinds(a: Path, b: Path) -> set[str]:
    return {item.outcome for item in outcomes(a, b).values()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(case("llama-odd-80"), tmp_path / "a")


def test_by_hand() -> None:
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[3.0, 4.5], [0.0, 0.0]])
    sqnr, largest = difference(a, b)
    assert math.isclose(sqnr, 20.0)  # 25 over 0.25
    assert largest == 0.5
    assert difference(b[1], a[1]) == (math.inf, 0.0)
    assert difference(a[1], a[0]) == (-math.inf, 4.0)


def test_it_is_measured_alike_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.randn(7, 3, 5)
    b = a + torch.randn(7, 3, 5)
    whole = difference(a, b)
    monkeypatch.setattr(comparison, "_CHUNK_ELEMENTS", 31)
    assert difference(a, b) == pytest.approx(whole)
    b[0, 0, 0] = math.nan  # in the first part
    assert all(map(math.isnan, difference(a, b)))


def test_bits() -> None:
    values = torch.tensor([[0.0, 1.0]])
    assert same_bits(values, values.clone())
    assert not same_bits(values, -values)
    assert not same_bits(torch.zeros(2), -torch.zeros(2))
    assert not same_bits(values, values.half())
    mx = quantize(values)
    assert same_bits(mx, quantize(values))
    assert not same_bits(mx, MXTensor(mx.data, mx.scale + 1))
    assert not same_bits(mx, values)
    fp8 = from_blocks(mx.data, torch.ones(1), None)
    assert same_bits(fp8, from_blocks(mx.data, torch.ones(1, 1), None))
    assert not same_bits(fp8, mx)
    nan = torch.tensor([math.nan])
    assert same_bits(nan, nan.clone())


def test_a_checkpoint_is_itself(folder: Path) -> None:
    found = outcomes(folder, folder)
    assert list(found) == list(load_file(folder / "model.safetensors"))
    assert {item.outcome for item in found.values()} == {"same bits"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_bits_are_the_same_in_every_dialect(dialect: Dialect, folder: Path, tmp_path: Path) -> None:
    other = to_mxfp8(save_checkpoint(case("llama-odd-80"), tmp_path / "b"), dialect)
    quantized = outcomes(folder, other)[DOWN]
    weight = load_file(folder / "model.safetensors")[DOWN]
    assert (quantized.outcome, quantized.forms) == ("different", ("f32", "mxfp8"))
    assert quantized.sqnr_db == pytest.approx(sqnr_db(weight, quantize(weight)))
    assert outcomes(folder, other)[NORM].outcome == "same bits"
    assert kinds(to_mxfp8(folder, "native"), other) == {"same bits"}


@pytest.mark.parametrize("name", ["nemotron-mixed", "qwen3-moe", "granite-hybrid"])
def test_experts_in_one_tensor_are_those_one_by_one(name: str, tmp_path: Path) -> None:
    apart = save_checkpoint(case(name), tmp_path / "apart")
    together = save_checkpoint(case(name), tmp_path / "together", fused=True)
    assert kinds(apart, together) == {"same bits"}
    assert kinds(together, to_mxfp8(apart, "native")) == {"same bits", "different"}
    assert kinds(to_mxfp8(together, "native"), apart) == {"same bits"}


def test_equal_values_in_another_type(folder: Path, tmp_path: Path) -> None:
    other = save_checkpoint(case("llama-odd-80"), tmp_path / "b", dtype=torch.bfloat16)
    found = outcomes(rewrite(folder, lambda tensors: tensors.update({NORM: tensors[NORM].bfloat16()})), other)
    assert found[NORM].outcome == "same bits"
    rewrite(folder, lambda tensors: tensors.update({NORM: tensors[NORM].float()}))
    item = outcomes(folder, other)[NORM]
    assert (item.outcome, item.forms, item.sqnr_db, item.max_difference) == ("same values", ("f32", "bf16"), math.inf, 0.0)
    assert outcomes(folder, other)[DOWN].outcome == "different"


def test_other_fp8(folder: Path, tmp_path: Path) -> None:
    other = to_fp8(save_checkpoint(case("llama-odd-80"), tmp_path / "b"), "channel")
    item = outcomes(folder, other)[DOWN]
    assert (item.outcome, item.forms) == ("different", ("f32", "fp8"))
    assert 25 < (item.sqnr_db or 0) < 45


def test_each_kind_of_difference_is_named(folder: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.extra.weight"] = tensors.pop(NORM)
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:-1]
        tensors[DOWN][3, 4] += 0.5

    other = rewrite(save_checkpoint(case("llama-odd-80"), tmp_path / "b"), change)
    found = {name: item for name, item in outcomes(folder, other).items() if item.outcome != "same bits"}
    assert {name: item.outcome for name, item in found.items()} == {
        "model.layers.0.mlp.up_proj.weight": "shapes differ",
        DOWN: "different",
        NORM: "only in A",
        "model.extra.weight": "only in B",
    }
    assert found[DOWN].max_difference == pytest.approx(0.5, rel=1e-6)
    assert found["model.layers.0.mlp.up_proj.weight"].shapes == ((100, 80), (99, 80))
    assert worst_different(found.values()) is found[DOWN]
    rewrite(other, lambda tensors: tensors["model.embed_tokens.weight"].fill_(math.nan))
    worst = worst_different(compare(folder, other))
    assert worst is not None
    assert (worst.name, math.isnan(worst.sqnr_db or 0)) == ("model.embed_tokens.weight", True)


def test_what_cannot_be_read_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    other = to_mxfp8(save_checkpoint(case("llama-odd-80"), tmp_path / "b"), "native")
    rewrite(other, lambda tensors: tensors.pop(f"{DOWN}_scale_inv"))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight: got no scale"):
        compare(folder, other)
