"""Paged attention beside torch's dense one, as shares of what the GPU can do.

    python -m eightfold.benchmarks.attention
    python -m eightfold.benchmarks.attention --layers nemotron --batches 64x1:4096 1x2048:2048
    python -m eightfold.benchmarks.attention --tune

A batch is SEQUENCESxQUERIES:CONTEXT, and several joined by "+" are one batch: `64x1:4096+1x2048:2048` decodes 64 sequences and
takes in one prompt. Every time is that of a CUDA graph of many calls, divided by the calls, over caches that together exceed
the L2 cache several times. The limit of a batch is the larger of two times: its bytes (keys and values of every context once,
queries and result) over the bandwidth of a large copy, and its operations (4 for each head, dimension and pair of a query and a
key that it sees) over the rate of torch's bf16 product at 8192 x 8192 x 8192, both measured in the same run. The baseline is
`scaled_dot_product_attention` on dense keys and values of the same lengths, where all sequences are alike and either decode or
start from nothing. Nothing is timed before it was found correct.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eightfold.benchmarks.gemm import measure_ceilings, time_calls
from eightfold.benchmarks.report import print_report
from eightfold.kernels import jit
from eightfold.kernels.cuda_attention import TritonAttention, describe
from eightfold.kernels.operations import AttentionMetadata, AttentionSpec
from eightfold.kernels.paged_attention import DecodeTile, choose_decode_tile, choose_parts, decode
from eightfold.kernels.paged_prefill import PrefillTile, prefill
from eightfold.kernels.reference import ReferenceAttention

BATCHES = (
    "1x1:4096",
    "1x1:32768",
    "16x1:4096",
    "64x1:1024",
    "64x1:4096",
    "256x1:2048",
    "16x2048:2048",
    "1x8192:8192",
    "1x2048:16384",
    "64x1:4096+1x2048:2048",
)
TUNED_DECODE = ("64x1:4096", "1x1:4096", "1x1:32768", "16x1:4096")
TUNED_PREFILL = ("16x2048:2048", "1x2048:16384")
DECODE_TILES = tuple(
    DecodeTile(*sizes)
    for sizes in ((32, 3, 4), (32, 4, 4), (64, 2, 4), (64, 3, 4), (64, 4, 4), (128, 2, 4), (128, 2, 8), (32, 4, 2), (64, 3, 2))
)
PREFILL_TILES = tuple(
    PrefillTile(*sizes)
    for sizes in (
        (128, 64, 3, 8, None),
        (128, 64, 2, 8, None),
        (128, 64, 2, 8, 128),
        (128, 64, 3, 8, 160),
        (128, 32, 3, 8, 128),
        (128, 32, 4, 8, 128),
        (128, 128, 2, 8, None),
        (128, 64, 2, 4, None),
        (64, 64, 3, 4, None),
        (64, 64, 2, 4, 168),
        (64, 32, 3, 4, 128),
        (64, 128, 2, 4, None),
    )
)
# Caches of one measurement together, bytes: over three times an H200's L2.
_ROTATION = 200 << 20
_BLOCK_SIZE = 16
# Probabilities and the result are rounded to bf16, each by 1.7e-3 as a relative norm.
_GATE = 6e-3


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of an attention backend."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: AttentionMetadata
    spec: AttentionSpec

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata, AttentionSpec]:
        """In the order of `AttentionBackend.run`."""
        return self.query, self.key_cache, self.value_cache, self.metadata, self.spec


SPECS = {
    "llama": AttentionSpec(32, 8, 128, 128**-0.5, None, torch.bfloat16),
    "nemotron": AttentionSpec(32, 2, 128, 128**-0.5, None, torch.bfloat16),
}


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=SPECS, default=list(SPECS), help="whose heads")
    parser.add_argument("--batches", nargs="+", default=BATCHES, help="as 64x1:4096")
    parser.add_argument("--tune", action="store_true", help="print how other tiles and numbers of parts do")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a CUDA GPU\n")
    ceilings = measure_ceilings().bandwidth, measure_bf16_rate()
    print(f"copy {ceilings[0] / 1e12:.2f} TB/s, bf16 product {ceilings[1] / 1e12:.0f} TFLOP/s\n")
    tuned = list(tune(SPECS[arguments.layers[0]], ceilings)) if arguments.tune else []
    rows = [measure(name, text, ceilings) for name in arguments.layers for text in arguments.batches]
    header = ["heads, batch", "ours µs", "torch µs", "ratio", "TB/s", "of copy", "TFLOP/s", "of limit"]
    table = [
        [
            f"{row['name']}, {row['batch']}",
            f"{row['us']:.1f}",
            f"{row['torch_us']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['tb_s']:.2f}",
            f"{row['of_copy']:.2f}",
            f"{row['tflop_s']:.0f}",
            f"{row['of_limit']:.2f}",
        ]
        for row in rows
    ]
    print_report("attention", header, table, {"bandwidth": ceilings[0], "bf16_rate": ceilings[1], "tuned": tuned, "rows": rows})


def measure_bf16_rate() -> float:
    """Operations a second of torch's product at 8192 x 8192 x 8192."""
    x, y = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / time_calls([partial(torch.mm, x, y)] * 5) * 1e6


