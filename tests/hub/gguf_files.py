"""A tiny GGUF file of a Llama model, written with the library that the converter reads with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS = 32, 4, 2, 8, 64, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = "<note>"
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ hello", "1 2")  # "1 2" never applies: digits are split first
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def tokens() -> list[str]:
    """Vocabulary: special tokens, one for each byte, what the merges make, and a token of the user's."""
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES), USER_DEFINED]


def tensors(seed: int = 0, *, tied: bool = True) -> dict[str, npt.NDArray[np.float32]]:
    """Weights by GGUF's names, q and k in GGUF's order of rows."""
    generator = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(tokens()), HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (len(tokens()), HIDDEN)
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (WIDTH, HIDDEN),
            f"blk.{layer}.ffn_up": (WIDTH, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, WIDTH),
        }
    return {f"{name}.weight": generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write(path: Path, weights: dict[str, npt.NDArray[np.float32]], *, arch: str = "llama", **changes: Any) -> Path:
    """Write the file.

    Args:
        path: where.
        weights: by GGUF's names; matrices are stored in Q4_1, the quantization of the packaged model.
        arch: the architecture that the file claims.
        changes: metadata to add or replace, dots of the keys as double underscores; None leaves a key out.
    """
    kinds = dict.fromkeys(SPECIAL, gguf.TokenType.CONTROL) | {USER_DEFINED: gguf.TokenType.USER_DEFINED}
    metadata: dict[str, Any] = {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": WIDTH,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.rope.freq_base": 1e5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.token_type": [int(kinds.get(token, gguf.TokenType.NORMAL)) for token in tokens()],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, weight in weights.items():
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
