"""A pair of a model and its reference: noise by tensor, by layer and by kind, and what cannot be compared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eightfold.config import EngineConfig
from eightfold.errors import InputError
from eightfold.evaluate import evaluate
from eightfold.inspection import by_layer as inspected_by_layer
from eightfold.quality import Pair, by_kind, by_layer, exponents_of, tensor_noise
from eightfold.quant.evidence import Evidence
from eightfold.quant.mxfp8 import ScaleRule, quantize, sqnr_db
from tests.models.checkpoints import case, random_prompt, save_checkpoint
from tests.models.quantized import edit_config, rewrite, to_fp8, to_mxfp8
from tests.test_inspection import inspect


def pair(folder: Path, against: Path | str = "bf16", **values: Any) -> Pair:
    return Pair(EngineConfig(model=str(folder), **({"quantization": "mxfp8"} | values)), str(against))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(case("llama-odd-80"), tmp_path / "stored")


@pytest.mark.parametrize(
    ("name", "layer", "index", "kind"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3", 3, "self_attn.q_proj"),
        ("backbone.layers.10.mixer.experts.7.up_proj.weight", "backbone.layers.10", 10, "mixer.experts.up_proj"),
        ("model.layers.1.mlp.experts.gate_up_proj[12]", "model.layers.1", 1, "mlp.experts.gate_up_proj"),
        ("lm_head.weight", "lm_head", None, "lm_head"),
    ],
)
def test_a_name_says_where_a_tensor_is(name: str, layer: str, index: int | None, kind: str) -> None:
    item = tensor_noise(name, 30.0, None)
    assert (item.layer, item.index, item.kind) == (layer, index, kind)


def test_noise_of_what_is_quantized_on_arrival(folder: Path) -> None:
    found = {item.name: item for item in pair(folder, scale_rule="floor").noise()}
    assert len(found) == 21
    name = "model.layers.1.mlp.up_proj.weight"
    mx = quantize(load_file(folder / "model.safetensors")[name], ScaleRule.FLOOR)
    assert found[name].sqnr_db == sqnr_db(load_file(folder / "model.safetensors")[name], mx)
    evidence = found[name].evidence
    assert evidence is not None
    exponents = (mx.scale.int() - 127).flatten().tolist()
    assert evidence.exponents == {exponent: exponents.count(exponent) for exponent in set(exponents)}


def test_noise_of_what_the_files_hold_is_that_against_the_original(folder: Path, tmp_path: Path) -> None:
    stored = to_mxfp8(save_checkpoint(case("llama-odd-80"), tmp_path / "mx"), "modelopt")
    online = {item.name: item for item in pair(folder).noise()}
    serialized = {item.name: item for item in pair(stored, folder).noise()}
    assert serialized.keys() == online.keys()
    for name, item in online.items():
        assert serialized[name].sqnr_db == pytest.approx(item.sqnr_db)
        assert serialized[name].evidence == item.evidence
    windows = [random_prompt(30)]
    first, second = pair(folder), pair(stored, folder)
    assert evaluate(first.model_logits(), second.model_logits(), windows).kl == pytest.approx(0, abs=1e-9)
    assert evaluate(second.model_logits(), second.reference_logits(), windows).kl > 1e-5
    assert evaluate(first.reference_logits(), second.reference_logits(), windows).kl == pytest.approx(0, abs=1e-9)


def test_other_fp8_has_noise_and_no_blocks(folder: Path, tmp_path: Path) -> None:
    stored = to_fp8(save_checkpoint(case("llama-odd-80"), tmp_path / "fp8"), "channel")
    found = list(pair(stored, folder, quantization=None).noise())
    assert len(found) == 21
    assert all(25 < item.sqnr_db < 45 and item.evidence is None for item in found)


def test_experts_have_one_kind(tmp_path: Path) -> None:
    folder = save_checkpoint(case("nemotron-mixed"), tmp_path)
    found = list(pair(folder).noise())
    kinds = by_kind(found)
    experts = kinds["mixer.experts.up_proj"]
    values = [item.sqnr_db for item in found if item.index == 1 and item.kind == "mixer.experts.up_proj"]
    assert len(values) == 8
    assert experts[1] == pytest.approx((min(values), sum(values) / 8))
    layers = by_layer(found)
    expected = inspected_by_layer(inspect(folder).tensors())
    assert [(item.layer, item.sqnr_db_min, item.worst) for item in layers] == [
        (item.layer, item.sqnr_db_min, item.worst) for item in expected
    ]


def test_what_is_exact_is_no_noise_of_a_kind() -> None:
    items = [tensor_noise("model.layers.0.a.weight", math.inf, None), tensor_noise("model.layers.1.a.weight", 31.0, None)]
    assert by_kind(items) == {"a": {1: (31.0, 31.0)}}
    assert [layer.layer for layer in by_layer(items)] == ["model.layers.1", "model.layers.0"]


def test_shares_of_exponents_add_up_over_experts() -> None:
    items = [
        tensor_noise("m.layers.0.experts.0.up_proj.weight", 31.0, Evidence({-3: 1, -2: 2})),
        tensor_noise("m.layers.0.experts.1.up_proj.weight", 31.0, Evidence({-2: 1})),
        tensor_noise("m.layers.0.o_proj.weight", 31.0, None),
        tensor_noise("m.layers.1.experts.0.up_proj.weight", 31.0, Evidence({5: 1})),
    ]
    assert exponents_of(items, "m.layers.0") == {"experts.up_proj": {-3: 0.25, -2: 0.75}}


def test_what_cannot_be_compared_is_refused(folder: Path, tmp_path: Path) -> None:
    stored = to_mxfp8(save_checkpoint(case("llama-odd-80"), tmp_path / "mx"), "native")
    with pytest.raises(InputError, match=r"--against: got .*mx, which is quantized in its files; expected the checkpoint that"):
        pair(stored)
    with pytest.raises(InputError, match=r"--against: got .*mx, which is quantized in its files"):
        pair(folder, stored)
    other = save_checkpoint(case("llama-gqa"), tmp_path / "other")
    with pytest.raises(InputError, match=r"--against: tensor model\.\S+: got shape \[64, 96\]; expected shape \[80, 100\]"):
        list(pair(stored, other).noise())
    rewrite(other, lambda tensors: tensors.update(load_file(folder / "model.safetensors")))
    rewrite(other, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(InputError, match=r"layers\.2\.mlp\.up_proj\.weight: got no such tensor"):
        list(pair(stored, other).noise())
    edit_config(other, vocab_size=98)
    with pytest.raises(InputError, match="with 98 tokens; expected 97"):
        pair(stored, other)


def test_the_shorter_context_counts(folder: Path, tmp_path: Path) -> None:
    assert pair(folder).context_length == 128
    other = save_checkpoint(case("llama-odd-80"), tmp_path / "short")
    edit_config(other, max_position_embeddings=64)
    assert pair(folder, other).context_length == 64
    assert pair(folder).kernels.activation_dtype is torch.float32
