"""Random weights of a configuration: what is loaded, to the bit, and how evenly routers choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eightfold.config import EngineConfig
from eightfold.engine.engine import Engine
from eightfold.errors import CheckpointError, InputError
from eightfold.kernels.hardware import detect
from eightfold.kernels.selection import Kernels
from eightfold.layers.module import Module
from eightfold.layers.moe import MoE
from eightfold.memory import PeakMemory
from eightfold.models.dummy import DummyCheckpoint, load_dummy
from eightfold.models.loader import load, open_checkpoint, plan, read_model
from eightfold.quant.fp8 import WeightTensor
from eightfold.quant.mxfp8 import MXTensor, ScaleRule, quantize
from eightfold.quant.policy import Policy, Role
from eightfold.types import SamplingParams, TokenEvent
from tests.models.checkpoints import VOCAB_SIZE, case, random_prompt, save_checkpoint, save_config

CASES = ("llama-gqa", "llama-tied", "llama-odd-80", "qwen2", "mixtral", "qwen3-moe", "nemotron-latent", "granite-hybrid")
CPU = torch.device("cpu")


def config_alone(name: str, folder: Path, **changes: Any) -> Path:
    return save_config(case(name), folder, **changes)


def kernels() -> Kernels:
    return Kernels(detect("cpu"), torch.float32)


def fill(folder: Path, policy: Policy, *, seed: int = 0, rule: ScaleRule = ScaleRule.CEIL) -> dict[str, WeightTensor]:
    """The weights of a dummy model by their fused names, before a backend takes them."""
    model, checkpoint = read_model(folder), DummyCheckpoint(folder, seed=seed, device=CPU)
    taken: dict[str, WeightTensor] = {}
    weights = {id(weight): weight for weight in model.weights()}.values()
    model.bind = lambda kernels: taken.update({w.name: w.take() for w in weights if not w.missing})  # type: ignore[method-assign]
    load_dummy(model, checkpoint, plan(model, checkpoint, policy, kernels()), kernels(), rule=rule)
    return taken


def engine_of(folder: Path, **options: Any) -> Engine:
    values: dict[str, Any] = {"max_total_tokens": 1024, "max_running_requests": 8, "disable_prefix_cache": True}
    return Engine.load(EngineConfig(model=str(folder), load_format="dummy", **(values | options)))


def answer(engine: Engine, length: int = 20) -> list[TokenEvent]:
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3, ignore_eos=True)
    engine.add(engine.make_request("r", random_prompt(length), params))
    events = []
    while engine.has_work:
        events += engine.step()
    return events


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("name", CASES)
def test_mxfp8_is_what_quantizing_the_dense_weights_gives(name: str, rule: ScaleRule, tmp_path: Path) -> None:
    folder = config_alone(name, tmp_path)
    dense, quantized = fill(folder, Policy(None)), fill(folder, Policy("mxfp8"), rule=rule)
    assert dense.keys() == quantized.keys()
    for weight, values in dense.items():
        assert isinstance(values, Tensor)
        assert bool(torch.isfinite(values).all()), weight
        found = quantized[weight]
        if isinstance(found, MXTensor):
            expected = quantize(values, rule)
            assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8)), weight
            assert torch.equal(found.scale, expected.scale), weight
        else:
            assert isinstance(found, Tensor)
            assert torch.equal(found, values), weight
    assert any(isinstance(value, MXTensor) for value in quantized.values())


@pytest.mark.parametrize("quantization", ["mxfp8", None])
@pytest.mark.parametrize("name", CASES)
def test_bytes_and_decisions_are_those_of_really_loading(name: str, quantization: str | None, tmp_path: Path) -> None:
    folder = save_checkpoint(case(name), tmp_path, dtype=torch.bfloat16)
    policy, real = Policy(quantization), read_model(folder)
    files = open_checkpoint(folder)
    loaded = load(real, files, plan(real, files, policy, kernels()), kernels())
    model, checkpoint = read_model(folder), DummyCheckpoint(folder, seed=0, device=CPU)
    seen: list[tuple[str, int, int]] = []
    made = load_dummy(
        model, checkpoint, plan(model, checkpoint, policy, kernels()), kernels(), report=lambda *news: seen.append(news)
    )
    assert (made.bytes_after, made.bytes_before) == (loaded.bytes_after, loaded.bytes_before)
    assert {item.decision for item in made.tensors} == {item.decision for item in loaded.tensors}
    assert seen[-1] == ("load", made.bytes_before, made.bytes_before)
    used = [[(item.operation, item.choice.backend.name) for item in module.chosen] for module in model.modules()]
    assert used == [[(item.operation, item.choice.backend.name) for item in module.chosen] for module in real.modules()]


@pytest.mark.parametrize("quantization", ["mxfp8", None])
@pytest.mark.parametrize("name", ["llama-gqa", "mixtral", "nemotron-latent"])
def test_a_seed_gives_the_same_answers_again_and_another_one_others(
    name: str, quantization: str | None, tmp_path: Path
) -> None:
    folder = config_alone(name, tmp_path)
    first, again, other = (answer(engine_of(folder, quantization=quantization, seed=seed)) for seed in (3, 3, 4))
    assert first == again
    assert [event.logprobs for event in first] != [event.logprobs for event in other]
    for event in first:
        assert event.logprobs is not None
        assert 0 <= event.logprobs.token_id < VOCAB_SIZE
        assert -50 < event.logprobs.logprob < 0


def test_values_have_the_scale_of_their_kind(tmp_path: Path) -> None:
    folder = config_alone("nemotron-latent", tmp_path, vocab_size=2000)
    checkpoint = DummyCheckpoint(folder, seed=0, device=CPU)
    assert abs(float(checkpoint.read_one("backbone.embeddings.weight").float().std()) - 1) < 0.02
    head = checkpoint.read_one("lm_head.weight")
    assert abs(float(head.float().std()) * head.shape[1] ** 0.5 - 1) < 0.02
    down = checkpoint.read_one("backbone.layers.1.mixer.experts.0.down_proj.weight").float()
    assert bool((down.sum(dim=1) == 0).all())
    mixer = "backbone.layers.0.mixer"
    steps = torch.nn.functional.softplus(checkpoint.read_one(f"{mixer}.dt_bias").float())
    decays = checkpoint.read_one(f"{mixer}.A_log").float().exp()
    assert 0.0009 < float(steps.min()) < float(steps.max()) < 0.11
    assert 0.9 < float(decays.min()) < float(decays.max()) < 16.5
    assert bool((checkpoint.read_one("backbone.norm_f.weight") == 1).all())
    assert {info.name for info, _ in checkpoint.read()} == set(checkpoint.tensors)


def test_no_two_tensors_and_no_two_rows_are_alike(tmp_path: Path) -> None:
    values = fill(config_alone("llama-gqa", tmp_path), Policy(None))
    matrices = [value for value in values.values() if isinstance(value, Tensor) and value.ndim == 2 and len(value) > 60]
    rows = torch.cat([matrix[:, :32] for matrix in matrices])
    assert len(rows.unique(dim=0)) > 0.97 * len(rows)  # blocks come from a table of 32768
    whole = [tuple(matrix[:60, :64].flatten().tolist()) for matrix in matrices]
    assert len(set(whole)) == len(whole)


class Recording(Module):
    """A router that keeps its choices."""

    def __init__(self, router: Any) -> None:
        self.router, self.chosen_experts = router, []  # type: ignore[var-annotated]

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = self.router(hidden_states)
        self.chosen_experts.append(ids)
        return ids, weights


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "qwen3-moe",
            {
                "num_experts": 32,
                "num_local_experts": 32,
                "num_experts_per_tok": 4,
                "num_hidden_layers": 6,
                "mlp_only_layers": [],
            },
        ),
        ("nemotron-mixed", {"n_routed_experts": 32, "num_experts_per_tok": 4, "layers_block_type": ["mamba", "moe"] * 5}),
    ],
)
def test_routers_choose_evenly(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    changes |= {"hidden_size": 256, "vocab_size": 2000}
    engine = engine_of(config_alone(name, tmp_path, **changes), quantization="mxfp8")
    routers = []
    for module in engine.loaded.model.modules():
        if isinstance(module, MoE):
            module.gate = Recording(module.gate)  # type: ignore[assignment]
            routers.append(module.gate)
    prompts = torch.randint(0, 2000, (8, 64), generator=torch.Generator().manual_seed(0)).tolist()
    for index, prompt in enumerate(prompts):
        engine.add(engine.make_request(str(index), prompt, SamplingParams(max_tokens=1, temperature=0.0)))
    engine.step()
    assert routers
    for router in routers:
        (ids,) = router.chosen_experts  # type: ignore[attr-defined]
        counts = torch.bincount(ids.flatten(), minlength=32)
        # 64 choices an expert; its Poisson width is 8. A router that prefers some sends several times the mean to them.
        assert int(counts.min()) > 0
        assert float(counts.max()) < 2.6 * float(counts.float().mean()), counts


def test_a_configuration_of_quantized_weights_is_refused(tmp_path: Path) -> None:
    form = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic"}
    folder = config_alone("llama-gqa", tmp_path, quantization_config=form)
    with pytest.raises(CheckpointError, match=r"load_format: got dummy for .*mxfp8 by config\.json.*--quantization mxfp8"):
        engine_of(folder)


def test_real_weights_replace_dummy_ones_and_a_damaged_file_brings_them_back(tmp_path: Path) -> None:
    real = save_checkpoint(case("llama-gqa"), tmp_path / "real", dtype=torch.bfloat16)
    engine = engine_of(config_alone("llama-gqa", tmp_path / "config"), quantization="mxfp8")
    before = answer(engine)
    whole = (real / "model.safetensors").read_bytes()
    (real / "model.safetensors").write_bytes(whole[:-4] + b"\xff\x7f\xff\x7f")  # NaN
    with pytest.raises(CheckpointError, match="NaN"):
        engine.update_weights(str(real))
    assert answer(engine) == before
    (real / "model.safetensors").write_bytes(whole)
    engine.update_weights(str(real))
    loaded = Engine.load(EngineConfig(model=str(real), quantization="mxfp8", max_total_tokens=1024, disable_prefix_cache=True))
    assert answer(engine) == answer(loaded) != before
    with pytest.raises(InputError, match=r"holds no \*\.safetensors"):
        engine.update_weights(str(tmp_path / "config"))


def test_no_second_copy_of_the_model_is_ever_there(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 2000}
    folder = save_config(case("llama-gqa"), tmp_path, **sizes)
    model = read_model(folder)
    with PeakMemory() as peak:
        checkpoint = DummyCheckpoint(folder, seed=0, device=CPU)
        made = load_dummy(model, checkpoint, plan(model, checkpoint, Policy("mxfp8"), kernels()), kernels())
    if peak.growth is None:
        pytest.skip("this system does not tell private memory")
    # Beside the model: the table and its forms, one tensor on its way, and the rest of a slab. All of it in bf16 is 82 MB more.
    assert made.bytes_before > 80e6
    assert made.bytes_after * 0.9 < peak.growth < made.bytes_after + 36e6


def test_every_tensor_has_a_role_and_heads_that_are_tied_have_none_of_their_own(tmp_path: Path) -> None:
    checkpoint = DummyCheckpoint(config_alone("llama-tied", tmp_path), seed=0, device=CPU)
    assert "lm_head.weight" not in checkpoint.tensors
    assert checkpoint._roles.keys() == checkpoint.tensors.keys()
    assert checkpoint._roles["model.embed_tokens.weight"] is Role.EMBEDDING
