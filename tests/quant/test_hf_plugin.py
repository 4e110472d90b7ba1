"""The quantizer for transformers: the bits, the policy and the files of Eightfold, and its logits to 1e-4."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from eightfold.errors import CheckpointError, InputError
from eightfold.evaluate import checkpoint_logits
from eightfold.kernels.hardware import detect
from eightfold.kernels.selection import Kernels
from eightfold.models.loader import read_tensors
from eightfold.quant.fp8 import widen
from eightfold.quant.hf_plugin import Mxfp8Config, stored_config
from eightfold.quant.mxfp8 import MXTensor, ScaleRule
from eightfold.quant.policy import Policy
from eightfold.quantize import quantize_checkpoint
from tests.models.checkpoints import SIZES, VOCAB_SIZE, Case, case, random_prompt, reference_logits, save_checkpoint
from tests.models.quantized import edit_config, rewrite, to_fp8, to_mxfp8
from tests.models.test_stored import load_all, same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MXFP8 = Policy("mxfp8")
PROMPT = random_prompt(40)
# K of 80 and 100; a tied head; biases; and for experts K of 40, 58 and 24, with gates and without, and a latent space.
NAMES = (
    "llama-odd-80",
    "llama-tied",
    "llama-attention-bias",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "olmoe",
    "nemotron-mixed",
    "nemotron-latent",
    "granite-hybrid",
)
# Every K is a multiple of 32, so that others can read it.
_WHOLE: dict[str, Any] = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
WHOLE = Case("mixtral-whole", lambda: MixtralConfig(**_WHOLE))


def loaded(folder: Path, *, dtype: torch.dtype = FP32, **options: Any) -> Any:
    """A folder through the plugin: quantized as it loads, unless `config` says that it is quantized already."""
    if "config" not in options:
        options = {"quantization_config": Mxfp8Config()} | options
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", **options
    )


def stored(folder: Path, **options: Any) -> Any:
    return loaded(folder, config=stored_config(folder), **options)


def our_logits(folder: Path, policy: Policy = MXFP8, rule: ScaleRule = ScaleRule.CEIL) -> Tensor:
    return checkpoint_logits(folder, Kernels(detect("cpu"), FP32), policy=policy, rule=rule)(PROMPT)


def differing(saved: Path, source: Path, policy: Policy = MXFP8) -> list[str]:
    """Weights of a saved folder, as Eightfold reads it, that are not those of its own online path."""
    found, expected = load_all(saved)[2], load_all(source, policy)[2]
    assert found.keys() == expected.keys()
    return [name for name in expected if not same(found[name], expected[name])]


def quantized(model: Any) -> list[str]:
    """Names of the layers that are in MXFP8."""
    return [name.rpartition(".")[0] for name, value in model.named_parameters() if value.dtype == torch.float8_e4m3fn]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_ours_and_what_is_saved_has_our_bits(name: str, tmp_path: Path) -> None:
    source = save_checkpoint(case(name), tmp_path / "source", dtype=BF16)
    model = loaded(source)
    logits = reference_logits(model, PROMPT)
    torch.testing.assert_close(logits, our_logits(source), rtol=0, atol=1e-4)
    plain: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype=FP32, attn_implementation="eager", experts_implementation="eager"
    )
    assert (reference_logits(plain, PROMPT) - logits).abs().max() > 1e-2
    model.save_pretrained(tmp_path / "saved")
    assert differing(tmp_path / "saved", source) == []
    torch.testing.assert_close(our_logits(tmp_path / "saved", Policy(None)), logits, rtol=0, atol=1e-4)
    again = stored(tmp_path / "saved")
    assert quantized(again) == quantized(model)
    assert torch.equal(reference_logits(again, PROMPT), logits)
    again.save_pretrained(tmp_path / "again")
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("saved", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key].view(torch.uint8), second[key].view(torch.uint8)) for key in first if first[key].ndim)


def test_the_example_in_the_documentation_with_the_real_model(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/checkpoints.md").read_text(encoding="utf-8")
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "hf_plugin" in block)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example, names)
    assert len(quantized(names["model"])) == len(quantized(names["again"])) == 30 * 7
    assert names["again"].dtype == BF16
    assert differing(tmp_path / "smollm2-hf", smollm2_path) == []
    assert (tmp_path / "smollm2-hf/tokenizer.json").exists()
    prompt = list(range(1000, 1024))
    with torch.inference_mode():
        logits = stored(tmp_path / "smollm2-hf")(torch.tensor([prompt])).logits[0]
    ours = checkpoint_logits(smollm2_path, Kernels(detect("cpu"), FP32), policy=MXFP8)(prompt)
    torch.testing.assert_close(logits, ours, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-odd-80", "nemotron-mixed"])
def test_a_folder_that_eightfold_wrote(name: str, tmp_path: Path) -> None:
    source = save_checkpoint(case(name), tmp_path / "source", dtype=BF16)
    quantize_checkpoint(str(source), tmp_path / "out", dialect="native", ignore=("layers.1",))
    model = stored(tmp_path / "out")
    torch.testing.assert_close(
        reference_logits(model, PROMPT), our_logits(source, Policy("mxfp8", ("layers.1",))), rtol=0, atol=1e-4
    )
    assert not any(".layers.1." in layer for layer in quantized(model))


@pytest.mark.parametrize("item", [case("llama-gqa"), WHOLE], ids=lambda item: item.name)
def test_plain_transformers_reads_it_where_shapes_permit(item: Case, tmp_path: Path) -> None:
    source = save_checkpoint(item, tmp_path / "source", dtype=BF16)
    loaded(source, quantization_config=Mxfp8Config(ignored_layers=["layers.1"])).save_pretrained(tmp_path / "saved")
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=FP32, attn_implementation="eager", experts_implementation="eager"
    )
    assert quantized(model) == []  # their reader has widened it
    logits = our_logits(source, Policy("mxfp8", ("layers.1",)))
    torch.testing.assert_close(reference_logits(model, PROMPT), logits, rtol=0, atol=1e-4)


def test_transformers_own_quantizer_stays() -> None:
    assert AUTO_QUANTIZER_MAPPING["mxfp8"] is FineGrainedFP8HfQuantizer
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["mxfp8"] is FineGrainedFP8Config


def test_importing_eightfold_does_not_import_the_plugin() -> None:
    code = "import sys, eightfold.llm, eightfold.quantize; print('eightfold.quant.hf_plugin' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("llama-gqa", ("layers.1", "down_proj")),
        ("llama-gqa", ("model.layers.0.self_attn",)),
        ("nemotron-mixed", ("backbone.layers.1", "shared_experts")),
        ("nemotron-latent", ("mixer.experts", "fc1_latent_proj", "in_proj")),
        ("mixtral", ("block_sparse_moe",)),
    ],
)
def test_ignored_layers_are_those_of_our_policy(name: str, ignored: tuple[str, ...], tmp_path: Path) -> None:
    source = save_checkpoint(case(name), tmp_path / "source", dtype=BF16)
    policy = Policy("mxfp8", ignored)
    model = loaded(source, quantization_config=Mxfp8Config("floor", list(ignored)))
    torch.testing.assert_close(reference_logits(model, PROMPT), our_logits(source, policy, ScaleRule.FLOOR), rtol=0, atol=1e-4)
    ceil = loaded(source, quantization_config=Mxfp8Config(ignored_layers=ignored))
    ceil.save_pretrained(tmp_path / "saved")
    assert differing(tmp_path / "saved", source, policy) == []
    assert quantized(stored(tmp_path / "saved")) == quantized(model) == quantized(ceil) != []


@pytest.mark.parametrize(
    ("name", "ignored", "same_as"),
    [("nemotron-mixed", "model.layers.1", "backbone.layers.1"), ("mixtral", "mlp.experts", "block_sparse_moe")],
)
def test_names_as_in_the_model_do_as_well(name: str, ignored: str, same_as: str, tmp_path: Path) -> None:
    source = save_checkpoint(case(name), tmp_path / "source", dtype=BF16)
    loaded(source, quantization_config=Mxfp8Config(ignored_layers=[ignored])).save_pretrained(tmp_path / "saved")
    assert differing(tmp_path / "saved", source, Policy("mxfp8", (same_as,))) == []


def test_what_is_never_quantized(tmp_path: Path) -> None:
    source = save_checkpoint(case("nemotron-mixed"), tmp_path / "source", dtype=BF16)
    model = loaded(source)
    kept = [name for name, value in model.named_parameters() if value.dtype == FP32]
    for word in ("lm_head", "embeddings", "norm", "gate.weight", "conv1d", "A_log", "dt_bias", ".D"):
        assert any(word in name for name in kept), word
    assert not any("_proj" in name and not name.endswith("bias") for name in kept)
    tied = loaded(save_checkpoint(case("llama-tied"), tmp_path / "tied", dtype=BF16))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(tmp_path / "tied/model.safetensors")
    shared = loaded(save_checkpoint(case("qwen2-moe"), tmp_path / "shared", dtype=BF16))
    assert shared.model.layers[1].mlp.shared_expert_gate.weight.dtype == FP32


@pytest.mark.parametrize("name", ["llama-odd-80", "nemotron-mixed"])
@pytest.mark.parametrize("file_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_weights_are_rounded_once_whatever_the_dtypes(
    name: str, file_dtype: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    source = save_checkpoint(case(name), tmp_path / "source", dtype=file_dtype)
    model = loaded(source, dtype=dtype)
    assert model.dtype == model.lm_head.weight.dtype == dtype
    logits = reference_logits(model, PROMPT)
    assert bool(logits.isfinite().all())
    model.save_pretrained(tmp_path / "saved")
    expected = load_all(source, MXFP8)[2]
    found = load_all(tmp_path / "saved")[2]
    elements = [key for key, value in expected.items() if isinstance(value, MXTensor)]
    assert [key for key in elements if not same(found[key], expected[key])] == []
    assert len(elements) >= 10
    assert torch.equal(reference_logits(stored(tmp_path / "saved", dtype=dtype), PROMPT), logits)


def test_the_weights_take_half_the_memory(tmp_path: Path) -> None:
    sizes: dict[str, Any] = SIZES | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    wide = Case("wide", lambda: LlamaConfig(**sizes))
    source = save_checkpoint(wide, tmp_path / "source", dtype=BF16)
    plain: Any = AutoModelForCausalLM.from_pretrained(source, dtype=BF16)
    model = loaded(source, dtype=BF16)
    before, after = (sum(value.untyped_storage().nbytes() for value in item.parameters()) for item in (plain, model))
    rest = sum(value.nbytes for name, value in plain.named_parameters() if "_proj" not in name)
    assert after - rest == (before - rest) * 33 // 64
    assert after < 0.6 * before
    model.save_pretrained(tmp_path / "saved")
    on_disk = [(folder / "model.safetensors").stat().st_size for folder in (source, tmp_path / "saved")]
    assert on_disk[1] < 0.6 * on_disk[0]


@pytest.mark.parametrize("name", ["llama-odd-80", "mixtral", "nemotron-mixed"])
def test_generate(name: str, tmp_path: Path) -> None:
    model = loaded(save_checkpoint(case(name), tmp_path, dtype=BF16))
    made = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False, eos_token_id=VOCAB_SIZE, pad_token_id=0)
    tokens = made[0].tolist()
    assert len(tokens) == len(PROMPT) + 6
    for length in range(len(PROMPT), len(tokens)):
        logits = reference_logits(model, tokens[:length])[-1]
        assert float(logits.max() - logits[tokens[length]]) < 1e-4


def test_a_model_that_was_cast_is_saved_with_the_same_bits(tmp_path: Path) -> None:
    source = save_checkpoint(case("mixtral"), tmp_path / "source", dtype=BF16)
    loaded(source).to(BF16).save_pretrained(tmp_path / "saved")
    assert differing(tmp_path / "saved", source) == []


@pytest.mark.parametrize("fused", [False, True])
def test_experts_as_one_tensor_in_files(fused: bool, tmp_path: Path) -> None:
    source = save_checkpoint(case("mixtral"), tmp_path / "source", dtype=BF16, fused=fused)
    model = loaded(source)
    model.save_pretrained(tmp_path / "saved", save_original_format=not fused)
    names = load_file(tmp_path / "saved/model.safetensors")
    assert any(name.endswith("experts.gate_up_proj_scale_inv") for name in names) == fused
    assert torch.equal(reference_logits(stored(tmp_path / "saved"), PROMPT), reference_logits(model, PROMPT))
    assert differing(tmp_path / "saved", source) == []


def test_scales_of_the_type_e8m0(tmp_path: Path) -> None:
    source = save_checkpoint(case("mixtral"), tmp_path / "source", dtype=BF16)
    to_mxfp8(save_checkpoint(case("mixtral"), tmp_path / "stored", dtype=BF16), "native-e8m0", ("lm_head", "gate"))
    model = stored(tmp_path / "stored")
    torch.testing.assert_close(reference_logits(model, PROMPT), our_logits(source), rtol=0, atol=1e-4)


def test_one_configuration_serves_several_models(tmp_path: Path) -> None:
    config = Mxfp8Config()
    models = {}
    for name in ("llama-gqa", "nemotron-mixed"):
        save_checkpoint(case(name), tmp_path / name, dtype=BF16)
        models[name] = loaded(tmp_path / name, quantization_config=config)
    for name, model in models.items():
        model.save_pretrained(tmp_path / f"{name}-saved", max_shard_size="30KB")
        assert len(list((tmp_path / f"{name}-saved").glob("*.safetensors"))) > 2
        assert differing(tmp_path / f"{name}-saved", tmp_path / name) == []
    inner = json.loads((tmp_path / "llama-gqa-saved/config.json").read_text())["quantization_config"]
    assert inner["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]


def test_what_config_json_says(tmp_path: Path) -> None:
    source = save_checkpoint(case("nemotron-mixed"), tmp_path / "source", dtype=BF16)
    loaded(source, quantization_config=Mxfp8Config(ignored_layers=["layers.2"])).save_pretrained(tmp_path / "saved")
    inner = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    kept = inner.pop("modules_to_not_convert")
    expected = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
    assert inner == expected
    for name in ("lm_head", "backbone.embeddings", "backbone.layers.1.mixer.gate", "backbone.layers.2.mixer.o_proj"):
        assert name in kept
    assert not any("layers.1.mixer.experts" in name for name in kept)
    values = {name for name, value in read_tensors(tmp_path / "saved") if isinstance(value, Tensor)}
    assert "backbone.layers.2.mixer.o_proj.weight" in values


def _planted(name: str, value: Tensor | None) -> Callable[[dict[str, Tensor]], Any]:
    """A change of a checkpoint's tensors: one replaced, or taken out."""
    return (lambda tensors: tensors.pop(name)) if value is None else (lambda tensors: tensors.update({name: value}))


