"""Measure configurations of the dense FP8 product on this GPU and write the exceptions to the rule.

    python scripts/tune_gemm.py --out eightfold/kernels/tuning

Each candidate is timed like a row of `eightfold.benchmarks.gemm`: in a CUDA graph, with cold weights, quantization included.
The best few and the rule's own choice are timed again; what is still faster by 2 % goes into the table, the rest is left to the
rule.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eightfold.benchmarks.gemm import make_weight, run_library, time_calls
from eightfold.kernels import gemm
from eightfold.kernels.cuda import FoldLinear, FoldLinearWeight, describe
from eightfold.kernels.jit import triton
from eightfold.kernels.quantize import quantize_tokens
from eightfold.kernels.tuning import BUCKETS, LIBRARY, Gpu, TileConfig, fit, rule

# The benchmark's shapes, and layers of Llama 8B and 70B, Nemotron-3-Nano and Qwen3-30B-A3B.
SHAPES = (
    *("4096x4096", "8192x8192", "28672x8192", "10304x2688", "2688x4096"),
    *("6144x4096", "28672x4096", "4096x14336", "10240x8192", "57344x8192", "8192x28672"),
    *("4608x2688", "3712x2688", "2688x3712", "5120x2048", "2048x4096"),
)
_GAIN = 0.02
_ROTATION = 200 << 20


def candidates(num_tokens: int) -> list[TileConfig]:
    """Configurations worth a measurement for this many tokens."""
    if num_tokens <= 16:
        sizes = [(512, 3), (512, 4), (256, 3), (256, 4), (256, 6), (256, 8), (128, 5), (128, 8)]
        return [TileConfig("tile", 64, 16, k, stages, 4, ahead) for k, stages in sizes for ahead in (0, 512, 1024)]
    if num_tokens <= 32:
        sizes = [(256, 3), (256, 4), (256, 6), (128, 6), (128, 10)]
        return [TileConfig("tile", 64, 32, k, stages, 4, ahead) for k, stages in sizes for ahead in (0, 512, 1024)]
    if num_tokens <= 64:
        tiles = [(64, 64, 256, 3), (64, 64, 256, 4), (64, 64, 256, 5), (64, 64, 256, 6), (64, 64, 128, 4), (64, 64, 128, 6)]
        tiles += [(64, 64, 128, 8), (64, 32, 256, 4), (64, 32, 256, 6), (64, 32, 256, 8), (64, 32, 128, 5), (128, 64, 128, 4)]
        tiles += [(128, 64, 128, 6), (128, 64, 256, 3)]
        return [TileConfig("tile", *tile, 4, ahead) for tile in tiles for ahead in (0, 256, 512, 1024)]
    if num_tokens <= 256:
        wide = [(64, 64, 256, 5, 4), (64, 64, 128, 6, 4), (64, 128, 128, 3, 4), (64, 128, 128, 4, 4), (64, 128, 128, 6, 4)]
        wide += [(64, 128, 128, 8, 4), (64, 256, 128, 5, 4), (128, 64, 256, 4, 4), (128, 128, 128, 3, 4), (128, 128, 128, 3, 8)]
        wide += [(128, 128, 128, 6, 8), (128, 256, 128, 4, 8)]
        return [LIBRARY, *(TileConfig("tile", *tile, ahead) for tile in wide for ahead in (0, 512, 1024))]
    large = [(64, 256, 128, 4, 4), (128, 128, 128, 3, 4), (128, 128, 128, 3, 8), (128, 128, 128, 6, 8), (128, 256, 128, 4, 8)]
    large += [(256, 128, 128, 4, 8)]
    return [LIBRARY, *(TileConfig("tile", *tile) for tile in large)]


def main() -> None:
    """Tune and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the tables")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=BUCKETS)
    parser.add_argument("--processes", type=int, default=12, help="processes that compile ahead")
    arguments = parser.parse_args()
    gpu, _ = describe(torch.device("cuda", 0))
    shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in arguments.shapes)]
    wanted = {config for tokens in arguments.tokens for config in candidates(tokens) if config.kernel == "tile"}
    wanted |= {rule(n, tokens, gpu.num_sms, library=False) for n, _ in shapes for tokens in arguments.tokens}
    listed = sorted(wanted, key=repr)
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        pool.map(compile_ahead, [listed[index :: arguments.processes] for index in range(arguments.processes)])
    entries = [entry for n, k in shapes for entry in tune_shape(gpu, n, k, arguments.tokens)]
    versions = {"gpu": gpu.name, "torch": torch.__version__, "triton": triton.__version__}
    body = ",\n  ".join(json.dumps(entry) for entry in entries)
    text = f'{{"measured_with": {json.dumps(versions)}, "exceptions": [\n  {body}\n]}}\n'
    (arguments.out / f"{gpu.name.lower().replace(' ', '_')}.json").write_text(text)


def compile_ahead(configs: list[TileConfig]) -> None:
    """Fill triton's cache with these configurations, which another process then finds."""
    prepared = FoldLinear().prepare(make_weight(512, 512, 0), None)
    x = torch.randn(1, 512, dtype=torch.bfloat16, device="cuda")
    for config in configs:
        run(x, prepared, fit(config, prepared.gpu.shared_bytes))
    torch.cuda.synchronize()


def tune_shape(gpu: Gpu, n: int, k: int, tokens: list[int]) -> list[dict[str, Any]]:
    """The exceptions of one shape."""
    entries: list[dict[str, Any]] = []
    copies = max(2, -(-_ROTATION // (n * k)))
    weights = [FoldLinear().prepare(make_weight(n, k, seed), None) for seed in range(copies)]
    for num_tokens in tokens:
        x = torch.randn(num_tokens, k, dtype=torch.bfloat16, device="cuda")
        ours = fit(rule(n, num_tokens, gpu.num_sms, library=True), gpu.shared_bytes)
        fitting = {fit(config, gpu.shared_bytes) for config in candidates(num_tokens)}
        once = {config: microseconds(x, weights, config, 5) for config in fitting}
        first = sorted(once, key=lambda config: once[config])[:3]
        again = {config: microseconds(x, weights, config, 15) for config in (*first, ours)}
        best = min(again, key=lambda config: again[config])
        sys.stdout.write(f"{n} x {k}, {num_tokens} tokens: {again[best]:.2f} µs by {best}, {again[ours]:.2f} by the rule\n")
        if again[best] < (1 - _GAIN) * again[ours]:
            entries.append({"n": n, "k": k, "tokens": num_tokens, "config": asdict(best)})
    return entries


def microseconds(x: Tensor, weights: list[FoldLinearWeight], config: TileConfig, replays: int) -> float:
    """Time of one product in this configuration."""
    rounds = 1 if x.shape[0] >= 1024 else -(-24 // len(weights))
    return time_calls([partial(run, x, weight, config) for weight in weights] * rounds, replays)


def run(x: Tensor, prepared: FoldLinearWeight, config: TileConfig) -> Tensor:
    """One product in this configuration, activations quantized."""
    if config.kernel == "library":
        return run_library(x, prepared)
    a, scale = quantize_tokens(x, native=True, overlap=prepared.overlap)
    return gemm.fold_gemm(a, scale, prepared.weight, config, x.dtype, overlap=prepared.overlap)


if __name__ == "__main__":
    main()
