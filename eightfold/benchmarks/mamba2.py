"""Mamba2's convolution and scan beside torch's own products and mamba-ssm, as shares of what the GPU can do.

    python -m eightfold.benchmarks.mamba2
    python -m eightfold.benchmarks.mamba2 --batches 64x1 16x2048 --states float32
    python -m eightfold.benchmarks.mamba2 --tune

A batch is SEQUENCESxTOKENS, such as 64x1 for a decode step of 64 sequences. Every time is that of a CUDA graph of many calls,
divided by the calls, over states that together exceed the L2 cache several times. The limit of a scan is the larger of two
times: its bytes over the bandwidth of a large copy, and its operations over the rate of torch's bf16 product, both measured in
the same run. Bytes are states once each way (prompts begin without one), and x, dt, B, C and y once; operations are those of
the recurrence itself, 4 for each element of a state and token, though a scan in blocks does more. The baseline "torch" is
`ChunkedMamba` on the same operands. In prompts it asks the host for lengths, so that there it is timed by events and not in a
graph. "mamba-ssm" is that library's step or chunked scan, where it is installed. Nothing is timed before it was found correct,
with NaN in fresh memory.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from eightfold.benchmarks.attention import measure_bf16_rate, repeated
from eightfold.benchmarks.gemm import measure_ceilings, time_calls
from eightfold.benchmarks.report import print_report
from eightfold.kernels import jit
from eightfold.kernels.chunked_mamba import ChunkedMamba
from eightfold.kernels.cuda_mamba import CudaMamba
from eightfold.kernels.mamba2 import ScanTile, scan
from eightfold.kernels.mamba2_step import ScanInputs, StepTile, scan_step
from eightfold.kernels.operations import MambaBackend, MambaSpec, StateMetadata
from eightfold.kernels.reference_mixers import ReferenceMamba

BATCHES = ("1x1", "16x1", "64x1", "256x1", "16x2048")
STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STEP_TILES = tuple(StepTile(rows, warps) for rows in (8, 16, 32, 64) for warps in (1, 2, 4, 8))
SCAN_TILES = tuple(
    ScanTile(block, rows, stages, warps, segment)
    for block, rows, stages, warps in (
        (64, 64, 2, 4),
        (64, 32, 2, 4),
        (128, 64, 2, 8),
        (32, 64, 3, 4),
        (64, 64, 3, 4),
        (64, 64, 2, 8),
    )
    for segment in (0, 512, 1024)
)
NEMOTRON = MambaSpec("mixer", 64, 64, 128, 8, 4, (0.0, math.inf), torch.bfloat16, torch.float32)
# States of one measurement together, bytes: over three times an H200's L2.
_ROTATION = 200 << 20
# Operands of each product and the result are rounded to bf16, each by 1.7e-3 as a relative norm; a bf16 state adds one more.
_GATE = 8e-3


@dataclass(frozen=True, slots=True)
class Batch:
    """The operands of a layer's convolution and scan.

    Attributes:
        projection: `[T, C]`, inputs of the convolution.
        weight: `[C, kernel]`.
        bias: `[C]`.
        inputs: of the scan, as views of one other projection.
        conv_state: `[S, C, kernel - 1]`.
        ssm_state: `[S, H, P, N]`.
        metadata: sequences and slots.
        spec: the layer.
    """

    projection: Tensor
    weight: Tensor
    bias: Tensor
    inputs: ScanInputs
    conv_state: Tensor
    ssm_state: Tensor
    metadata: StateMetadata
    spec: MambaSpec

    def conv(self, backend: MambaBackend) -> Tensor:
        """The convolution `[T, C]`; its state moves on."""
        return backend.conv(self.projection, self.weight, self.bias, self.conv_state, self.metadata, self.spec)

    def scan(self, backend: MambaBackend) -> Tensor:
        """The scan `[T, H, P]`; its state moves on."""
        i = self.inputs
        return backend.scan(i.x, i.dt, i.a, i.b, i.c, i.d, i.dt_bias, self.ssm_state, self.metadata, self.spec)

    def fresh(self) -> Batch:
        """The same with states of its own."""
        return replace(self, conv_state=self.conv_state.clone(), ssm_state=self.ssm_state.clone())


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", default=BATCHES, help="as 64x1")
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES), help="dtypes of the states")
    parser.add_argument("--tune", action="store_true", help="print how other tiles do")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a CUDA GPU\n")
    ceilings = measure_ceilings().bandwidth, measure_bf16_rate()
    print(f"copy {ceilings[0] / 1e12:.2f} TB/s, bf16 product {ceilings[1] / 1e12:.0f} TFLOP/s\n")
    cases = [(name, text) for text in arguments.batches for name in arguments.states]
    tuned = [row for name, text in cases for row in tune(name, text, ceilings)] if arguments.tune else []
    rows = [measure(name, text, ceilings) for name, text in cases]
    header = [
        "state, batch",
        "scan µs",
        "conv µs",
        "torch µs",
        "mamba-ssm µs",
        "ratio",
        "MB",
        "TB/s",
        "of copy",
        "of limit",
        "error",
    ]
    table = [
        [
            f"{row['state']}, {row['batch']}",
            f"{row['scan_us']:.1f}",
            f"{row['conv_us']:.1f}",
            f"{row['torch_us']:.1f}",
            f"{row['mamba_ssm_us']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['mb']:.1f}",
            f"{row['tb_s']:.2f}",
            f"{row['of_copy']:.2f}",
            f"{row['of_limit']:.2f}",
            f"{row['error']:.1e}",
        ]
        for row in rows
    ]
    print_report("mamba2", header, table, {"bandwidth": ceilings[0], "bf16_rate": ceilings[1], "tuned": tuned, "rows": rows})


def measure(state: str, text: str, ceilings: tuple[float, float]) -> dict[str, Any]:
    """One row. `nan` stands for a library that is not installed."""
    spec, shape = replace(NEMOTRON, state_dtype=STATES[state]), parse_batch(text)
    batches = make_batches(spec, shape)
    error, largest = check(batches[0], CudaMamba())
    print(f"{state}, {text}: error {error:.1e} as a norm, {largest:.1e} at most")
    scan_us = time_calls(repeated([partial(batch.scan, CudaMamba()) for batch in batches]))
    conv_us = time_calls(repeated([partial(batch.conv, CudaMamba()) for batch in batches]))
    plain = [partial(batch.scan, ChunkedMamba()) for batch in batches]
    torch_us = time_calls(repeated(plain)) if shape[1] == 1 else time_events(plain)
    library = [call for batch in batches if (call := library_call(batch, shape)) is not None]
    moved, operations = count(spec, shape)
    return {
        "state": state,
        "batch": text,
        "scan_us": scan_us,
        "conv_us": conv_us,
        "torch_us": torch_us,
        "mamba_ssm_us": time_calls(repeated(library)) if library else math.nan,
        "ratio": torch_us / scan_us,
        "mb": moved / 1e6,
        "tb_s": moved / scan_us / 1e6,
        "of_copy": moved / scan_us * 1e6 / ceilings[0],
        "of_limit": max(moved / ceilings[0], operations / ceilings[1]) * 1e6 / scan_us,
        "error": error,
        "largest_error": largest,
    }


def tune(state: str, text: str, ceilings: tuple[float, float]) -> Iterator[dict[str, Any]]:
    """Other tiles, each with its share of the limit, best first; a tile that does not fit or is not correct is named."""
    spec, shape = replace(NEMOTRON, state_dtype=STATES[state]), parse_batch(text)
    batches = make_batches(spec, shape)
    moved, operations = count(spec, shape)
    limit = max(moved / ceilings[0], operations / ceilings[1]) * 1e6
    expected = exactly(batches[0])
    found: list[dict[str, Any]] = []
    for tile in STEP_TILES if shape[1] == 1 else SCAN_TILES:
        try:
            with poisoned():
                own = batches[0].fresh()
                for found_here, exact in zip((run_tile(tile, own), own.ssm_state), expected, strict=True):
                    compare(own, found_here, exact)
        except jit.triton.runtime.errors.OutOfResources as error:
            print(f"{text}, {tile}: {error}")
            continue
        us = time_calls(repeated([partial(run_tile, tile, batch) for batch in batches]))
        found.append({"state": state, "batch": text, "tile": str(tile), "us": us, "of_limit": limit / us})
    found.sort(key=lambda row: float(row["us"]))
    for row in found:
        print(f"{state}, {text}: {row['us']:8.1f} µs, {row['of_limit']:.2f} of the limit, {row['tile']}")
    print()
    yield from found


def run_tile(tile: StepTile | ScanTile, batch: Batch) -> Tensor:
    """The scan `[T, H, P]` by one tile."""
    y = torch.empty(batch.inputs.x.shape, dtype=batch.inputs.x.dtype, device=batch.inputs.x.device)
    overlap = torch.cuda.get_device_capability() >= (9, 0)
    if isinstance(tile, StepTile):
        scan_step(batch.inputs, batch.ssm_state, y, batch.metadata, batch.spec, tile, overlap=overlap)
    else:
        scan(batch.inputs, batch.ssm_state, y, batch.metadata, batch.spec, tile, overlap=overlap)
    return y


def parse_batch(text: str) -> tuple[int, int]:
    """Sequences, and tokens of each, from "16x2048"."""
    sequences, tokens = text.split("x")
    return int(sequences), int(tokens)


def count(spec: MambaSpec, shape: tuple[int, int]) -> tuple[int, int]:
    """Bytes that a scan must move, and the operations of its recurrence."""
    sequences, tokens = shape[0], shape[0] * shape[1]
    state = spec.num_heads * spec.head_dim * spec.state_size
    row = 2 * spec.num_heads * spec.head_dim + 2 * spec.num_groups * spec.state_size + spec.num_heads
    passes = 2 if shape[1] == 1 else 1
    moved = passes * sequences * state * spec.state_dtype.itemsize + tokens * row * spec.activation_dtype.itemsize
    return moved, 4 * tokens * state


def make_batches(spec: MambaSpec, shape: tuple[int, int]) -> list[Batch]:
    """Batches with states of their own, enough to exceed the L2 cache."""
    copies = max(1, -(-_ROTATION // count(spec, shape)[0]))
    return [make_batch(spec, shape, seed) for seed in range(copies)]


def make_batch(spec: MambaSpec, shape: tuple[int, int], seed: int, device: str = "cuda") -> Batch:
    """Random operands, with steps from 0.01 to 1 and decays from slow to fast. Prompts are new; a decode step has states."""
    sequences, length = shape
    generator = torch.Generator(device).manual_seed(seed)
    draw = partial(torch.randn, dtype=spec.activation_dtype, device=device, generator=generator)
    inner, group = spec.num_heads * spec.head_dim, spec.num_groups * spec.state_size
    channels = inner + 2 * group
    rows = draw((sequences * length, channels + spec.num_heads))
    x, b, c, dt = rows.split((inner, group, group, spec.num_heads), dim=1)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    metadata = StateMetadata(
        slots=torch.randperm(sequences, device=device, generator=generator),
        is_new=torch.full((sequences,), length > 1, device=device),
        query_start=torch.arange(0, sequences * length + 1, length, dtype=torch.int32, device=device),
        save_sequences=none,
        save_lengths=none,
        save_slots=none,
        max_query_len=length,
    )
    heads = (spec.num_heads, spec.head_dim)
    inputs = ScanInputs(
        x.unflatten(1, heads),
        dt,
        -torch.linspace(-4, 1, spec.num_heads, device=device).exp(),
        b.unflatten(1, (spec.num_groups, spec.state_size)),
        c.unflatten(1, (spec.num_groups, spec.state_size)),
        torch.randn(spec.num_heads, device=device, generator=generator),
        torch.linspace(0, -4, spec.num_heads, device=device),
    )
    return Batch(
        projection=draw((sequences * length, channels)),
        weight=draw((channels, spec.conv_kernel)),
        bias=draw((channels,)),
        inputs=inputs,
        conv_state=draw((sequences, channels, spec.conv_kernel - 1)),
        ssm_state=draw((sequences, *heads, spec.state_size)).to(spec.state_dtype),
        metadata=metadata,
        spec=spec,
    )


def library_call(batch: Batch, shape: tuple[int, int]) -> Callable[[], object] | None:
    """mamba-ssm's step or scan on the same operands; None where it is not installed."""
    if importlib.util.find_spec("mamba_ssm") is None:
        return None
    i, spec = batch.inputs, batch.spec
    if shape[1] == 1:
        step = importlib.import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
        heads = (spec.num_heads, spec.head_dim)
        return partial(
            step,
            batch.ssm_state,
            i.x,
            i.dt[:, :, None].expand(-1, *heads),
            i.a[:, None, None].expand(*heads, spec.state_size),
            i.b,
            i.c,
            i.d[:, None].expand(heads),
            dt_bias=i.dt_bias[:, None].expand(heads),
            dt_softplus=True,
        )
    combined = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    x, dt, b, c = (part.unflatten(0, shape) for part in (i.x, i.dt, i.b, i.c))
    options = {"D": i.d, "dt_bias": i.dt_bias, "dt_softplus": True, "return_final_states": True}
    return partial(combined, x, dt, i.a, b, c, 128, **options)