UP, SCALE = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight_scale_inv"


def test_a_weight_that_is_not_finite_or_not_there_is_named(tmp_path: Path) -> None:
    source = save_checkpoint(case("llama-gqa"), tmp_path, dtype=BF16)
    rewrite(source, lambda tensors: tensors[UP].__setitem__((3, 5), float("nan")))
    with pytest.raises(CheckpointError, match=rf"tensor {UP}: got .*nan at index \[3, 5\]; expected finite values"):
        loaded(source)
    rewrite(save_checkpoint(case("llama-gqa"), tmp_path / "cut", dtype=BF16), _planted(UP, None))
    with pytest.raises(CheckpointError, match=rf"tensor {UP}: got none"):
        loaded(tmp_path / "cut")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (SCALE, None, rf"tensor {SCALE}: got none; expected elements, scales"),
        (SCALE, torch.full((96, 2), 255, dtype=torch.uint8), rf"tensor {SCALE}: got NaN, the byte 255"),
        (UP, None, rf"tensor {UP}: got none; expected elements, scales"),
    ],
)
def test_stored_weights_that_are_wrong_are_named(name: str, value: Any, message: str, tmp_path: Path) -> None:
    save_checkpoint(case("llama-gqa"), tmp_path / "source", dtype=BF16)
    folder = tmp_path / "out"
    quantize_checkpoint(str(tmp_path / "source"), folder, dialect="native")
    rewrite(folder, _planted(name, value))
    with pytest.raises(CheckpointError, match=message):
        stored(folder)


