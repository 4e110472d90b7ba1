"""Which model types are supported: for each, how its configuration becomes a model, and how files spell its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from eightfold.errors import CheckpointError
from eightfold.models import arch, granite_hybrid_config, nemotron_h_config
from eightfold.models.causal_lm import CausalLM
from eightfold.models.decoder import Decoder
from eightfold.models.families import DECODER_FAMILIES
from eightfold.models.granite_hybrid import GraniteHybrid
from eightfold.models.nemotron_h import NemotronH


@dataclass(frozen=True, slots=True)
class Family:
    """How one model type is read and built, and what `docs/models.md` says of it.

    Attributes:
        build: a checkpoint's `config.json` to a model without weights; refuses what is not supported, by key.
        models: checkpoints of this type that people know.
        layers: what it is made of, in a few words.
        reads: keys that relatives have no meaning for, and this type has.
        spellings: what may be spelled in more than one way, beside `renames`.
        refuses: what is refused, beside the keys that no type has a meaning for.
        renames: patterns of tensor names and what they become: other spellings to the one that the model uses.
        unused: patterns of tensor names that no layer here computes with, each with the reason.
    """

    build: Callable[[Mapping[str, Any]], CausalLM]
    models: str
    layers: str
    reads: frozenset[str]
    spellings: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)

    def canonical(self, name: str) -> str:
        """The name that the model uses for a tensor of the checkpoint."""
        for pattern, replacement in self.renames.items():
            name = re.sub(pattern, replacement, name)
        return name


def _decoder(config: Mapping[str, Any]) -> CausalLM:
    return Decoder(arch.read_arch(config))


def _nemotron_h(config: Mapping[str, Any]) -> CausalLM:
    return NemotronH(nemotron_h_config.read_arch(config))


def _granite_hybrid(config: Mapping[str, Any]) -> CausalLM:
    return GraniteHybrid(granite_hybrid_config.read_arch(config))


def _llama_like(model_type: str, models: str, layers: str, **more: Any) -> Family:
    return Family(_decoder, models, layers, DECODER_FAMILIES[model_type].reads, **more)


_DENSE = "attention and a gated MLP"
_MIXTURE = "attention and a mixture of gated experts"
_FUSED_EXPERTS = "experts one by one, or all of a layer in `experts.gate_up_proj` and `experts.down_proj`"
_GRANITE_WORDS = (*granite_hybrid_config.MAMBA_WORDS, *granite_hybrid_config.ATTENTION_WORDS)
_ROPE = "`rope_theta` and `rope_scaling`, or `rope_parameters`"

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _llama_like("llama", "Llama 2 and 3, SmolLM2", _DENSE, spellings=(_ROPE,)),
        "mistral": _llama_like("mistral", "Mistral", f"{_DENSE}, with a sliding window", spellings=(_ROPE,)),
        "qwen2": _llama_like("qwen2", "Qwen2, Qwen2.5", f"{_DENSE}, biases on q, k and v", spellings=(_ROPE,)),
        "qwen3": _llama_like("qwen3", "Qwen3", f"{_DENSE}, norms on q and k", spellings=(_ROPE,)),
        "smollm3": _llama_like("smollm3", "SmolLM3", f"{_DENSE}, some layers without rope", spellings=(_ROPE,)),
        "mixtral": _llama_like(
            "mixtral",
            "Mixtral",
            _MIXTURE,
            spellings=(_ROPE, _FUSED_EXPERTS),
            renames={
                r"\.block_sparse_moe\.": ".mlp.",
                r"(\.experts\.\d+)\.w1\.": r"\1.gate_proj.",
                r"(\.experts\.\d+)\.w2\.": r"\1.down_proj.",
                r"(\.experts\.\d+)\.w3\.": r"\1.up_proj.",
            },
        ),
        "qwen2_moe": _llama_like(
            "qwen2_moe",
            "Qwen1.5-MoE, Qwen2-MoE",
            f"{_MIXTURE} beside a shared one with a gate of its own; some layers dense",
            spellings=(_ROPE, _FUSED_EXPERTS),
        ),
        "qwen3_moe": _llama_like(
            "qwen3_moe",
            "Qwen3-30B-A3B and larger",
            f"{_MIXTURE}, norms on q and k; some layers dense",
            spellings=(_ROPE, _FUSED_EXPERTS),
        ),
        "olmoe": _llama_like("olmoe", "OLMoE", f"{_MIXTURE}, norms over all of q and of k", spellings=(_ROPE, _FUSED_EXPERTS)),
        "granitemoehybrid": Family(
            _granite_hybrid,
            "Granite 4.0-H, tiny to small",
            "Mamba2 or attention (with positions or without), then an MLP, with experts beside it or without",
            granite_hybrid_config.READS,
            spellings=(
                f"a layer as one of {', '.join(f'`{word}`' for word in _GRANITE_WORDS)}",
                "the layers as `layer_types` or `layers_block_type`",
                "experts as `input_linear` and `output_linear`, or as `experts.gate_up_proj` and `experts.down_proj`",
            ),
            refuses=("`position_embedding_type` other than `rope` and `nope`",),
            renames={
                r"\.block_sparse_moe\.input_linear\.weight(\w*)$": r".block_sparse_moe.experts.gate_up_proj\1",
                r"\.block_sparse_moe\.output_linear\.weight(\w*)$": r".block_sparse_moe.experts.down_proj\1",
                r"\.block_sparse_moe\.router\.layer\.": ".block_sparse_moe.router.",
            },
        ),
        "nemotron_h": Family(
            _nemotron_h,
            "Nemotron-H, Nemotron Nano 2 and 3",
            "by the pattern: Mamba2, attention without positions, relu² MLPs, mixtures of relu² experts (latent or not)",
            nemotron_h_config.READS,
            spellings=(
                f"the pattern as one of {', '.join(f'`{key}`' for key in nemotron_h_config.PATTERN_KEYS)}",
                f"a layer as one of {', '.join(f'`{word}`' for word in nemotron_h_config.LAYER_WORDS)}, or by its letter",
                "experts one by one, or all of a layer in `experts.up_proj` and `experts.down_proj`",
                "`attention_bias` and `mlp_bias`, whose biases must then be in the files",
            ),
            refuses=(
                "`sliding_window`",
                "`mlp_hidden_act` other than `relu2`, `mamba_hidden_act` other than `silu`",
                "`n_shared_experts` other than 1",
            ),
            renames={r"^model\.": "backbone."},
            unused={r"^mtp\.": "heads that draft tokens ahead, for speculative decoding"},
        ),
    }
)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's configuration.

    Raises:
        CheckpointError: its `model_type` is missing or not supported, with the nearest one that is.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        near = get_close_matches(str(model_type), FAMILIES, n=1)
        remedy = f"Did you mean {near[0]}?" if near else ""
        raise CheckpointError("model_type", got=repr(model_type), expected=f"one of: {', '.join(FAMILIES)}", remedy=remedy)
    return FAMILIES[model_type]
