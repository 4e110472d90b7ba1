"""Batches for attention over a paged cache, the exact result, and what a kernel may differ from it by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eightfold.kernels.operations import AttentionMetadata, AttentionSpec
from tests.tolerances import Tolerance

HOPPER_SHARED, SMALL_SHARED = 227 << 10, 99 << 10
# Decodes and longer chunks of unequal lengths, alone and in one batch, from nothing and behind a cached context.
MIXED = [(1, 700), (5, 5), (1, 33), (129, 300), (3, 900), (1, 1), (64, 2048), (2, 2)]
LONG = [(1, 4096), (1, 1), (1, 3000), (1, 127), (1, 129)]
# Heads, kv heads, width, block size, window.
SHAPES = [
    (32, 8, 128, 16, None),
    (14, 2, 64, 16, None),
    (32, 32, 96, 16, None),
    (8, 1, 80, 32, 100),
    (32, 1, 128, 64, None),
    (16, 1, 256, 16, 1000),
    (12, 4, 128, 16, 64),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Arguments of kernels that are compiled ahead of time.
TYPES = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16") | {"scale": "fp32"}
TYPES |= dict.fromkeys(("part_ptr", "log_ptr"), "*fp32")
TYPES |= dict.fromkeys(("table_ptr", "query_start_ptr", "context_lens_ptr"), "*i32")

# Probabilities are rounded to the dtype of V, each by half a unit of its last place, and so is the result.
TOLERANCES = {
    torch.float32: Tolerance(
        "attention in fp32",
        4e-6,
        8e-6,
        0.0,
        "a score of size s is off by about s * 2^-22 from product, scaling and exponential, and its probability by as much",
        (torch.float32,),
    ),
    torch.bfloat16: Tolerance(
        "attention in bf16",
        4e-3,
        2**-8,
        2**-8,
        "probabilities and the result keep 8 significant bits each: 1.7e-3 as a norm, twice",
        (torch.bfloat16,),
    ),
    torch.float16: Tolerance(
        "attention in fp16",
        6e-4,
        2**-11,
        2**-11,
        "probabilities and the result keep 11 significant bits each; the smallest probabilities fewer",
        (torch.float16,),
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """The arguments of `AttentionBackend.run`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: AttentionMetadata
    spec: AttentionSpec

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(query tokens, context tokens) of each sequence."""
        return list(zip(self.metadata.query_start.diff().tolist(), self.metadata.context_lens.tolist(), strict=True))


def make_case(
    chunks: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    window: int | None = None,
    device: str = "cpu",
) -> Case:
    """Chunks over a cache with scattered blocks that holds NaN where no token is; tables point nowhere behind their end."""
    generator = torch.Generator().manual_seed(len(chunks) + head_dim)
    counts = [-(-context // block_size) for _, context in chunks]
    order = torch.randperm(sum(counts) + 1, generator=generator)
    caches = torch.full((2, sum(counts) + 1, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    tables = torch.full((len(chunks), max(counts) + 1), 1 << 30, dtype=torch.int32)
    used = 0
    for index, (_, context) in enumerate(chunks):
        table = order[used : used + counts[index]]
        tables[index, : counts[index]] = table
        used += counts[index]
        held = torch.full((2, counts[index] * block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
        held[:, :context] = torch.randn(2, context, num_kv_heads, head_dim, generator=generator).to(dtype)
        caches[:, table] = held.unflatten(1, (-1, block_size))
    lengths = torch.tensor(chunks, dtype=torch.int32)
    starts = torch.zeros(len(chunks) + 1, dtype=torch.int32)
    starts[1:] = lengths[:, 0].cumsum(0)
    metadata = AttentionMetadata(
        slot_mapping=torch.zeros(0, dtype=torch.int64, device=device),
        block_tables=tables.to(device),
        query_start=starts.to(device),
        context_lens=lengths[:, 1].contiguous().to(device),
        max_query_len=int(lengths[:, 0].max()),
        max_context_len=int(lengths[:, 1].max()),
    )
    fused = torch.randn(int(starts[-1]), num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype).to(device)
    spec = AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, window, dtype)
    return Case(fused[:, :num_heads], caches[0].to(device), caches[1].to(device), metadata, spec)


def attend_exactly(case: Case) -> tuple[Tensor, Tensor]:
    """The result in fp64 `[T, num_heads, head_dim]`, and the sum of magnitudes behind each element."""
    spec, block_size, start = case.spec, case.key_cache.shape[1], 0
    results, magnitudes = [], []
    for index, (length, context) in enumerate(case.chunks):
        table = case.metadata.block_tables[index, : -(-context // block_size)].long()
        keys, values = (
            cache[table].flatten(0, 1)[:context].double().repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)
            for cache in (case.key_cache, case.value_cache)
        )
        position = torch.arange(context - length, context, device=keys.device)[:, None]
        key = torch.arange(context, device=keys.device)
        hidden = key > position
        if spec.sliding_window is not None:
            hidden |= key <= position - spec.sliding_window
        scores = torch.einsum("qhd,khd->hqk", case.query[start : start + length].double(), keys) * spec.scale
        share = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        results.append(torch.einsum("hqk,khd->qhd", share, values))
        magnitudes.append(torch.einsum("hqk,khd->qhd", share, values.abs()))
        start += length
    return torch.cat(results), torch.cat(magnitudes)


def is_decode(case: Case) -> Tensor:
    """`bool [T]`: which tokens are a chunk of their own."""
    lengths = case.metadata.query_start.diff()
    return (lengths == 1).repeat_interleave(lengths)


def unwritten(case: Case) -> Tensor:
    return torch.full(case.query.shape, torch.nan, dtype=case.query.dtype, device=case.query.device)


def arguments(case: Case, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, AttentionMetadata, AttentionSpec]:
    return case.query, case.key_cache, case.value_cache, out, case.metadata, case.spec


def spec_of(head_dim: int, dtype: torch.dtype = torch.bfloat16, group: int = 4) -> AttentionSpec:
    return AttentionSpec(8 * group, 8, head_dim, head_dim**-0.5, None, dtype)
