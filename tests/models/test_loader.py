"""From files to a model: what is quantized, what is refused, and how much memory it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eightfold.errors import BackendError, CheckpointError, InputError
from eightfold.kernels.hardware import detect
from eightfold.kernels.selection import Kernels
from eightfold.layers.linear import Linear
from eightfold.memory import PeakMemory
from eightfold.models import loader
from eightfold.models.causal_lm import CausalLM
from eightfold.models.checkpoint import Checkpoint
from eightfold.models.loader import LoadReport, load, open_checkpoint, plan, read_model
from eightfold.quant.mxfp8 import MXTensor, ScaleRule, quantize
from eightfold.quant.policy import Policy, Role
from tests.models.checkpoints import case, save_checkpoint

MXFP8 = Policy("mxfp8")
Tensors = dict[str, Tensor]


def kernels(**names: Any) -> Kernels:
    return Kernels(detect("cpu"), torch.float32, **names)


def load_all(
    folder: Path, policy: Policy = MXFP8, *, rule: ScaleRule = ScaleRule.CEIL, **names: str
) -> tuple[CausalLM, LoadReport]:
    model = read_model(folder)
    checkpoint, found = open_checkpoint(folder), kernels(**names)
    return model, load(model, checkpoint, plan(model, checkpoint, policy, found), found, rule=rule)


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    """Change the tensors of a checkpoint of one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(case("llama-gqa"), tmp_path)


@pytest.fixture
def prepared_weights(monkeypatch: pytest.MonkeyPatch) -> dict[str, MXTensor | Tensor]:
    """Every weight that a Linear hands to its backend, by the layer's name."""
    seen: dict[str, MXTensor | Tensor] = {}
    original = Linear.bind_to

    def record(self: Linear, found: Kernels, weight: MXTensor | Tensor, bias: Tensor | None) -> None:
        seen[self.name] = weight
        original(self, found, weight, bias)

    monkeypatch.setattr(Linear, "bind_to", record)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ScaleRule)
