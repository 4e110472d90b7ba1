"""Tiny random checkpoints, one for each family and feature, made and saved by transformers.

Weights are scaled so that logits discriminate: norms are far from 1, biases far from 0, and matrices are large enough for
attention to be peaked. Configurations are small enough that every sequence of 64 tokens passes windows and rope scaling.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
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


DECODER_CASES: tuple[Case, ...] = (
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
    # Widths that are no multiple of 32, and layers with and without experts.
    _case("mixtral", MixtralConfig, intermediate_size=40, num_local_experts=5, num_experts_per_tok=2),
    _case("mixtral-window", MixtralConfig, intermediate_size=33, num_local_experts=4, sliding_window=8),
    _case(
        "qwen2-moe",
        Qwen2MoeConfig,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=56,
        num_experts=6,
        num_experts_per_tok=3,
        decoder_sparse_step=2,
        num_hidden_layers=4,
    ),
    _case(
        "qwen3-moe",
        Qwen3MoeConfig,
        head_dim=24,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    _case("olmoe", OlmoeConfig, intermediate_size=40, num_experts=7, num_experts_per_tok=3),
)

NEMOTRON_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 90,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 20,
    "n_groups": 4,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 58,
    "moe_shared_expert_intermediate_size": 70,
    "routed_scaling_factor": 2.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def _nemotron(name: str, pattern: str, **changes: Any) -> Case:
    words = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    layers = [words[letter] for letter in pattern]
    return Case(name, lambda: NemotronHConfig(**(NEMOTRON_SIZES | {"layers_block_type": layers} | changes)))


NEMOTRON_CASES: tuple[Case, ...] = (
    _nemotron("nemotron-mamba", "MMM"),
    _nemotron("nemotron-attention", "***", attention_bias=False),
    _nemotron("nemotron-mlp", "M-M-", mlp_bias=True),
    _nemotron("nemotron-moe", "EEE"),
    _nemotron("nemotron-mixed", "ME*-ME"),
    _nemotron("nemotron-one-group", "ME*E", n_groups=1, n_group=1),
    _nemotron("nemotron-expert-groups", "ME*E", n_group=4, topk_group=2, num_experts_per_tok=2),
    _nemotron("nemotron-latent", "ME*E", moe_latent_size=40, mlp_bias=True),
    _nemotron("nemotron-biases", "M*-E", use_bias=True, use_conv_bias=True, conv_kernel=3),
    _nemotron("nemotron-plain", "M*E", use_conv_bias=False, norm_topk_prob=False),
)

_GRANITE = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 56,
    "intermediate_size": 40,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
    "logits_scaling": 1.25,
}
HYBRID_CASES: tuple[Case, ...] = (
    *NEMOTRON_CASES,
    _case("granite-hybrid", GraniteMoeHybridConfig, **_GRANITE, mamba_conv_bias=True),
    _case("granite-hybrid-rope", GraniteMoeHybridConfig, **_GRANITE, position_embedding_type="rope", attention_bias=True),
    _case("granite-hybrid-dense", GraniteMoeHybridConfig, **(_GRANITE | {"num_local_experts": 0}), tie_word_embeddings=True),
)

CASES = DECODER_CASES + HYBRID_CASES


def case(name: str) -> Case:
    """The case of this name."""
    return next(item for item in CASES if item.name == name)


def save_checkpoint(
    item: Case,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    seed: int = 0,
    fused: bool = False,
) -> Path:
    """Make the model of a case with seeded weights in `dtype`, and save it.

    Args:
        item: the case.
        folder: where to.
        dtype: of the weights.
        max_shard_size: such as "20KB", which splits the file.
        seed: of the weights.
        fused: with the names that transformers has in memory, where experts are one tensor; else with those of the hub.
    """
    model: Any = AutoModelForCausalLM.from_config(item.make_config())  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if parameter.is_floating_point() and "rotary" not in name:
                parameter.copy_(_random(name, parameter, generator))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size, save_original_format=not fused)
    return folder


def save_config(item: Case, folder: Path, **changes: Any) -> Path:
    """The configuration of a case alone, as that of a bf16 checkpoint, with some keys changed."""
    config = item.make_config().to_dict() | {"architectures": ["AnyForCausalLM"], "dtype": "bfloat16"} | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reference_model(folder: Path) -> PreTrainedModel:
    """The same checkpoint in transformers: fp32 arithmetic whatever the files hold, attention and experts written out."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
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
    """Values for a parameter: recurrences that remember some dozens of tokens, and small inputs of norms over small groups."""
    noise: Tensor = torch.randn(parameter.shape, generator=generator)
    uniform: Tensor = torch.rand(parameter.shape, generator=generator)
    scale = 0.8 if "in_proj" in name else 1.5
    made = {
        "e_score_correction_bias": 0.4 * uniform - 0.2,
        "A_log": (0.02 + 0.5 * uniform).log(),
        "dt_bias": 2.0 * uniform - 2.5,
        "D": 1.0 + 0.3 * noise,
        "norm.weight": 1.0 + 0.3 * noise,
        "norm_f.weight": 1.0 + 0.3 * noise,
        ".bias": 0.5 * noise,
        "embeddings.weight": 0.25 * noise,
        "embed_tokens.weight": 0.25 * noise,
        "lm_head.weight": 0.25 * noise,
    }
    return next(
        (value for suffix, value in made.items() if name.endswith(suffix)), noise * (scale / math.sqrt(parameter.shape[-1]))
    )
