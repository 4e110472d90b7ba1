"""The GPU's backend for attention: `triton`. The kernels and what bounds them are in `paged_attention.py` and
`paged_prefill.py`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eightfold.kernels import jit
from eightfold.kernels.cuda import HOPPER
from eightfold.kernels.operations import AttentionMetadata, AttentionSpec
from eightfold.kernels.paged_attention import choose_decode_tile, choose_parts, decode
from eightfold.kernels.paged_prefill import choose_prefill_tile, prefill
from eightfold.kernels.registry import Hardware

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_HEADS = 64
_WIDEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Device:
    """What launches depend on: multiprocessors, shared memory of a program, and whether launches may overlap."""

    num_sms: int
    shared_bytes: int
    overlap: bool


class TritonAttention:
    """One pass over the keys: decoding in parts of a context, others in blocks of queries. It never waits for the GPU."""

    name = "triton"

    def declines(self, spec: AttentionSpec, hardware: Hardware) -> str | None:
        """Needs bf16 tensor cores (compute capability 8.0 and up), heads up to 256 wide, up to 64 of them to a kv head."""
        capability = hardware.capability
        if hardware.device.type != "cuda" or capability is None:
            return "needs a CUDA GPU"
        if capability < (8, 0):
            return f"needs compute capability 8.0 and up, and this GPU has {capability[0]}.{capability[1]}"
        if spec.activation_dtype not in _DTYPES:
            return f"{spec.activation_dtype} activations"
        if spec.head_dim > _WIDEST_HEAD:
            return f"heads {spec.head_dim} wide, over {_WIDEST_HEAD}"
        if spec.num_heads > _MOST_HEADS * spec.num_kv_heads:
            return f"{spec.num_heads // spec.num_kv_heads} query heads to a kv head, over {_MOST_HEADS}"
        return jit.MISSING

    def run(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Causal attention `[num_tokens, num_heads * head_dim]`; shapes as in `AttentionBackend.run`."""
        num_tokens, num_seqs = query.shape[0], metadata.context_lens.shape[0]
        out = torch.empty((num_tokens, spec.num_heads, spec.head_dim), dtype=query.dtype, device=query.device)
        if num_tokens == 0:
            return out.flatten(1)
        query = query if query.stride()[1:] == (spec.head_dim, 1) else query.contiguous()
        device = describe(query.device)
        if metadata.max_query_len > 1:
            tile = choose_prefill_tile(spec, metadata.max_query_len, device.shared_bytes)
            prefill(query, key_cache, value_cache, out, metadata, spec, tile, overlap=device.overlap)
        # Where all chunks are as long as the longest, none of a longer batch is one token.
        if metadata.max_query_len == 1 or num_tokens != num_seqs * metadata.max_query_len:
            parts = choose_parts(num_seqs, spec, metadata.max_context_len, device.num_sms)
            decode_tile = choose_decode_tile(spec, device.shared_bytes)
            decode(query, key_cache, value_cache, out, metadata, spec, decode_tile, parts, overlap=device.overlap)
        return out.flatten(1)


@functools.cache
def describe(device: torch.device) -> Device:
    """What launches on this device depend on; in Triton's interpreter, on the CPU, what an H100 would have."""
    if device.type != "cuda":
        return Device(132, 227 << 10, overlap=False)
    properties: Any = torch.cuda.get_device_properties(device)
    return Device(
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        overlap=(properties.major, properties.minor) >= HOPPER,
    )
