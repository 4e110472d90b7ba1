"""A mixture of experts that talks sense, made from a dense model: every expert is the model's own MLP, a little disturbed.

There is no small trained mixture at hand. In this one the router is random, so every expert is used, and since experts differ
little any choice of them gives text; a wrong weight, row or expert does not.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eightfold.errors import InputError
from eightfold.models.checkpoint import Checkpoint, read_json

NOISE = 0.1
"""Standard deviation of the disturbance, in units of that of the weight."""


def write_mixture(source: Path, folder: Path, *, num_experts: int, top_k: int = 2) -> Path:
    """Write a Mixtral checkpoint whose experts are the MLPs of a Llama one, each with its own noise.

    Args:
        source: folder of a checkpoint of `model_type` llama.
        folder: where to; it is made.
        num_experts: experts of each layer.
        top_k: experts of a token.

    Raises:
        InputError: the source is of another type.
    """
    config = read_json(source / "config.json")
    if config.get("model_type") != "llama":
        raise InputError("model", got=f"model_type {config.get('model_type')}", expected="llama, to make a Mixtral of")
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(_mixtral(config, num_experts, top_k)), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for info, tensor in Checkpoint(source).read():
        layer, is_mlp, part = info.name.partition(".mlp.")
        if not is_mlp:
            tensors[info.name] = tensor.clone()
            continue
        for expert in range(num_experts):
            noise = torch.randn(tensor.shape, generator=generator) * float(tensor.float().std()) * NOISE
            tensors[f"{layer}.block_sparse_moe.experts.{expert}.{_MIXTRAL_PART[part]}"] = (tensor.float() + noise).to(
                tensor.dtype
            )
        gate = f"{layer}.block_sparse_moe.gate.weight"
        if gate not in tensors:
            width = int(config["hidden_size"])
            tensors[gate] = (torch.randn(num_experts, width, generator=generator) / width**0.5).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


_MIXTRAL_PART = {"gate_proj.weight": "w1.weight", "down_proj.weight": "w2.weight", "up_proj.weight": "w3.weight"}


def _mixtral(config: dict[str, Any], num_experts: int, top_k: int) -> dict[str, Any]:
    changes = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "sliding_window": None}
    return config | changes | {"num_local_experts": num_experts, "num_experts_per_tok": top_k}
