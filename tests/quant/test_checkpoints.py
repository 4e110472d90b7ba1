"""Configurations of quantized checkpoints: what each says, and what is refused by key or by layer."""

from __future__ import annotations

from typing import Any

import pytest

from eightfold.errors import CheckpointError
from eightfold.quant.checkpoints import MXFP8, Dialect, Scheme, Serialized, read_serialized, written_configuration

LAYER = "model.layers.1.mlp.up_proj"
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


def compressed(weights: Any, *, inputs: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "format": "float-quantized", **more}


def read(inner: Any, file: Any = None) -> Serialized:
    found = read_serialized({"quantization_config": inner}, file)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("inner", "scheme"),
    [
        ({"quant_method": "mxfp8"}, MXFP8),
        ({"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, MXFP8),
        ({"quant_method": "fp8", "weight_block_size": [1, 32]}, Scheme("fp8", "block", (1, 32))),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Scheme("fp8", "block", (128, 128))),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Scheme("fp8", "row", static=True)),
        ({"quant_method": "fbgemm_fp8"}, Scheme("fp8", "channel")),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, Scheme("fp8", "tensor", static=True)),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "mxfp8"}}, MXFP8),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, Scheme("fp8", "block", (128, 128))),
        (compressed(WEIGHTS), MXFP8),
        (compressed(WEIGHTS | {"strategy": "channel"}, inputs={"dynamic": True}), Scheme("fp8", "channel")),
        (compressed(WEIGHTS | {"strategy": "tensor"}, inputs={"dynamic": False}), Scheme("fp8", "tensor", static=True)),
        (compressed(WEIGHTS | {"strategy": "block", "block_structure": [64, 32]}), Scheme("fp8", "block", (64, 32))),
    ],
)
def test_schemes(inner: Any, scheme: Scheme) -> None:
    assert read(inner).scheme_of([LAYER]) == scheme


@pytest.mark.parametrize(
    ("pattern", "layer", "excluded"),
    [
        ("mlp", LAYER, True),
        ("mlp.up", LAYER, False),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("model.layers.1*", "model.layers.10.mlp.up_proj", True),
        ("*up_proj", LAYER, True),
        ("re:.*mlp\\.(up|gate)_proj$", LAYER, True),
        ("re:mlp", LAYER, False),
    ],
)
def test_patterns_of_layers(pattern: str, layer: str, excluded: bool) -> None:
    found = read({"quant_method": "mxfp8", "ignored_layers": [pattern]})
    assert (found.excluding([layer]) == pattern) is excluded
    assert (found.scheme_of([layer]) is None) is excluded


def test_the_file_of_modelopt_speaks_where_config_json_is_silent() -> None:
    file = {"quantization": {"quant_algo": "MXFP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    found = read_serialized({}, file)
    assert found is not None
    assert (found.source, found.kv_cache, found.excluded) == ("hf_quant_config.json", "fp8", ("lm_head",))
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: got mxfp8; expected fp8, as the quantization_config"):
        read({"quant_method": "modelopt", "quant_algo": "FP8"}, file)
    assert read_serialized({}, None) is None
    assert read_serialized({}, {"quantization": {"quant_algo": None}}) is None


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ("gptq", "quantization_config: got quant_method gptq; expected one of: mxfp8, fp8"),
        ({"quant_method": "awq"}, "got quant_method awq; .* Serve the checkpoint that this one was made from"),
        ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, r"mxfp8 with weight_block_size \[128, 128\]"),
        ({"quant_method": "mxfp8", "activation_scheme": "static"}, "static activations; expected blocks of"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size: got 128; expected two whole numbers"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme: got none; expected one of: dynamic, static"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype: got fp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo: got quant_algo NVFP4; expected one of: MXFP8, FP8"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers: got None"),
        ({"quant_method": "compressed-tensors"}, "config_groups: got None"),
        (compressed(WEIGHTS | {"num_bits": 4}), "config_groups.g: got weights of 4 bits, type float"),
        (compressed(WEIGHTS | {"group_size": 16}), "config_groups.g.weights: got strategy group, group_size 16"),
        (compressed(WEIGHTS, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: got sparse-24-bitmask"),
        (compressed(WEIGHTS, ignore="lm_head"), "ignore: got lm_head; expected a list of names"),
        (compressed(WEIGHTS, ignore=["re:("]), r"ignore: got re:\( .*; expected a pattern"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(inner: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(inner)


@pytest.mark.parametrize("dialect", ["native", "modelopt", "compressed-tensors"])
def test_what_is_written_is_read_again(dialect: Dialect) -> None:
    inner, file = written_configuration(dialect, ["lm_head", "model.layers.0.mlp.gate"])
    for found in (read(inner, file), *([] if file is None else [read_serialized({}, file)])):
        assert found is not None
        assert (found.dialect, found.algorithms) == (dialect, ("mxfp8",))
        assert found.scheme_of([LAYER]) == MXFP8
        assert found.scheme_of(["lm_head"]) is None
        assert found.scheme_of(["model.layers.0.mlp.gate_proj"]) == MXFP8