def measure(name: str, text: str, ceilings: tuple[float, float]) -> dict[str, float | str]:
    """One row. `nan` stands for a baseline that there is not."""
    spec, chunks = SPECS[name], parse_batch(text)
    moved, operations = count(spec, chunks)
    batches = make_batches(spec, chunks)
    check(batches[0], TritonAttention().run(*batches[0].arguments))
    us = time_calls(repeated([partial(TritonAttention().run, *batch.arguments) for batch in batches]))
    dense = [call for batch in batches if (call := dense_call(batch, chunks)) is not None]
    torch_us = time_calls(repeated(dense)) if dense else math.nan
    return {
        "name": name,
        "batch": text,
        "us": us,
        "torch_us": torch_us,
        "ratio": torch_us / us,
        "tb_s": moved / us / 1e6,
        "of_copy": moved / us * 1e6 / ceilings[0],
        "tflop_s": operations / us / 1e6,
        "of_limit": max(moved / ceilings[0], operations / ceilings[1]) * 1e6 / us,
    }


def tune(spec: AttentionSpec, ceilings: tuple[float, float]) -> Iterator[dict[str, float | str]]:
    """Other tiles and numbers of parts, each printed with its share of the limit, best first."""
    device = describe(torch.device("cuda", torch.cuda.current_device()))
    for text in (*TUNED_DECODE, *TUNED_PREFILL):
        chunks = parse_batch(text)
        batches = make_batches(spec, chunks)
        moved, operations = count(spec, chunks)
        limit = max(moved / ceilings[0], operations / ceilings[1]) * 1e6
        ways: list[tuple[str, Callable[[Batch], Tensor]]] = []
        if chunks[0][0] == 1:
            parts = choose_parts(len(chunks), spec, chunks[0][1], device.num_sms)
            chosen = choose_decode_tile(spec, device.shared_bytes)
            ways += [(f"{tile}, {parts} parts", partial(run_decode, tile, parts)) for tile in DECODE_TILES]
            other = sorted({1, 2, 3, 4, 6, 8, 16, 32, 64, 128} - {parts})
            ways += [(f"{chosen}, {most} parts", partial(run_decode, chosen, most)) for most in other]
        else:
            ways = [(str(tile), partial(run_prefill, tile)) for tile in PREFILL_TILES]
        found: list[dict[str, float | str]] = []
        for name, run in ways:
            try:
                check(batches[0], run(batches[0]))
            except jit.triton.runtime.errors.OutOfResources as error:
                print(f"{text}, {name}: {error}")
                continue
            us = time_calls(repeated([partial(run, batch) for batch in batches]))
            found.append({"batch": text, "way": name, "us": us, "of_limit": limit / us})
        for row in sorted(found, key=lambda row: row["us"]):
            print(f"{row['batch']}: {row['us']:8.1f} µs, {row['of_limit']:.2f} of the limit, {row['way']}")
        print()
        yield from found


def run_decode(tile: DecodeTile, parts: int, batch: Batch) -> Tensor:
    """`[T, num_heads * head_dim]` by one way of decoding."""
    out = torch.empty_like(batch.query)
    decode(*batch.arguments[:3], out, batch.metadata, batch.spec, tile, parts, overlap=True)
    return out.flatten(1)