def test_elements_where_config_json_promises_values(tmp_path: Path) -> None:
    save_checkpoint(case("llama-gqa"), tmp_path / "source", dtype=BF16)
    quantize_checkpoint(str(tmp_path / "source"), tmp_path / "out", dialect="native")
    config = json.loads((tmp_path / "out/config.json").read_text())
    inner = config.pop("quantization_config")
    edit_config(tmp_path / "out", quantization_config=inner | {"modules_to_not_convert": ["lm_head", "layers.1.mlp"]})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.gate_proj\.weight: got F8_E4M3; expected values"):
        stored(tmp_path / "out")
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj\.weight: got F8_E4M3; expected values"):
        loaded(tmp_path / "out")


def test_folders_that_are_no_native_mxfp8(tmp_path: Path) -> None:
    source = save_checkpoint(case("llama-gqa"), tmp_path / "source", dtype=BF16)
    with pytest.raises(CheckpointError, match=r"got no quantization; expected MXFP8 in the native dialect.*Mxfp8Config\(\)"):
        stored_config(source)
    quantize_checkpoint(str(source), tmp_path / "other", dialect="compressed-tensors")
    with pytest.raises(CheckpointError, match=r"got compressed-tensors, mxfp8; expected MXFP8 in the native dialect"):
        stored_config(tmp_path / "other")
    quantize_checkpoint(str(source), tmp_path / "native", dialect="native")
    with pytest.raises(ValueError, match="quantized with FineGrainedFP8Config but you are passing a Mxfp8Config"):
        loaded(tmp_path / "native")
    with pytest.raises(CheckpointError, match="got native, fp8"):
        stored_config(to_fp8(save_checkpoint(case("llama-gqa"), tmp_path / "fp8"), "block"))


