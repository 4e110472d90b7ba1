"""Checkpoints that are quantized already: each dialect becomes what quantizing on arrival makes, each fault has a name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eightfold.config import EngineConfig
from eightfold.engine.engine import Engine
from eightfold.errors import CheckpointError, InputError
from eightfold.kernels.hardware import detect
from eightfold.kernels.selection import Kernels
from eightfold.layers.weight import Weight
from eightfold.models.causal_lm import CausalLM
from eightfold.models.loader import LoadReport, load, open_checkpoint, plan, read_model, read_tensors
from eightfold.quant.fp8 import FP8Tensor, WeightTensor, widen
from eightfold.quant.mxfp8 import MXTensor
from eightfold.quant.policy import Policy
from eightfold.types import SamplingParams
from tests.models.checkpoints import case, random_prompt, save_checkpoint
from tests.models.quantized import DIALECTS, Dialect, edit_config, rewrite, to_fp8, to_mxfp8, widened

AS_IT_IS, MXFP8 = Policy(None), Policy("mxfp8")
UP = "model.layers.0.mlp.up_proj.weight"


def load_all(folder: Path, policy: Policy = AS_IT_IS) -> tuple[CausalLM, LoadReport, dict[str, WeightTensor]]:
    """The model, and every weight as it was handed over."""
    model, checkpoint, kernels = read_model(folder), open_checkpoint(folder), Kernels(detect("cpu"), torch.float32)
    taken: dict[str, WeightTensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        take = Weight.take
        patch.setattr(Weight, "take", lambda self: taken.setdefault(self.name, take(self)))
        report = load(model, checkpoint, plan(model, checkpoint, policy, kernels), kernels)
    return model, report, taken


def same(left: WeightTensor, right: WeightTensor) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and torch.equal(left, right)
    return torch.equal(left.data.view(torch.uint8), right.data.view(torch.uint8)) and torch.equal(left.scale, right.scale)


def answer(folder: Path, quantization: Any = None, **options: Any) -> list[Any]:
    config = EngineConfig(model=str(folder), quantization=quantization, max_total_tokens=256, max_running_requests=2, **options)
    return answer_of(Engine.load(config))


def answer_of(engine: Engine) -> list[Any]:
    engine.add(engine.make_request("r", random_prompt(20), SamplingParams(max_tokens=5, temperature=0.0, logprobs=2)))
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
    return [event.logprobs for event in events]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", ["llama-gqa", "nemotron-latent", "mixtral"])
def test_each_dialect_becomes_what_quantizing_on_arrival_makes(name: str, dialect: Dialect, tmp_path: Path) -> None:
    _, _, expected = load_all(save_checkpoint(case(name), tmp_path), MXFP8)
    for policy in (AS_IT_IS, MXFP8):
        folder = tmp_path if (tmp_path / "done").exists() else to_mxfp8(tmp_path, dialect)
        (tmp_path / "done").touch()
        _, report, found = load_all(folder, policy)
        assert found.keys() == expected.keys()
        assert [key for key in expected if not same(found[key], expected[key])] == []
        assert sum(isinstance(value, MXTensor) for value in found.values()) >= 6
        assert report.bytes_after == sum(item.bytes_before for item in report.tensors)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    _, _, expected = load_all(save_checkpoint(case("nemotron-mixed"), tmp_path, fused=True), MXFP8)
    _, _, found = load_all(to_mxfp8(tmp_path, "native"))
    assert [key for key in expected if not same(found[key], expected[key])] == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_layers_that_are_excluded_stay(dialect: Dialect, tmp_path: Path) -> None:
    save_checkpoint(case("llama-gqa"), tmp_path)
    expected = load_all(tmp_path)[2]
    _, _, found = load_all(to_mxfp8(tmp_path, dialect, ("lm_head", "layers.1", "down_proj")))
    kept = {name for name, value in found.items() if isinstance(value, Tensor) and "proj" in name}
    assert kept == {name for name in expected if "proj" in name and ("layers.1." in name or "down_proj" in name)}
    assert all(same(found[name], expected[name]) for name in kept)


def test_the_real_model_answers_as_it_does_when_quantized_on_arrival(smollm2_path: Path, tmp_path: Path) -> None:
    for file in smollm2_path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    to_mxfp8(tmp_path, "compressed-tensors")
    assert answer(tmp_path) == answer(smollm2_path, "mxfp8")


def test_weights_in_service_are_replaced_by_ones_that_are_quantized_already(tmp_path: Path) -> None:
    folder = save_checkpoint(case("llama-gqa"), tmp_path / "bf16", seed=1)
    expected = answer(folder, "mxfp8")
    stored = to_mxfp8(save_checkpoint(case("llama-gqa"), tmp_path / "stored", seed=1), "modelopt")
    engine = Engine.load(
        EngineConfig(
            model=str(save_checkpoint(case("llama-gqa"), tmp_path / "other")), quantization="mxfp8", max_total_tokens=256
        )
    )
    engine.update_weights(str(stored))
    assert answer_of(engine) == expected


def test_mixed_precision_takes_each_layer_by_its_own_entry(tmp_path: Path) -> None:
    save_checkpoint(case("llama-gqa"), tmp_path)
    names = [name for name in load_file(tmp_path / "model.safetensors") if "mlp" in name]
    to_mxfp8(tmp_path, "modelopt", ("lm_head", "self_attn"))
    listed = {name.removesuffix(".weight"): {"quant_algo": "MXFP8", "group_size": 32} for name in names}
    inner = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    edit_config(tmp_path, quantization_config=inner)
    found = load_all(tmp_path)[2]
    assert {isinstance(value, MXTensor) for name, value in found.items() if ".mlp." in name} == {True}
    assert not any(isinstance(value, MXTensor) for name, value in found.items() if "attn" in name)
    listed["model.layers.2.mlp.up_proj"] = {"quant_algo": "NVFP4", "group_size": 16}
    edit_config(tmp_path, quantization_config=inner)
    with pytest.raises(CheckpointError, match=r"layer model\.layers\.2\.mlp\.up_proj: got quant_algo NVFP4; expected one of"):
        load_all(tmp_path)


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
@pytest.mark.parametrize("name", ["llama-gqa", "mixtral", "nemotron-latent"])
def test_fp8_that_is_not_mx_runs_as_what_it_is(name: str, kind: Any, tmp_path: Path) -> None:
    to_fp8(save_checkpoint(case(name), tmp_path), kind)
    values = widened(tmp_path)
    model, _, found = load_all(tmp_path)
    stored = [(key, value) for key, value in found.items() if isinstance(value, FP8Tensor)]
    assert len(stored) >= 6
    for weight in model.weights():
        if isinstance(found[weight.name], FP8Tensor):
            whole = widen(found[weight.name])
            for part in weight.parts:
                if part.name in values:
                    place = whole
                    for selection in part.place:
                        place = place[selection]
                    assert torch.equal(place, values[part.name])
    # The same values without quantization answer the same, to rounding in fp32.
    before = answer(tmp_path)
    rewrite(tmp_path, lambda tensors: _replace(tensors, values))
    edit_config(tmp_path, quantization_config=None)
    for ours, theirs in zip(before, answer(tmp_path), strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def _replace(tensors: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name in list(tensors):
        if "_scale" in name:
            del tensors[name]
    tensors.update(values)


def test_static_activations_take_the_largest_scale_of_a_fused_layer(tmp_path: Path) -> None:
    to_fp8(save_checkpoint(case("llama-gqa"), tmp_path), "tensor", static=True)
    stored = load_file(tmp_path / "model.safetensors")
    found = load_all(tmp_path)[2]["model.layers.0.mlp.gate_up_proj.weight"]
    assert isinstance(found, FP8Tensor)
    pair = [float(stored[f"model.layers.0.mlp.{part}_proj.input_scale"]) for part in ("gate", "up")]
    assert pair[0] != pair[1]
    assert found.input_scale == max(pair)
    inner = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit_config(tmp_path, quantization_config=inner | {"activation_scheme": "dynamic"})
    _, report, weights = load_all(tmp_path)
    assert {value.input_scale for value in weights.values() if isinstance(value, FP8Tensor)} == {None}
    assert any("scale of activations, which are dynamic" in note for note in report.notes)


def test_scales_of_a_kv_cache_are_read(tmp_path: Path) -> None:
    to_mxfp8(save_checkpoint(case("llama-gqa"), tmp_path), "native")
    name = "model.layers.0.self_attn.k_proj.k_scale"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.tensor(0.25)}))
    assert dict(load_all(tmp_path)[1].kv_cache_scales) == {name: 0.25}


def test_other_fp8_becomes_mxfp8_only_where_that_is_asked_for(tmp_path: Path) -> None:
    to_fp8(save_checkpoint(case("llama-gqa"), tmp_path), "channel")
    with pytest.raises(InputError, match=r"quantization: got mxfp8 for .*q_proj, .* in fp8; .* --requantize"):
        load_all(tmp_path, MXFP8)
    found = load_all(tmp_path, Policy("mxfp8", requantize=True))[2]
    assert sum(isinstance(value, MXTensor) for value in found.values()) == 12
    with pytest.raises(InputError, match="requantize: got True; expected it to go with"):
        EngineConfig(model="m", requantize=True)


def test_a_layer_that_is_quantized_cannot_be_ignored(tmp_path: Path) -> None:
    to_mxfp8(save_checkpoint(case("llama-gqa"), tmp_path), "native")
    with pytest.raises(InputError, match=r"ignored_layers: got mlp, which matches .* in mxfp8 already"):
        load_all(tmp_path, Policy("mxfp8", ("mlp",)))


def _set(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name])

    return apply


def _nan(scale: Tensor) -> Tensor:
    scale[3, 1] = 255
    return scale


def _nan_element(data: Tensor) -> Tensor:
    data.view(torch.uint8)[5, 7] = 0x7F
    return data


SCALE = f"{UP}_scale"
FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing scale": (lambda tensors: tensors.pop(SCALE), rf"tensor {UP}: got no scale beside it; expected {UP}_scale"),
    "shape of a scale": (_set(SCALE, lambda s: s[:, :1]), rf"{SCALE}: got shape \[96, 1\]; expected \[96, 2\]"),
    "dtype of a scale": (_set(SCALE, lambda s: s.float()), rf"{SCALE}: got dtype F32; expected U8 or F8_E8M0"),
    "NaN scale": (_set(SCALE, _nan), rf"tensor {UP}: got NaN in a scale at index \[3, 1\]"),
    "NaN element": (_set(UP, _nan_element), rf"tensor {UP}: got NaN in an element at index \[5, 7\]"),
    "transposed scale": (_set(SCALE, lambda s: s.T), rf"{SCALE}: got shape \[2, 96\]; .* It is transposed"),
    "swizzled scale": (_set(SCALE, lambda s: torch.full((128, 4), 127, dtype=torch.uint8)), rf"{SCALE}: .* It is swizzled"),
    "flat swizzled scale": (_set(SCALE, lambda s: torch.full((512,), 127, dtype=torch.uint8)), rf"{SCALE}: .* It is swizzled"),
    "scale of a tensor": (_set(SCALE, lambda s: s[0, 0]), rf"{SCALE}: got shape \[\]; .* FP8 that is not MX"),
    "bf16 weights": (
        lambda tensors: (tensors.pop(SCALE), tensors.update({UP: torch.ones(96, 64, dtype=torch.bfloat16)})),
        rf"tensor {UP}: got dtype BF16; expected F8_E4M3 elements of MXFP8, by config\.json\. .* exclusions",
    ),
    "transposed weight": (
        lambda tensors: tensors.update({UP: tensors[UP].T, SCALE: torch.full((64, 3), 127, dtype=torch.uint8)}),
        rf"tensor {UP}: got shape \[64, 96\]; expected \[96, 64\].* It is transposed",
    ),
    "shard that cuts a block": (
        lambda tensors: tensors.update({UP: tensors[UP][:, :16], SCALE: tensors[SCALE][:, :1]}),
        rf"tensor {UP}: got shape \[96, 16\]; .* one of 4 shards .* cuts a block of 32",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_file_names_the_tensor(fault: str, tmp_path: Path) -> None:
    damage, message = FAULTS[fault]
    to_mxfp8(save_checkpoint(case("llama-gqa"), tmp_path), "modelopt")
    rewrite(tmp_path, damage)
    with pytest.raises(CheckpointError, match=message):
        load_all(tmp_path)


def test_an_excluded_layer_has_no_scale(tmp_path: Path) -> None:
    to_mxfp8(save_checkpoint(case("llama-gqa"), tmp_path), "native")
    inner = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["lm_head", "layers.0.mlp"]}
    edit_config(tmp_path, quantization_config=inner)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.gate_proj\.weight: got dtype F8_E4M3 and a scale; .* excludes"):
        load_all(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({UP.replace("up", "gate"): torch.ones(96, 64)}))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight_scale_inv: got a scale; expected none, since layers\.0\.mlp"):
        load_all(tmp_path)


def test_parts_of_a_fused_layer_must_agree(tmp_path: Path) -> None:
    save_checkpoint(case("llama-gqa"), tmp_path)
    to_mxfp8(tmp_path, "native", ("lm_head", "up_proj"))
    with pytest.raises(CheckpointError, match=r"gate_up_proj\.weight: got .*gate_proj.*mxfp8.* beside .*up_proj.*not quant"):
        load_all(tmp_path)


def test_experts_have_one_format(tmp_path: Path) -> None:
    to_mxfp8(save_checkpoint(case("nemotron-mixed"), tmp_path), "native", ("lm_head", "down_proj"))
    with pytest.raises(InputError, match=r"experts .*experts: got mxfp8 going up and float32 going down; expected one format"):
        load_all(tmp_path)


def test_elements_without_a_configuration_are_refused(tmp_path: Path) -> None:
    to_mxfp8(save_checkpoint(case("llama-gqa"), tmp_path), "native")
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match="got dtype F8_E4M3; expected a quantization_config that says how to read it"):
        load_all(tmp_path)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_tensors_of_a_folder_by_name(dialect: Dialect, tmp_path: Path) -> None:
    plain = dict(read_tensors(save_checkpoint(case("mixtral"), tmp_path)))
    found = dict(read_tensors(to_mxfp8(tmp_path, dialect)))
    assert found.keys() == plain.keys()
    assert sum(isinstance(value, MXTensor) for value in found.values()) > 40
    for name, value in found.items():
        assert widen(value).shape == plain[name].shape


def test_the_resolved_configuration_says_what_the_checkpoint_holds(tmp_path: Path) -> None:
    to_mxfp8(save_checkpoint(case("llama-gqa"), tmp_path), "native")
    engine = Engine.load(EngineConfig(model=str(tmp_path), max_total_tokens=64))
    origin = next(item for item in engine.loaded.config.origins if item.name == "quantization")
    assert (origin.kind, origin.why) == ("model", "its weights are served as they are, in mxfp8 by config.json")
