"""The GPU's linear backends: what they decline, and that a layer keeps its promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eightfold.kernels import jit
from eightfold.kernels.cuda import DequantLinear, FoldLinear
from eightfold.kernels.hardware import detect
from eightfold.kernels.operations import LinearSpec
from eightfold.kernels.registry import Hardware
from eightfold.quant import mxfp8
from eightfold.quant.mxfp8 import MXTensor
from tests.kernels.operands import make, tokens

gpu_test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")


def hardware(*capability: int) -> Hardware:
    return Hardware(torch.device("cuda"), "a GPU", (capability[0], capability[1]), frozenset(), 1 << 34, 8)


def spec(weight_format: str = "mxfp8", dtype: torch.dtype = torch.bfloat16) -> LinearSpec:
    return LinearSpec("layer", 64, 64, weight_format, dtype)


@pytest.mark.parametrize(
    ("capability", "fold", "dequant"),
    [
        ((7, 5), "needs FP8 tensor cores", "needs bf16 tensor cores"),
        ((8, 0), "this GPU has 8.0", None),
        ((8, 6), "this GPU has 8.6", None),
        ((8, 9), None, None),
        ((9, 0), None, None),
        ((10, 0), "not tested on compute capability 10.0", None),
        ((12, 0), "not tested on compute capability 12.0", None),
    ],
)
@needs_triton
def test_each_gpu_gets_what_it_can_run(capability: tuple[int, int], fold: str | None, dequant: str | None) -> None:
    for backend, expected in ((FoldLinear(), fold), (DequantLinear(), dequant)):
        reason = backend.declines(spec(), hardware(*capability))
        assert (reason is None) == (expected is None)
        assert expected is None or expected in str(reason)


@needs_triton
def test_what_else_is_declined_and_why() -> None:
    cpu = Hardware(torch.device("cpu"), "a CPU", None, frozenset(), 1 << 34, 8)
    for backend in (FoldLinear(), DequantLinear()):
        assert backend.declines(spec(), cpu) == "needs a CUDA GPU"
        assert "float32" in str(backend.declines(spec(dtype=torch.float32), hardware(9, 0)))
    assert FoldLinear().declines(spec("bfloat16"), hardware(9, 0)) == "bfloat16 weights"
    assert FoldLinear().declines(spec(dtype=torch.float16), hardware(9, 0)) is None
    assert "only bf16 holds" in str(DequantLinear().declines(spec(dtype=torch.float16), hardware(9, 0)))
    assert DequantLinear().declines(spec("bfloat16"), hardware(9, 0)) is None
    assert "float16 weights" in str(DequantLinear().declines(spec("float16"), hardware(9, 0)))


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("backend", [FoldLinear(), DequantLinear()])
@pytest.mark.parametrize("m", [1, 16, 64, 256, 1024])
def test_the_same_input_gives_the_same_bits(backend: FoldLinear | DequantLinear, m: int) -> None:
    prepared: Any = backend.prepare(make(1856, 2688), None)
    x = tokens(m, 2688)
    first = backend.run(x, prepared)
    for _ in range(10):
        assert torch.equal(backend.run(x, prepared), first)


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("m", [1, 40, 300])
def test_a_graph_of_overlapping_layers_equals_one_layer_at_a_time(m: int) -> None:
    """Twenty layers, each fed by the last: a launch that read its input too early would differ."""
    fold = FoldLinear()
    layers = [fold.prepare(make(2048, 2048, seed=seed), None) for seed in range(4)] * 5
    x = tokens(m, 2048)

    def chain(*, one_at_a_time: bool) -> Tensor:
        y = x
        for layer in layers:
            y = fold.run(y, layer) * 0.02
            if one_at_a_time:
                torch.cuda.synchronize()
        return y

    expected = chain(one_at_a_time=True)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        found = chain(one_at_a_time=False)
    for _ in range(5):
        found.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)


@pytest.mark.gpu
@gpu_test
def test_odd_inputs() -> None:
    fold = FoldLinear()
    prepared = fold.prepare(make(64, 96), None)
    assert fold.run(tokens(0, 96), prepared).shape == (0, 64)
    transposed = tokens(96, 5).T
    assert torch.equal(fold.run(transposed, prepared), fold.run(transposed.contiguous(), prepared))
    assert not fold.run(torch.zeros(3, 96, dtype=torch.bfloat16, device="cuda"), prepared).any()
    assert fold.run(torch.full((1, 96), float("nan"), dtype=torch.bfloat16, device="cuda"), prepared).isnan().all()


@pytest.mark.gpu
@gpu_test
def test_a_weight_that_folds_badly_says_so() -> None:
    """In every row one element of 448, and 4064 of 2^-10, which the fold ties to zero: 63.7 * 2^-10 / 448 is 1.39e-4."""
    fold, gpu = FoldLinear(), detect("cuda")

    def asked(weight: MXTensor) -> str | None:
        n, k = weight.shape
        return fold.declines(LinearSpec("layer", n, k, "mxfp8", torch.bfloat16, weight), gpu)

    assert asked(make(64, 256)) is None
    w = torch.full((64, 4096), 2.0**-10, device="cuda")
    w[:, 0] = 448.0
    assert asked(mxfp8.quantize(w)) == "folding changes the weight by 1.4e-04, over the bound of 1e-04"