def run_prefill(tile: PrefillTile, batch: Batch) -> Tensor:
    """`[T, num_heads * head_dim]` by one way of prefill."""
    out = torch.empty_like(batch.query)
    prefill(*batch.arguments[:3], out, batch.metadata, batch.spec, tile, overlap=True)
    return out.flatten(1)


def parse_batch(text: str) -> list[tuple[int, int]]:
    """(query tokens, context tokens) of each sequence, from "64x1:4096+1x2048:2048"."""
    chunks: list[tuple[int, int]] = []
    for part in text.split("+"):
        shape, context = part.split(":")
        sequences, queries = shape.split("x")
        chunks += [(int(queries), int(context))] * int(sequences)
    return chunks


def count(spec: AttentionSpec, chunks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Bytes that must move, and operations."""
    itemsize = spec.activation_dtype.itemsize
    tokens, contexts = sum(length for length, _ in chunks), sum(context for _, context in chunks)
    pairs = sum(length * (context - length) + length * (length + 1) // 2 for length, context in chunks)
    moved = 2 * (contexts * spec.num_kv_heads + tokens * spec.num_heads) * spec.head_dim * itemsize
    return moved, 4 * spec.num_heads * spec.head_dim * pairs


def make_batches(spec: AttentionSpec, chunks: Sequence[tuple[int, int]]) -> list[Batch]:
    """Batches with caches of their own, enough to exceed the L2 cache."""
    copies = max(1, -(-_ROTATION // count(spec, chunks)[0]))
    return [make_batch(spec, chunks, seed) for seed in range(copies)]


def make_batch(spec: AttentionSpec, chunks: Sequence[tuple[int, int]], seed: int, device: str = "cuda") -> Batch:
    """Random queries, keys and values in scattered blocks."""
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-context // _BLOCK_SIZE) for _, context in chunks]
    order = torch.randperm(sum(counts), device=device, generator=generator).int()
    tables = torch.zeros(len(chunks), max(counts), dtype=torch.int32, device=device)
    for row, blocks in zip(tables, order.split(counts), strict=True):
        row[: len(blocks)] = blocks
    starts = torch.tensor([0, *(length for length, _ in chunks)], dtype=torch.int32).cumsum(0).int()
    metadata = AttentionMetadata(
        slot_mapping=torch.zeros(0, dtype=torch.int64, device=device),
        block_tables=tables,
        query_start=starts.to(device),
        context_lens=torch.tensor([context for _, context in chunks], dtype=torch.int32, device=device),
        max_query_len=max(length for length, _ in chunks),
        max_context_len=max(context for _, context in chunks),
    )
    shape = (sum(counts), _BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    draw = partial(torch.randn, dtype=spec.activation_dtype, device=device, generator=generator)
    query = draw((int(starts[-1]), spec.num_heads, spec.head_dim))
    return Batch(query, draw(shape), draw(shape), metadata, spec)


def dense_call(batch: Batch, chunks: Sequence[tuple[int, int]]) -> Callable[[], Tensor] | None:
    """Torch's attention on dense copies; None where lengths differ, or chunks begin behind a cached context."""
    length, context = chunks[0]
    if len(set(chunks)) > 1 or length not in (1, context):
        return None
    shape = (len(chunks), context)
    tables = batch.metadata.block_tables
    keys, values = (
        cache[tables.long()].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()  # [S, num_kv_heads, context, head_dim]
        for cache in (batch.key_cache, batch.value_cache)
    )
    query = batch.query.unflatten(0, (shape[0], length)).transpose(1, 2).contiguous()
    attend = torch.nn.functional.scaled_dot_product_attention
    return partial(attend, query, keys, values, is_causal=length > 1, scale=batch.spec.scale, enable_gqa=True)


def repeated(calls: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    """Enough calls for a graph."""
    return list(calls) * max(1, -(-12 // len(calls)))


def check(batch: Batch, found: Tensor) -> None:
    """Refuse to time what is not correct: a relative norm against fp32 attention over the same keys and values."""
    expected = ReferenceAttention().run(batch.query.float(), *batch.arguments[1:])
    error = float((found.float() - expected).norm() / expected.norm())
    if not error < _GATE:
        raise SystemExit(f"{batch.spec}, {found.shape[0]} tokens: error {error:.2e}, over {_GATE:.0e}")


if __name__ == "__main__":
    main()
