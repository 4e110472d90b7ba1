"""Checkpoints that are quantized already, written by hand from the public layout of each dialect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eightfold.quant.mxfp8 import quantize

Dialect = Literal["native", "native-e8m0", "modelopt", "modelopt-file", "compressed-tensors"]
DIALECTS: tuple[Dialect, ...] = ("native", "native-e8m0", "modelopt", "modelopt-file", "compressed-tensors")
KEPT = ("norm", "embed", "lm_head", "conv1d", "bias", "A_log", ".D", ".gate.", "shared_expert_gate")
Tensors = dict[str, Tensor]


def is_quantized(name: str) -> bool:
    return not any(word in name for word in KEPT)


def edit_config(folder: Path, file: str = "config.json", **changes: Any) -> None:
    path = folder / file
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | changes))


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def to_mxfp8(folder: Path, dialect: Dialect, excluded: tuple[str, ...] = ("lm_head",)) -> Path:
    """Quantize a checkpoint of one file in place."""
    suffix = "_scale_inv" if dialect.startswith("native") else "_scale"

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if is_quantized(name) and not any(word in name for word in excluded)]:
            mx = quantize(tensors[name])
            tensors[name] = mx.data
            tensors[name + suffix] = mx.scale.view(torch.float8_e8m0fnu) if dialect == "native-e8m0" else mx.scale

    rewrite(folder, change)
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": weights | {"dynamic": True}}
    listed = list(excluded)
    match dialect:
        case "native" | "native-e8m0":
            inner: Any = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "modules_to_not_convert": listed}
        case "modelopt":
            inner = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": [f"*{item}*" for item in listed]}
        case "compressed-tensors":
            inner = {
                "quant_method": "compressed-tensors",
                "format": "mxfp8-quantized",
                "config_groups": {"group_0": group},
                "ignore": [f"re:.*{item}" for item in listed],
            }
        case "modelopt-file":
            algorithms = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "group_size": 32, "exclude_modules": listed}
            edit_config(folder, "hf_quant_config.json", producer={"name": "modelopt"}, quantization=algorithms)
            return folder
    edit_config(folder, quantization_config=inner)
    return folder


def to_fp8(folder: Path, kind: Literal["tensor", "channel", "block"], *, static: bool = False, size: int = 48) -> Path:
    """Quantize a checkpoint of one file in place to FP8 that is not MX; blocks are `size` x `size`."""

    def change(tensors: Tensors) -> None:
        for number, name in enumerate([name for name in tensors if is_quantized(name)]):
            w = tensors[name].float()
            n, k = w.shape
            if kind == "block":
                padded = torch.nn.functional.pad(w, (0, -k % size, 0, -n % size))
                blocks = padded.unflatten(1, (-1, size)).unflatten(0, (-1, size))  # [n / size, size, k / size, size]
                scale = blocks.abs().amax(dim=(1, 3)) / 448
                by_row = scale.repeat_interleave(size, 0)[:n].repeat_interleave(size, 1)[:, :k]
                tensors[name + "_scale_inv"] = scale
            else:
                scale = w.abs().amax() / 448 if kind == "tensor" else w.abs().amax(dim=1, keepdim=True) / 448
                by_row = scale
                tensors[name + "_scale"] = scale
            tensors[name] = (w / by_row).to(torch.float8_e4m3fn)
            if static:
                tensors[name.removesuffix(".weight") + ".input_scale"] = torch.tensor(0.01 * (number + 1))

    rewrite(folder, change)
    scheme = "static" if static else "dynamic"
    inner: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]}
    edit_config(folder, quantization_config=inner | ({"weight_block_size": [size, size]} if kind == "block" else {}))
    return folder


def widened(folder: Path) -> Tensors:
    """The values of a checkpoint that `to_fp8` made, by the formula `elements * scale`, written out anew."""
    tensors = load_file(folder / "model.safetensors")
    values: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
            if scale is None:
                raise KeyError(name)
            if name + "_scale_inv" in tensors:
                size = json.loads((folder / "config.json").read_text())["quantization_config"]["weight_block_size"][0]
                scale = scale.repeat_interleave(size, 0)[: tensor.shape[0]].repeat_interleave(size, 1)[:, : tensor.shape[1]]
            values[name] = tensor.float() * scale
    return values
