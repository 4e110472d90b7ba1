"""Dense products: `fold` beside cuBLAS in bf16 and the library's FP8 product, as shares of what the GPU can do.

    python -m eightfold.benchmarks.gemm
    python -m eightfold.benchmarks.gemm --shapes 4096x4096 --tokens 1 16 --accumulation

Every time is that of a CUDA graph of many calls whose weights together exceed the L2 cache several times, divided by the calls;
the quantization of the activations counts. The limit of a product is the larger of two times: its bytes (each operand and the
result once, the weight as stored) over the bandwidth of a large copy, and its operations over the rate of the library's FP8
product at 8192 x 8192 x 8192, both measured in the same run. Nothing is timed before it was found correct.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eightfold.benchmarks.report import print_report
from eightfold.kernels import gemm
from eightfold.kernels.cuda import FoldLinear, FoldLinearWeight
from eightfold.kernels.quantize import fold_mxfp8, quantize_mxfp8, quantize_tokens
from eightfold.kernels.tuning import choose_config
from eightfold.quant.mxfp8 import MXTensor

SHAPES = ("4096x4096", "8192x8192", "28672x8192", "10304x2688", "2688x4096")
TOKENS = (1, 16, 64, 256, 2048, 8192)
# Weights of one measurement together, bytes: over three times an H200's L2.
_ROTATION = 200 << 20
_WARM_UP_SECONDS = 0.01
# bf16 rounds the result by 2^-8 at most, 1.7e-3 as a relative norm; the accumulator adds 2e-3 at K = 8192 and 4e-3 at 28672.
_GATE = 6e-3


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU can do, measured: bytes a second of a copy (read and written), operations a second of an FP8 product."""

    bandwidth: float
    fp8_rate: float


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="N x K of the weights, as 4096x4096")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="numbers of tokens")
    parser.add_argument(
        "--accumulation", action="store_true", help="print what adding in fp32 every 128 elements costs and gains"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a CUDA GPU\n")
    ceilings = measure_ceilings()
    quantizers = measure_quantizers(ceilings)
    rows: list[dict[str, float | str]] = []
    for shape in arguments.shapes:
        n, k = (int(size) for size in shape.split("x"))
        rows += measure_shape(n, k, arguments.tokens, ceilings)
    accumulation = measure_accumulation() if arguments.accumulation else []
    print(f"copy {ceilings.bandwidth / 1e12:.2f} TB/s, FP8 product {ceilings.fp8_rate / 1e12:.0f} TFLOP/s\n")
    for line in (*quantizers, *accumulation):
        print(", ".join(f"{key} {value:.3g}" if isinstance(value, float) else str(value) for key, value in line.items()))
    print()
    header = ["weight, tokens", "ours µs", "cuBLAS µs", "ratio", "FP8 library µs", "TB/s", "TFLOP/s", "of limit", "kernel"]
    table = [
        [
            f"{row['shape']}, {row['tokens']}",
            f"{row['us']:.2f}",
            f"{row['cublas_us']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['library_us']:.2f}",
            f"{row['tb_s']:.2f}",
            f"{row['tflop_s']:.0f}",
            f"{row['of_limit']:.2f}",
            str(row["kernel"]),
        ]
        for row in rows
    ]
    result = {"bandwidth": ceilings.bandwidth, "fp8_rate": ceilings.fp8_rate, "quantizers": quantizers}
    print_report("gemm", header, table, {**result, "accumulation": accumulation, "rows": rows})


def time_calls(calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Microseconds a call: the median of some replays of a graph of them all."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    # The clocks of an idle GPU take some milliseconds to rise.
    begin = time.perf_counter()
    while time.perf_counter() - begin < _WARM_UP_SECONDS:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return float(statistics.median(times))


def measure_ceilings() -> Ceilings:
    """A copy of 2 GiB, and 8192 x 8192 x 8192 in FP8 by the library."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    bandwidth = 2 * source.nbytes / statistics.median(times)
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    weight = FoldLinear().prepare(make_weight(8192, 8192, 0), None).weight
    a, scale = quantize_tokens(x, native=True, overlap=False)
    microseconds = time_calls([lambda: gemm.library_gemm(a, scale, weight)] * 5)
    return Ceilings(bandwidth, 2 * 8192**3 / microseconds * 1e6)


def measure_shape(n: int, k: int, tokens: Sequence[int], ceilings: Ceilings) -> Iterator[dict[str, float | str]]:
    """One row for each number of tokens."""
    fold = FoldLinear()
    copies = max(2, -(-_ROTATION // (n * k)))
    weights = [fold.prepare(make_weight(n, k, seed), None) for seed in range(copies)]
    dense = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") / k**0.5 for _ in range(max(2, -(-copies // 2)))]
    for num_tokens in tokens:
        x = torch.randn(num_tokens, k, dtype=torch.bfloat16, device="cuda")
        check(x, weights[0])
        rounds = 1 if num_tokens >= 1024 else -(-24 // copies)
        ours = time_calls([partial(fold.run, x, weight) for weight in weights] * rounds)
        cublas = time_calls([partial(torch.nn.functional.linear, x, weight) for weight in dense] * rounds * 2)
        library = time_calls([partial(run_library, x, weight) for weight in weights] * rounds)
        moved = n * k + 2 * num_tokens * (n + k)
        limit = max(moved / ceilings.bandwidth, 2 * num_tokens * n * k / ceilings.fp8_rate) * 1e6
        config = choose_config(weights[0].gpu, n, k, num_tokens, library=n % 16 == 0)
        tile = f"{config.block_n}x{config.block_m}x{config.block_k} /{config.num_stages}"
        yield {
            "shape": f"{n} x {k}",
            "tokens": num_tokens,
            "us": ours,
            "cublas_us": cublas,
            "ratio": cublas / ours,
            "library_us": library,
            "tb_s": moved / ours / 1e6,
            "tflop_s": 2 * num_tokens * n * k / ours / 1e6,
            "of_limit": limit / ours,
            "kernel": tile if config.kernel == "tile" else "library",
        }


def measure_quantizers(ceilings: Ceilings) -> list[dict[str, float | str]]:
    """Time and share of the copy bandwidth of the quantizers, of a weight of 28672 x 8192 in bf16."""
    n, k = 28672, 8192
    sources = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    weights = [quantize_mxfp8(source, native=True) for source in sources]
    tokens = time_calls([partial(quantize_tokens, source, native=True, overlap=True) for source in sources] * 4)
    measured = (
        # Both end by asking whether all was finite, so they are timed by events and not in a graph.
        ("weight to MXFP8", n * k * (3 + 1 / 32), _time_events(lambda i: quantize_mxfp8(sources[i % 3], native=True))),
        ("MXFP8 folded", n * k * (2 + 1 / 32), _time_events(lambda i: fold_mxfp8(weights[i % 3], native=True))),
        ("tokens to FP8", n * k * 3, tokens),
    )
    return [
        {"what": what, "us": us, "tb_s": moved / us / 1e6, "of_copy": moved / us * 1e6 / ceilings.bandwidth}
        for what, moved, us in measured
    ]


def measure_accumulation() -> list[dict[str, float | str]]:
    """Error against fp64 and time of an fp32 result, with the tensor core adding all of K and with fp32 adding every 128."""
    rows: list[dict[str, float | str]] = []
    for n, k, num_tokens in ((4096, 4096, 16), (8192, 8192, 16), (8192, 8192, 256), (8192, 28672, 256)):
        prepared = FoldLinear().prepare(make_weight(n, k, 1), None)
        x = torch.randn(num_tokens, k, dtype=torch.bfloat16, device="cuda")
        a, scale = quantize_tokens(x, native=True, overlap=False)
        config = choose_config(prepared.gpu, n, k, num_tokens, library=False)
        expected = product(a, scale, prepared)
        for limit in (None, 128):
            options: dict[str, Any] = {"overlap": True, "max_imprecise": limit}
            call = partial(gemm.fold_gemm, a, scale, prepared.weight, config, torch.float32, **options)
            error = float((call().double() - expected).norm() / expected.norm())
            what = f"accumulation {n} x {k}, {num_tokens} tokens, fp32 every {limit or 'never'}"
            rows.append({"what": what, "error": error, "us": time_calls([call] * 20)})
    return rows


def make_weight(n: int, k: int, seed: int) -> MXTensor:
    """A random MXFP8 weight, quantized from bf16 on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return quantize_mxfp8(torch.randn(n, k, dtype=torch.bfloat16, device="cuda", generator=generator) / k**0.5, native=True)


def run_library(x: Tensor, prepared: FoldLinearWeight) -> Tensor:
    """The library's FP8 product with our quantization of the tokens."""
    a, scale = quantize_tokens(x, native=True, overlap=prepared.overlap)
    return gemm.library_gemm(a, scale, prepared.weight)


def product(a: Tensor, scale: Tensor, prepared: FoldLinearWeight) -> Tensor:
    """The fp64 product of the operands that a kernel gets."""
    weight = prepared.weight
    return (a.double() * scale.double()[:, None]) @ (weight.data.double() * weight.row_scale.double()[:, None]).T


def check(x: Tensor, prepared: FoldLinearWeight) -> None:
    """Refuse to time what is not correct: a relative norm against the fp64 product of the same operands."""
    rows = x[:256]
    expected = product(*quantize_tokens(rows, native=True, overlap=False), prepared)
    found = FoldLinear().run(x, prepared)[:256].double()
    error = float((found - expected).norm() / expected.norm())
    if not error < _GATE:
        raise SystemExit(f"{tuple(prepared.weight.data.shape)}, {x.shape[0]} tokens: error {error:.2e}, over {_GATE:.0e}")


def _time_events(call: Callable[[int], object], repeats: int = 9) -> float:
    times = []
    for index in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call(index)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


if __name__ == "__main__":
    main()