def test_arguments_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rule: got nearest; expected one of: ceil, floor"):
        Mxfp8Config("nearest")
    bad: list[Any] = ["down_proj", [""], [3], None]
    for names in bad:
        with pytest.raises(InputError, match=r"ignored_layers: got .*; expected a list of names"):
            Mxfp8Config(ignored_layers=names)
    source = save_checkpoint(case("qwen3-moe"), tmp_path, dtype=BF16)
    wrong = {
        "fc10": "fc10, which matches no layer; expected names such as model.layers.0.self_attn.q_proj",
        "q_proj": "self_attn.q_proj without .*k_proj.*; expected all parts or none of them",
        "experts.0": "mlp.experts.0.gate_proj.* without .*experts.1.gate_proj",
    }
    for name, message in wrong.items():
        with pytest.raises(InputError, match=f"quantization_ignored_layers: got .*{message}"):
            loaded(source, quantization_config=Mxfp8Config(ignored_layers=[name]))


def _saved(config: PreTrainedConfig, folder: Path) -> Path:
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


def test_models_that_have_what_we_do_not_know(tmp_path: Path) -> None:
    tiny: dict[str, Any] = SIZES | {"num_hidden_layers": 1, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    source = _saved(GptOssConfig(**tiny), tmp_path / "gpt-oss")
    with pytest.raises(InputError, match=r"layer model\.layers\.0\.mlp\.experts: got GptOssExperts with .*ignored_layers="):
        loaded(source)
    model = loaded(source, quantization_config=Mxfp8Config(ignored_layers=["mlp.experts"]))
    assert len(quantized(model)) == 4
    assert bool(reference_logits(model, PROMPT).isfinite().all())
    gpt2 = _saved(GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2), tmp_path / "gpt2")
    with pytest.raises(InputError, match="model: got GPT2LMHeadModel; expected one with layers of the class Linear"):
        loaded(gpt2)


def test_widened_values_are_ours(tmp_path: Path) -> None:
    source = save_checkpoint(case("llama-odd-80"), tmp_path / "source", dtype=BF16)
    model = loaded(source)
    ours = load_all(source, MXFP8)[2]
    up = model.model.layers[0].mlp.up_proj
    gate_up = ours["model.layers.0.mlp.gate_up_proj.weight"]
    assert torch.equal(up.values("weight", FP32), widen(gate_up)[100:])
