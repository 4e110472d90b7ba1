"""Tiny random checkpoints, one for each family and feature, made and saved by transformers.

Weights are scaled so that logits discriminate: norms are far from 1, biases far from 0, and matrices are large enough for
attention to be peaked. Configurations are small enough that every sequence of 64 tokens passes windows and rope scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

VOCAB_SIZE = 97
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LENGTH = 64
"""Tokens of the longest sequence that tests run."""


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint.

    Attributes:
        name: for test ids.
        make_config: the configuration, fresh at each call, since models write into theirs.
    """

    name: str
    make_config: Callable[[], PreTrainedConfig]


def _case(name: str, config_class: type[PreTrainedConfig], **changes: Any) -> Case:
    return Case(name, lambda: config_class(**(SIZES | changes)))


def _rope(rope_type: str, *, theta: float = 10_000.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **parameters}


CASES: tuple[Case, ...] = (
    _case("llama-gqa", LlamaConfig),
    _case("llama-mha", LlamaConfig, num_key_value_heads=4),
    _case("llama-one-kv-head", LlamaConfig, num_key_value_heads=1),
    _case("llama-tied", LlamaConfig, tie_word_embeddings=True),
    _case("llama-attention-bias", LlamaConfig, attention_bias=True),
    _case("llama-mlp-bias", LlamaConfig, mlp_bias=True),
    _case("llama-wide-heads", LlamaConfig, head_dim=24),
    _case("llama-linear", LlamaConfig, rope_parameters=_rope("linear", factor=4.0)),
    _case(
        "llama-llama3",
        LlamaConfig,
        rope_parameters=_rope(
            "llama3",
            theta=500.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    _case(
        "llama-yarn", LlamaConfig, rope_parameters=_rope("yarn", theta=500.0, factor=4.0, original_max_position_embeddings=32)
    ),
    # Its original length is shorter than LENGTH: within it nothing is scaled, and a table for LENGTH is.
    _case("llama-dynamic", LlamaConfig, max_position_embeddings=32, rope_parameters=_rope("dynamic", factor=4.0)),
    _case("llama-odd-48", LlamaConfig, hidden_size=48, intermediate_size=100, num_attention_heads=3, num_key_value_heads=3),
    _case("llama-odd-80", LlamaConfig, hidden_size=80, intermediate_size=100, num_attention_heads=5, num_key_value_heads=1),
    _case("mistral-window", MistralConfig, sliding_window=8),
    _case("mistral-no-window", MistralConfig, sliding_window=None, head_dim=32),
    _case("qwen2", Qwen2Config),
    _case("qwen2-late-window", Qwen2Config, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    _case("qwen3", Qwen3Config, head_dim=24, tie_word_embeddings=True),
    _case(
        "qwen3-layer-types",
        Qwen3Config,
        head_dim=16,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    _case("smollm3", SmolLM3Config, no_rope_layers=[1, 0, 1], num_hidden_layers=3),
    _case(
        "smollm3-window",
        SmolLM3Config,
        num_hidden_layers=4,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=8,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
)


def case(name: str) -> Case:
    """The case of this name."""
    return next(item for item in CASES if item.name == name)


def save_checkpoint(
    item: Case, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", seed: int = 0
) -> Path:
    """Make the model of a case with seeded weights in `dtype`, and save it; `max_shard_size` such as "20KB" splits the file."""
    model: Any = AutoModelForCausalLM.from_config(item.make_config())  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter, generator))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def reference_model(folder: Path) -> PreTrainedModel:
    """The same checkpoint in transformers: fp32 arithmetic whatever the files hold, and attention written out."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    reference: PreTrainedModel = model.eval()
    return reference


def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Logits `[T, vocab_size]` of every position of one prompt, in one forward pass without a cache."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits
    return logits[0]


def random_prompt(length: int, *, seed: int = 0) -> list[int]:
    """Token ids of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
    return token_ids


def _random(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    noise: Tensor = torch.randn(parameter.shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1.0 + 0.3 * noise
    if name.endswith(".bias"):
        return 0.5 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return 0.25 * noise
    return noise * (1.5 / math.sqrt(parameter.shape[-1]))