def time_events(calls: Sequence[Callable[[], object]], repeats: int = 3) -> float:
    """Microseconds a call of what cannot be captured: the median of some, between events."""
    times = []
    for call in [calls[0], *list(calls) * repeats]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times[1:]))


def poisoned() -> AbstractContextManager[object]:
    """Fresh memory of numbers is NaN: what a kernel left unwritten shows."""
    make = torch.empty

    def wrapper(*sizes: Any, **options: Any) -> Tensor:
        made: Tensor = make(*sizes, **options)
        return made.fill_(math.nan) if made.is_floating_point() and made.dtype.itemsize > 1 else made

    return mock.patch.object(torch, "empty", wrapper)


def exactly(batch: Batch) -> tuple[Tensor, Tensor]:
    """y and the states afterwards, from the reference on the same numbers in fp32."""
    i = batch.inputs
    state = batch.ssm_state.float().clone()
    x, dt, b, c = (part.float() for part in (i.x, i.dt, i.b, i.c))
    spec = replace(batch.spec, activation_dtype=torch.float32, state_dtype=torch.float32)
    return ReferenceMamba().scan(x, dt, i.a, b, c, i.d, i.dt_bias, state, batch.metadata, spec), state


def check(batch: Batch, backend: MambaBackend) -> tuple[float, float]:
    """Refuse to time what is not correct; returns the relative norm and the largest error, over outputs and states."""
    own = batch.fresh()
    with poisoned():
        y = own.scan(backend)
        conv = own.conv(backend)
    exact = batch.fresh()
    wide = replace(exact, projection=exact.projection.float(), conv_state=exact.conv_state.float())
    y_expected, state_expected = exactly(batch)
    pairs = ((y, y_expected), (own.ssm_state, state_expected), (conv, wide.conv(ReferenceMamba())))
    errors = [compare(batch, found, expected) for found, expected in pairs]
    return max(norm for norm, _ in errors), max(largest for _, largest in errors)


def compare(batch: Batch, found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The relative norm and the largest of a result's errors, by what is expected.

    Raises:
        SystemExit: the norm is over the gate, or is NaN.
    """
    difference = found.float() - expected
    norm = float(difference.norm() / expected.norm())
    if not norm < _GATE:
        sequences = len(batch.metadata.slots)
        raise SystemExit(f"{sequences} sequences, {batch.spec.state_dtype} states: error {norm:.2e}, over {_GATE:.0e}")
    return norm, float(difference.abs().max())


if __name__ == "__main__":
    main()