def test_every_projection_is_quantized_from_its_own_values(
    tmp_path: Path, prepared_weights: dict[str, MXTensor | Tensor], dtype: torch.dtype, rule: ScaleRule
) -> None:
    save_checkpoint(case("qwen2"), tmp_path, dtype=dtype)
    stored = load_file(tmp_path / "model.safetensors")
    load_all(tmp_path, rule=rule)
    for index in range(3):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        for fused, parts in {
            f"{attention}.qkv_proj": [f"{attention}.{part}_proj" for part in "qkv"],
            f"{attention}.o_proj": [f"{attention}.o_proj"],
            f"{mlp}.gate_up_proj": [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
            f"{mlp}.down_proj": [f"{mlp}.down_proj"],
        }.items():
            expected = quantize(torch.cat([stored[f"{part}.weight"] for part in parts]), rule)
            found = prepared_weights[fused]
            assert isinstance(found, MXTensor)
            assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
            assert torch.equal(found.scale, expected.scale)
    head = prepared_weights["lm_head"]
    assert isinstance(head, Tensor)
    assert torch.equal(head, stored["lm_head.weight"])


def test_a_sharded_checkpoint_gives_the_same_weights(tmp_path: Path, prepared_weights: dict[str, MXTensor | Tensor]) -> None:
    load_all(save_checkpoint(case("qwen3"), tmp_path / "one"))
    one = dict(prepared_weights)
    load_all(save_checkpoint(case("qwen3"), tmp_path / "many", max_shard_size="20KB"))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    for name, weight in one.items():
        other = prepared_weights[name]
        if isinstance(weight, MXTensor):
            assert isinstance(other, MXTensor)
            assert torch.equal(weight.data.view(torch.uint8), other.data.view(torch.uint8))
        else:
            assert isinstance(other, Tensor)
            assert torch.equal(weight, other)


def test_the_report_names_every_tensor_with_its_decision_and_bytes(folder: Path) -> None:
    _, report = load_all(folder)
    stored = load_file(folder / "model.safetensors")
    assert {item.name for item in report.tensors} == stored.keys()
    for item in report.tensors:
        assert item.decision.quantized == (item.role is Role.LINEAR)
        assert item.bytes_before == stored[item.name].nbytes
        expected = quantize(stored[item.name]).nbytes if item.decision.quantized else stored[item.name].nbytes
        assert item.bytes_after == expected
    assert report.bytes_before == sum(tensor.nbytes for tensor in stored.values())
    assert report.bytes_after < 0.55 * report.bytes_before


def test_without_quantization_everything_is_kept(folder: Path) -> None:
    _, report = load_all(folder, Policy(None))
    assert not any(item.decision.quantized for item in report.tensors)
    assert report.bytes_after == report.bytes_before


def test_ignored_layers_stay(folder: Path, prepared_weights: dict[str, MXTensor | Tensor]) -> None:
    load_all(folder, Policy("mxfp8", ("layers.1", "down_proj")))
    kept = {name for name, weight in prepared_weights.items() if isinstance(weight, Tensor)}
    assert kept == {
        "lm_head",
        *(f"model.layers.{index}.mlp.down_proj" for index in range(3)),
        *(f"model.layers.1.{name}" for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj")),
    }


def test_a_tied_head(tmp_path: Path, prepared_weights: dict[str, MXTensor | Tensor]) -> None:
    save_checkpoint(case("llama-tied"), tmp_path)
    _, report = load_all(tmp_path)
    assert [item.name for item in report.tensors].count("model.embed_tokens.weight") == 1
    assert not isinstance(prepared_weights.pop("lm_head"), MXTensor)
    _, report = load_all(tmp_path, Policy("mxfp8", quantize_lm_head=True))
    assert [item.decision.quantized for item in report.tensors if item.name == "model.embed_tokens.weight"] == [False, True]
    assert isinstance(prepared_weights["lm_head"], MXTensor)


def test_a_tied_head_that_is_stored_too(tmp_path: Path) -> None:
    save_checkpoint(case("llama-tied"), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    _, report = load_all(tmp_path)
    assert dict(report.skipped) == {"lm_head.weight": "tied to model.embed_tokens.weight"}
    rewrite(tmp_path, lambda tensors: tensors["lm_head.weight"].mul_(2))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: got values that differ from model\.embed_tokens\.weight"):
        load_all(tmp_path)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.self_attn\.k_proj\.weight: got no such tensor"):
        load_all(folder)


def test_names_with_another_prefix_are_shown(folder: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    rewrite(folder, rename)
    with pytest.raises(CheckpointError, match=r"The checkpoint has language_model\."):
        load_all(folder)


def test_unexpected_tensors_are_named_and_derived_ones_are_skipped_with_a_reason(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    _, report = load_all(folder)
    assert dict(report.skipped) == {"model.layers.0.self_attn.rotary_emb.inv_freq": "follows from config.json"}
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.mlp.extra.weight": torch.ones(8)}))
    with pytest.raises(
        CheckpointError, match=r"1 tensor without a place in the model: got model\.layers\.0\.mlp\.extra\.weight; expected none"
    ):
        load_all(folder)


def test_a_wrong_shape_names_both(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: got shape \[63\]; expected \[64\]"):
        load_all(folder)


def test_a_dtype_that_is_no_float_is_named(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: got dtype I8; expected one of: F32, BF16, F16"):
        load_all(folder)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_name_the_tensor(folder: Path, name: str, bad: float) -> None:
    rewrite(folder, lambda tensors: tensors[name].view(-1).__setitem__(7, bad))
    with pytest.raises(CheckpointError, match=rf"tensor {name}: got"):
        load_all(folder)


def test_a_named_backend_is_refused_before_a_weight_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda self: pytest.fail("a weight was read"))
    with pytest.raises(
        BackendError,
        match=r"linear model\.layers\.0\.self_attn\.qkv_proj \[128 x 64\] mxfp8: got backend fold, which is not for ",
    ):
        load_all(folder, linear_backend="fold")
    with pytest.raises(InputError, match="quantization_ignored_layers"):
        load_all(folder, Policy("mxfp8", ("nowhere",)))


def test_an_unsupported_model_type_names_the_nearest(folder: Path) -> None:
    edit_config(folder, model_type="lama")
    with pytest.raises(CheckpointError, match=r"model_type: got 'lama'; expected one of: .* Did you mean llama\?"):
        read_model(folder)


def test_progress_counts_bytes_to_the_end(folder: Path) -> None:
    model = read_model(folder)
    checkpoint, found = open_checkpoint(folder), kernels()
    seen: list[tuple[str, int, int]] = []
    load(model, checkpoint, plan(model, checkpoint, MXFP8, found), found, report=lambda *news: seen.append(news))
    assert seen[-1] == ("load", checkpoint.nbytes, checkpoint.nbytes)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_the_plan_knows_the_bytes_of_the_model(folder: Path) -> None:
    model = read_model(folder)
    checkpoint, found = open_checkpoint(folder), kernels()
    load_plan = plan(model, checkpoint, MXFP8, found)
    assert load_plan.weight_bytes == load(model, checkpoint, load_plan, found).bytes_after


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="private memory is read from /proc")
def test_fault_4_the_peak_is_the_final_model_and_little_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 50 MB in bf16: loading it whole first would need 50 MB beside the 27 of the result."""
    monkeypatch.undo()  # memory that the tests poison is claimed at once
    big = case("llama-gqa")
    config = big.make_config()
    assert config is not None
    save_checkpoint(type(big)("big", lambda: _enlarged(big)), tmp_path, dtype=torch.bfloat16)
    with PeakMemory() as peak:
        model, report = load_all(tmp_path)
    assert model is not None
    assert peak.growth is not None
    assert report.bytes_before > 40e6
    assert peak.growth < report.bytes_after + 12e6


def _enlarged(small: Any) -> Any:
    config = small.make_config()
    config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads = 1024, 2048, 16, 16
    config.head_dim = 64
    return config


def test_the_loader_names_its_steps() -> None:
    assert loader.__doc__ is not None
    assert all(step in loader.__doc__ for step in ("plan", "read", "bind"))
