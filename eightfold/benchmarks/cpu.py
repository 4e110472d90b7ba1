"""The CPU's products beside torch's, layer by layer of SmolLM2-135M: `python -m eightfold.benchmarks.cpu`.

Every shape is checked against the fp64 product first, and a wrong one ends the run. Decode (M = 1) walks as many copies of a
weight as the model has layers, so that weights come from memory as they do in a model, and is set beside the copy bandwidth.
A time is the best of all single calls: on a shared machine the mean measures the others. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eightfold.kernels import native
from eightfold.kernels.cpu import CpuLinear
from eightfold.kernels.hardware import detect
from eightfold.quant.mxfp8 import MXTensor, dequantize, quantize

# name, N, K, copies, weight format: what one token of SmolLM2-135M passes through.
LAYERS = (
    ("qkv_proj", 960, 576, 30, "mxfp8"),
    ("o_proj", 576, 576, 30, "mxfp8"),
    ("gate_up_proj", 3072, 576, 30, "mxfp8"),
    ("down_proj", 576, 1536, 30, "mxfp8"),
    ("lm_head", 49152, 576, 1, "bfloat16"),
)
# Relative to the sum of magnitudes of the terms; fp32 accumulation, and one rounding of a bf16 result.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    Attributes:
        layer: the layer's name.
        shape: N x K.
        tokens: M.
        activations: dtype of x and y.
        ours_us: microseconds of our product.
        torch_fp32_us: of `F.linear` with weights and activations in fp32.
        torch_bf16_us: of `F.linear` with both in bf16.
        gb_per_s: bytes of our weight over our time.
        gflop_per_s: two M N K over our time.
    """

    layer: str
    shape: str
    tokens: int
    activations: str
    ours_us: float
    torch_fp32_us: float
    torch_bf16_us: float
    gb_per_s: float
    gflop_per_s: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512], help="values of M")
    parser.add_argument("--rounds", type=int, default=8, help="rounds over the copies of a layer")
    options = parser.parse_args(arguments)
    status = native.status()
    if status.library is None:
        sys.exit(status.detail)
    hardware = detect("cpu")
    bandwidth = copy_bandwidth(options.rounds)
    lines = [
        f"{hardware.name}, {hardware.num_threads} threads, {status.detail}; copy {bandwidth:.1f} GB/s read and written",
        f"{'layer':13} {'N x K':>12} {'M':>4} {'x':>5} {'ours us':>9} {'fp32 us':>9} {'bf16 us':>9} {'GB/s':>6} {'GFLOP/s':>8}",
    ]
    rows: list[Row] = []
    for tokens in options.tokens:
        for dtype in (torch.float32, torch.bfloat16):
            for layer in LAYERS:
                if layer[0] == "lm_head" and tokens > 4:
                    continue  # only a sequence's last token passes the head
                row = measure(layer, tokens, dtype, options.rounds)
                rows.append(row)
                lines.append(
                    f"{row.layer:13} {row.shape:>12} {row.tokens:4} {row.activations:>5} {row.ours_us:9.1f}"
                    f" {row.torch_fp32_us:9.1f} {row.torch_bf16_us:9.1f} {row.gb_per_s:6.1f} {row.gflop_per_s:8.1f}"
                )
    copies = {name: count for name, _, _, count, _ in LAYERS}
    for tokens in options.tokens:
        for activations in ("fp32", "bf16"):
            total = sum(r.ours_us * copies[r.layer] for r in rows if (r.tokens, r.activations) == (tokens, activations))
            lines.append(f"all products of the model, M = {tokens}, {activations}: {total / 1e3:.2f} ms")
    report = {
        "benchmark": "cpu",
        "hardware": hardware.name,
        "threads": hardware.num_threads,
        "torch": torch.__version__,
        "copy_gb_per_s": round(bandwidth, 1),
        "rows": [asdict(row) for row in rows],
    }
    sys.stdout.write("\n".join([*lines, json.dumps(report), ""]))


def measure(layer: tuple[str, int, int, int, str], tokens: int, dtype: torch.dtype, rounds: int) -> Row:
    """Check one layer, then time it and torch's product of the same size."""
    name, n, k, copies, weight_format = layer
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(n, k, generator=generator) * k**-0.5
    x = torch.randn(tokens, k, generator=generator)
    weight: MXTensor | Tensor = quantize(dense) if weight_format == "mxfp8" else dense.bfloat16()
    linear = CpuLinear()
    check(name, linear, weight, x.to(dtype))
    nbytes = weight.nbytes
    prepared = [linear.prepare(_copy(weight), None) for _ in range(copies)]
    ours = best(partial(linear.run, x.to(dtype)), prepared, rounds)
    others = []
    for other in (torch.float32, torch.bfloat16):
        weights = [dense.to(other, copy=True) for _ in range(copies)]
        others.append(best(partial(torch.nn.functional.linear, x.to(other)), weights, rounds))
    return Row(
        layer=name,
        shape=f"{n}x{k}",
        tokens=tokens,
        activations="fp32" if dtype == torch.float32 else "bf16",
        ours_us=round(ours * 1e6, 1),
        torch_fp32_us=round(others[0] * 1e6, 1),
        torch_bf16_us=round(others[1] * 1e6, 1),
        gb_per_s=round(nbytes / ours / 1e9, 1),
        gflop_per_s=round(2 * tokens * n * k / ours / 1e9, 1),
    )


def check(name: str, linear: CpuLinear, weight: MXTensor | Tensor, x: Tensor) -> None:
    """End the run where the product is not the fp64 one up to accumulation."""
    values = (dequantize(weight) if isinstance(weight, MXTensor) else weight).double()
    found = linear.run(x, linear.prepare(weight, None)).double()
    worst = float(((found - x.double() @ values.T).abs() / (x.double().abs() @ values.abs().T)).max())
    if not worst <= TOLERANCE[x.dtype]:
        sys.exit(f"{name} is wrong: worst element off by {worst:.1e} of its terms, allowed {TOLERANCE[x.dtype]:.1e}")


def best(product: Callable[[Any], object], weights: Sequence[object], rounds: int) -> float:
    """Seconds of one call: the best over rounds of all weights, of which a first one warms up."""
    times = []
    for _ in range(1 + max(rounds, 40 // len(weights))):
        for weight in weights:
            start = time.perf_counter()
            product(weight)
            times.append(time.perf_counter() - start)
    return min(times[len(weights) :])


def copy_bandwidth(rounds: int) -> float:
    """GB/s read and written by a copy of 256 MiB, more than any cache."""
    source = torch.ones(1 << 28, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best(target.copy_, [source], rounds) / 1e9


def _copy(weight: MXTensor | Tensor) -> MXTensor | Tensor:
    return MXTensor(weight.data.clone(), weight.scale.clone()) if isinstance(weight, MXTensor) else weight.clone()


if __name__ == "__main__":
    main()
