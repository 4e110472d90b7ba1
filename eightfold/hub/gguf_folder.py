"""A GGUF file of a Llama model as a Hugging Face folder: bf16 safetensors, configuration, tokenizer and chat template.

What differs between the two worlds: names; the order of the rows of q and k, which GGUF keeps for rotating neighbouring pairs
and Hugging Face for rotating halves; and the tokenizer, which GGUF stores as tables and the name of a pre-tokenizer.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from eightfold.errors import CheckpointError
from eightfold.types import Progress

if TYPE_CHECKING or importlib.util.find_spec("gguf") is not None:
    import gguf

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# GGUF's types of tokens that are found in a text before it is split.
_CONTROL, _USER_DEFINED = 3, 4


class _Fields(dict[str, Any]):
    """The metadata of a GGUF file. A key that it lacks is a CheckpointError."""

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(key, got="no such key in the metadata", expected="it, as in a GGUF of a Llama model")


def check_converter() -> None:
    """Raise CheckpointError where the library that reads GGUF is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            "conversion", got="no gguf package", expected="it installed", remedy="Run: pip install 'eightfold[demo]'"
        )


def convert(file: Path, folder: Path, report: Progress | None = None) -> None:
    """Write a Hugging Face folder from a GGUF file.

    Args:
        file: a GGUF of the architecture llama with a byte-level BPE tokenizer of the kind smollm.
        folder: where to write; made here.
        report: told of tensors done and in all.

    Raises:
        CheckpointError: a damaged file, or an architecture, a tokenizer or a tensor that is not supported.
    """
    try:
        reader = gguf.GGUFReader(file)
    except ValueError as error:
        raise CheckpointError(file.name, got=str(error), expected="a GGUF file") from error
    fields = _Fields({name: field.contents() for name, field in reader.fields.items()})
    _refuse_unsupported(fields, file.name)
    num_heads, num_kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    tensors: dict[str, Tensor] = {}
    for index, tensor in enumerate(reader.tensors):
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            values = _halves_from_pairs(values, num_heads)
        elif ".attn_k." in tensor.name:
            values = _halves_from_pairs(values, num_kv_heads)
        tensors[_hugging_face_name(tensor.name)] = torch.from_numpy(np.array(values, dtype=np.float32)).bfloat16()
        if report is not None:
            report("convert", index + 1, len(reader.tensors))
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in {
        "config.json": _config(fields, tied="lm_head.weight" not in tensors),
        "generation_config.json": _token_ids(fields),
        "tokenizer_config.json": _tokenizer_config(fields),
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if "tokenizer.chat_template" in fields:
        (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    _tokenizer(fields).save(str(folder / "tokenizer.json"))


def _refuse_unsupported(fields: _Fields, name: str) -> None:
    """Refuse what would change the numbers or the tokens and is not converted."""
    needed = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
        "llama.rope.dimension_count": _head_dim(fields),
    }
    for key, expected in needed.items():
        if fields[key] != expected:
            raise CheckpointError(f"{name}: {key}", got=fields[key], expected=str(expected))
    scaling = next((key for key in fields if key.startswith("llama.rope.scaling.")), None)
    if scaling is not None:
        raise CheckpointError(f"{name}: {scaling}", got=fields[scaling], expected="no scaling of the rotary embedding")


def _head_dim(fields: _Fields) -> int:
    by_width: int = fields["llama.embedding_length"] // fields["llama.attention.head_count"]
    return int(fields.get("llama.attention.key_length", by_width))


def _halves_from_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows `[heads * head_dim, in]` in the order of Hugging Face: each head's even rows first, then its odd ones."""
    rows, width = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _hugging_face_name(name: str) -> str:
    base, _, kind = name.rpartition(".")
    if base in _OTHER_NAMES:
        return f"{_OTHER_NAMES[base]}.{kind}"
    prefix, _, rest = base.partition(".")
    index, _, part = rest.partition(".")
    if prefix != "blk" or part not in _LAYER_NAMES:
        raise CheckpointError(f"tensor {name}", got="a name that Llama does not have", expected="a GGUF of a Llama model")
    return f"model.layers.{index}.{_LAYER_NAMES[part]}.{kind}"


def _config(fields: _Fields, *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": _head_dim(fields),
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF stores the epsilon in fp32: by its shortest spelling, 1e-05 comes back as 1e-05.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **_token_ids(fields),
    }


def _token_ids(fields: _Fields) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {name: f"tokenizer.ggml.{kind}_token_id" for name, kind in names.items()}
    return {name: fields[key] for name, key in keys.items() if key in fields}


def _tokenizer_config(fields: _Fields) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    named = {name.removesuffix("_id"): tokens[index] for name, index in _token_ids(fields).items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        **named,
    }


def _tokenizer(fields: _Fields) -> Tokenizer:
    """Byte-level BPE in which every digit is a token of its own: what llama.cpp calls the pre-tokenizer smollm."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # Already in the vocabulary, they keep their ids.
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer
