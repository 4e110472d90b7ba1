"""Mixtures of experts: `fold` beside a grouped bf16 product, as shares of what the GPU can do.

    python -m eightfold.benchmarks.moe
    python -m eightfold.benchmarks.moe --layers nemotron --tokens 1 16

Every time is that of a CUDA graph of many calls, each with a routing of its own, divided by the calls; with few tokens the
experts that they touch together exceed the L2 cache several times. Routing is uniform. "up" and "down" are one product each
with the quantization of its input; "layer" is all of it, with sorting, activation and the sum. The baseline multiplies pairs
that are sorted already with weights in bf16, by torch's grouped product. Nothing is timed before it was found correct.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eightfold.benchmarks.gemm import Ceilings, measure_ceilings, time_calls
from eightfold.benchmarks.report import print_report
from eightfold.kernels.cuda_moe import FoldMoe, FoldMoeWeights
from eightfold.kernels.moe import choose_tile, moe_gemm, sort_pairs
from eightfold.kernels.operations import Activation, MoeSpec
from eightfold.kernels.quantize import quantize_mxfp8, quantize_tokens
from eightfold.quant.mxfp8 import MXTensor, dequantize

TOKENS = (1, 16, 64, 256, 2048, 8192)
# Tokens and what is between the products are rounded to FP8, each by 2.6e-2 as a relative norm; relu² doubles the first.
_GATE = 7e-2


@dataclass(frozen=True, slots=True)
class Shape:
    """The experts of a model."""

    num_experts: int
    top_k: int
    width: int
    inner: int
    gated: bool

    @property
    def spec(self) -> MoeSpec:
        """What a backend is asked about."""
        activation: Activation = "silu" if self.gated else "relu2"
        return MoeSpec(
            "experts", self.num_experts, self.top_k, self.width, self.inner, self.gated, activation, "mxfp8", torch.bfloat16
        )


SHAPES = {
    "nemotron": Shape(128, 6, 2688, 1856, gated=False),
    "qwen3": Shape(128, 8, 2048, 768, gated=True),
}


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=SHAPES, default=list(SHAPES), help="whose experts")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="numbers of tokens")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a CUDA GPU\n")
    ceilings = measure_ceilings()
    rows = [row for name in arguments.layers for row in measure(name, SHAPES[name], arguments.tokens, ceilings)]
    print(f"copy {ceilings.bandwidth / 1e12:.2f} TB/s, FP8 product {ceilings.fp8_rate / 1e12:.0f} TFLOP/s\n")
    header = [
        "experts, tokens",
        "touched",
        "layer µs",
        "up µs",
        "down µs",
        "bf16 grouped µs",
        "ratio",
        "TB/s",
        "TFLOP/s",
        "of limit",
    ]
    table = [
        [
            f"{row['name']}, {row['tokens']}",
            f"{row['touched']:.0f}",
            f"{row['layer_us']:.1f}",
            f"{row['up_us']:.1f}",
            f"{row['down_us']:.1f}",
            f"{row['bf16_us']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['tb_s']:.2f}",
            f"{row['tflop_s']:.0f}",
            f"{row['of_limit']:.2f}",
        ]
        for row in rows
    ]
    print_report("moe", header, table, {"bandwidth": ceilings.bandwidth, "fp8_rate": ceilings.fp8_rate, "rows": rows})


def measure(name: str, shape: Shape, tokens: Sequence[int], ceilings: Ceilings) -> Iterator[dict[str, float | str]]:
    """One row for each number of tokens."""
    w13, w2 = make_experts(shape)
    weights = FoldMoe().prepare(w13, w2, shape.spec)
    dense13, dense2 = (_dense(weight) for weight in (w13, w2))
    for num_tokens in tokens:
        x = torch.randn(num_tokens, shape.width, dtype=torch.bfloat16, device="cuda")
        routings = [make_routing(shape, num_tokens, seed) for seed in range(16 if num_tokens <= 256 else 3)]
        check(x, routings[0], weights, dense13, dense2)
        layer = time_calls([partial(FoldMoe().run, x, ids, factors, weights) for ids, factors in routings])
        up, down = (time_calls(calls) for calls in _products(x, routings, weights))
        bf16 = time_calls([_grouped(x, ids, shape, dense13, dense2) for ids, _ in routings])
        touched = sum(ids.unique().numel() for ids, _ in routings) / len(routings)
        rows = shape.inner * (2 if shape.gated else 1)
        operations = 2 * num_tokens * shape.top_k * shape.width * (rows + shape.inner)
        moved = touched * shape.width * (rows + shape.inner) + 4 * num_tokens * shape.width
        limit = max(moved / ceilings.bandwidth, operations / ceilings.fp8_rate) * 1e6
        yield {
            "name": name,
            "tokens": num_tokens,
            "touched": touched,
            "layer_us": layer,
            "up_us": up,
            "down_us": down,
            "bf16_us": bf16,
            "ratio": bf16 / layer,
            "tb_s": moved / layer / 1e6,
            "tflop_s": operations / layer / 1e6,
            "of_limit": limit / layer,
        }


def make_experts(shape: Shape) -> tuple[MXTensor, MXTensor]:
    """Random experts in MXFP8 on the GPU."""
    rows = shape.inner * (2 if shape.gated else 1)
    return _random(shape.num_experts, rows, shape.width), _random(shape.num_experts, shape.width, shape.inner)


def make_routing(shape: Shape, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Uniform choices without repetition, and weights."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(num_tokens, shape.num_experts, device="cuda", generator=generator)
    weights, ids = scores.topk(shape.top_k, dim=1)
    return ids, weights / weights.sum(dim=1, keepdim=True)


def check(x: Tensor, routing: tuple[Tensor, Tensor], weights: FoldMoeWeights, dense13: Tensor, dense2: Tensor) -> None:
    """Refuse to time what is not correct: a relative norm against fp32 products of the bf16 values of the same weights."""
    ids, factors = (item[:32] for item in routing)
    shape = weights.spec
    expected = torch.zeros(len(ids), x.shape[1], device="cuda")
    for choice in range(ids.shape[1]):
        inner = torch.einsum("tk,trk->tr", x[:32].float(), dense13[ids[:, choice]].float())
        gate, up = inner.chunk(2, dim=1) if shape.gated else (inner, None)
        active = torch.nn.functional.silu(gate) * up if up is not None else gate.relu().square()
        expected += factors[:, choice, None] * torch.einsum("ti,tki->tk", active, dense2[ids[:, choice]].float())
    found = FoldMoe().run(x, *routing, weights)[:32].float()
    error = float((found - expected).norm() / expected.norm())
    if not error < _GATE:
        raise SystemExit(f"{shape.layer}, {x.shape[0]} tokens: error {error:.2e}, over {_GATE:.0e}")


def _products(
    x: Tensor, routings: Sequence[tuple[Tensor, Tensor]], weights: FoldMoeWeights
) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """Calls of the first product and of the second, each with the quantization of its input, pairs sorted before."""
    spec, top_k = weights.spec, routings[0][0].shape[1]
    num_pairs = x.shape[0] * top_k
    inner = torch.randn(num_pairs, spec.intermediate_size, dtype=torch.bfloat16, device="cuda")
    ups: list[Callable[[], object]] = []
    downs: list[Callable[[], object]] = []
    for ids, factors in routings:
        tile = choose_tile(num_pairs, spec.num_experts, gated=spec.gated)
        pairs = sort_pairs(ids, spec.num_experts, tile.block_m, overlap=weights.overlap)

        def up(pairs: object = pairs, tile: object = tile) -> Tensor:
            a, scale = quantize_tokens(x, native=True, overlap=weights.overlap)
            return moe_gemm(
                a,
                scale,
                weights.w13,
                pairs,  # type: ignore[arg-type]
                tile,  # type: ignore[arg-type]
                x.dtype,
                pairs_per_row=top_k,
                activation=spec.activation,
                gated=spec.gated,
                pair_weight=None,
                overlap=weights.overlap,
            )

        def down(pairs: object = pairs, factors: Tensor = factors) -> Tensor:
            a, scale = quantize_tokens(inner, native=True, overlap=weights.overlap)
            return moe_gemm(
                a,
                scale,
                weights.w2,
                pairs,  # type: ignore[arg-type]
                choose_tile(num_pairs, spec.num_experts, gated=False),
                x.dtype,
                pairs_per_row=1,
                activation=None,
                gated=False,
                pair_weight=factors,
                overlap=weights.overlap,
            )

        ups.append(up)
        downs.append(down)
    return ups, downs


def _grouped(x: Tensor, ids: Tensor, shape: Shape, dense13: Tensor, dense2: Tensor) -> Callable[[], object]:
    """Both products by torch's grouped bf16 one, on pairs that are sorted already, with the activation between them."""
    order = ids.flatten().argsort(stable=True)
    rows = x[order // shape.top_k]
    ends = torch.bincount(ids.flatten(), minlength=shape.num_experts).cumsum(0).int()
    w13, w2 = dense13.transpose(1, 2), dense2.transpose(1, 2)

    def call() -> Tensor:
        inner = torch._grouped_mm(rows, w13, offs=ends)
        if shape.gated:
            gate, up = inner.chunk(2, dim=1)
            inner = torch.nn.functional.silu(gate) * up
        else:
            inner = inner.relu().square()
        return torch._grouped_mm(inner, w2, offs=ends)

    return call


def _random(num_experts: int, rows: int, k: int) -> MXTensor:
    values = torch.randn(num_experts, rows, k, dtype=torch.bfloat16, device="cuda") / k**0.5
    return quantize_mxfp8(values, native=True)


def _dense(weight: MXTensor) -> Tensor:
    return dequantize(weight, torch.bfloat16)


if __name__ == "__main__":
    main()
