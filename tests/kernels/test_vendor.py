"""Products of other libraries: what declines and why, and what they are handed, read back by the formulas of the layouts."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType

from eightfold.errors import BackendError
from eightfold.kernels import jit, vendor
from eightfold.kernels.operations import LinearSpec
from eightfold.kernels.quantize_rows import BlockQuantized
from eightfold.kernels.registry import Hardware
from eightfold.kernels.scale_layouts import LaidOutScales, ScaleLayout, arrange
from eightfold.kernels.selection import Kernels
from eightfold.kernels.vendor import CublasLinear, FlashInferCuteDsl, FlashInferCutlass, FlashInferTrtllm, VendorLinearWeight
from eightfold.quant import mxfp8
from tests.oracle import assert_matches, product
from tests.tolerances import BF16

FLASHINFER = (FlashInferCutlass, FlashInferCuteDsl, FlashInferTrtllm)
SUPPORTED = {"cutlass": {100, 103, 120, 121}, "cute-dsl": {100, 103}, "trtllm": {100, 103}}
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")


def gpu(*capability: int) -> Hardware:
    return Hardware(torch.device("cuda"), "a GPU", (capability[0], capability[1]), frozenset(), 1 << 34, 8)


def spec(n: int = 256, k: int = 512, dtype: torch.dtype = torch.bfloat16) -> LinearSpec:
    return LinearSpec("layer", n, k, "mxfp8", dtype)


def read(data: Tensor, scales: Tensor, tile: int) -> Tensor:
    """fp64 values of E4M3 `[R, K]` whose scale of row r and block c lies where the vendors' formula says."""
    rows, blocks = data.shape[0], data.shape[1] // 32
    padded = -(-blocks // 4) * 4
    assert scales.shape == (-(-rows // tile) * tile * padded,)
    r, c = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    if tile == 128:
        place = c % 4 + c // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + r // 128 * 128 * padded
    else:
        place = r // 8 * 8 * padded + c // 4 * 32 + r % 8 * 4 + c % 4
    factors = torch.exp2(scales[place].double() - 127)
    return data.double() * factors.repeat_interleave(32, dim=1)


def shuffle(rows: Tensor, tile: int) -> Tensor:
    """Old row 4 a + b of each 32 becomes row a + 8 b."""
    assert tile == 128
    return rows.view(-1, 8, 4, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def unshuffle(rows: Tensor) -> Tensor:
    return rows.view(-1, 4, 8, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


class FakeFlashInfer(SimpleNamespace):
    """The library's part: it computes from the bytes that it is given, and remembers how it was called."""

    __version__ = "0.7.4"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.supported = SUPPORTED
        super().__init__(shuffle_matrix_a=shuffle)

    @property
    def mm_mxfp8(self) -> Any:
        def call(a: Tensor, b: Tensor, a_descale: Tensor, b_descale: Tensor, **options: Any) -> Tensor:
            self.calls.append({"shapes": (tuple(a.shape), tuple(b.shape)), **options})
            assert (a.dtype, b.dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
            assert b.stride() == (1, b.shape[0])
            x = read(a, a_descale, 8 if options["use_8x4_sf_layout"] else 128)
            w = read(b.t(), b_descale, 128)
            w = unshuffle(w) if options["backend"] == "trtllm" else w
            return (x @ w.T).to(options["out_dtype"])

        call.is_backend_supported = lambda word, number: number in self.supported[word]  # type: ignore[attr-defined]
        return call


def quantize(x: Tensor, layout: ScaleLayout, **_: bool) -> BlockQuantized:
    mx = mxfp8.quantize(x.float())
    data = torch.nn.functional.pad(mx.data.view(torch.uint8), (0, -x.shape[1] % 32))
    return BlockQuantized(data.view(torch.float8_e4m3fn), arrange(mx.scale, layout))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    fake = FakeFlashInfer()
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(vendor, "quantize_rows", quantize)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return fake


@needs_triton
def test_which_gpu_each_is_for(library: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    center, desk = ((10, 0), (10, 3)), ((12, 0), (12, 1))
    for capability in center + desk:
        assert FlashInferCutlass().declines(spec(), gpu(*capability)) is None
    for backend in (FlashInferCuteDsl(), FlashInferTrtllm(), CublasLinear()):
        for capability in center:
            assert backend.declines(spec(), gpu(*capability)) is None
        for capability in desk:
            expected = f"needs compute capability 10.0 or 10.3, and this GPU has {capability[0]}.{capability[1]}"
            assert backend.declines(spec(), gpu(*capability)) == expected
        assert "this GPU has 9.0" in str(backend.declines(spec(), gpu(9, 0)))


@needs_triton
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("backend", "n", "k", "reason"),
    [
        (FlashInferCutlass(), 96, 512, "needs N and K of 128 and more, got 96 x 512"),
        (FlashInferCutlass(), 144, 512, "needs N to be a multiple of 32, got 144"),
        (FlashInferCutlass(), 128, 100, None),
        (FlashInferCutlass(), 1856, 2688, None),
        (FlashInferTrtllm(), 1856, 512, "needs N to be a multiple of 128, got 1856"),
        (FlashInferTrtllm(), 2688, 1856, "needs K to be a multiple of 256, got 1856"),
        (CublasLinear(), 40, 32, "needs N to be a multiple of 16, got 40"),
    ],
)
def test_which_shapes_each_takes(backend: Any, n: int, k: int, reason: str | None) -> None:
    assert backend.declines(spec(n, k), gpu(10, 0)) == reason


@needs_triton
def test_what_is_missing_is_named(library: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    library.supported = SUPPORTED | {"cutlass": set()}
    found = FlashInferCutlass().declines(spec(), gpu(10, 0))
    assert found == "flashinfer 0.7.4 has no product cutlass of MXFP8 for compute capability 10.0"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install nvidia-cutlass-dsl" in str(FlashInferCuteDsl().declines(spec(), gpu(10, 0)))
    old = SimpleNamespace(__version__="0.1")
    monkeypatch.setitem(sys.modules, "flashinfer", old)
    assert "0.1 has no mm_mxfp8" in str(FlashInferCutlass().declines(spec(), gpu(10, 0)))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "is not installed" in str(FlashInferCutlass().declines(spec(), gpu(10, 0)))
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert "CUDA 12.8 or later, and this one has 12.6" in str(CublasLinear().declines(spec(), gpu(10, 0)))
    assert FlashInferTrtllm().declines(spec(dtype=torch.float16), gpu(10, 0)) == "torch.float16 activations"


@needs_triton
def test_the_order_of_auto_and_a_name_that_cannot_run(library: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert Kernels(gpu(10, 0), torch.bfloat16).linear(spec()).backend.name == "flashinfer_cutedsl"
    assert Kernels(gpu(12, 0), torch.bfloat16).linear(spec()).backend.name == "flashinfer_cutlass"
    assert Kernels(gpu(10, 0), torch.bfloat16, "flashinfer_trtllm").linear(spec()).backend.name == "flashinfer_trtllm"
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    choice = Kernels(gpu(10, 0), torch.bfloat16).linear(spec())
    assert choice.backend.name == "cublas"
    assert "flashinfer is not installed" in {one.backend: one.reason for one in choice.declined}["flashinfer_cutlass"]
    with pytest.raises(BackendError, match=r"flashinfer_cutlass, which declines: flashinfer is not installed.*auto, cublas"):
        Kernels(gpu(10, 0), torch.bfloat16, "flashinfer_cutlass").linear(spec())


@pytest.mark.parametrize("kind", FLASHINFER)
@pytest.mark.parametrize("m", [1, 7, 33, 130])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_library_reads_the_operands_that_were_meant(library: FakeFlashInfer, kind: Any, m: int, with_bias: bool) -> None:
    n, k = (256, 512) if kind is FlashInferTrtllm else (160, 300)
    generator = torch.Generator().manual_seed(m)
    # Columns of unlike size: a scale that is read for its neighbour's shows.
    spread = torch.exp2(torch.randint(-6, 7, (k,), generator=generator).float())
    mx = mxfp8.quantize(torch.randn(n, k, generator=generator) / spread)
    x = (torch.randn(m, k, generator=generator) * spread).to(torch.bfloat16)
    bias = torch.randn(n, generator=generator).to(torch.bfloat16) if with_bias else None
    backend = kind()
    prepared = backend.prepare(mx, bias)
    assert len(library.calls) == 1, "one product is tried when the weight is loaded"
    found = backend.run(x, prepared)
    expected, magnitude = product(mxfp8.dequantize(mxfp8.quantize(x.float())), mxfp8.dequantize(mx))
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
        # The result is rounded before the bias is added, so that the first rounding is one of terms and not of the sum.
        assert float((found.double() - expected).abs().max()) <= 2**-7 * float(magnitude.max())
    else:
        assert_matches(found, expected, BF16, magnitude)
    last = library.calls[-1]
    assert (last["backend"], last["out_dtype"]) == (backend.word, torch.bfloat16)
    assert last["use_8x4_sf_layout"] is (kind is FlashInferTrtllm and m <= 32)
    assert last["shapes"] == ((m, -(-k // 32) * 32), (-(-k // 32) * 32, n))
    assert backend.run(x[:0], prepared).shape == (0, n)


@pytest.mark.usefixtures("library")
def test_a_library_that_fails_does_so_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("nvcc was not found")

    monkeypatch.setattr(FakeFlashInfer, "mm_mxfp8", broken)
    with pytest.raises(
        BackendError, match=r"\[128 x 128\].*flashinfer_cutlass, whose library failed.*nvcc was not found.*dequant"
    ):
        FlashInferCutlass().prepare(mxfp8.quantize(torch.ones(128, 128)), None)


def test_a_weight_that_they_cannot_take_is_refused() -> None:
    with pytest.raises(TypeError, match="cublas takes an MXTensor"):
        CublasLinear().prepare(torch.ones(16, 32), None)
    mx = mxfp8.quantize(torch.ones(16, 32))
    mx.scale[3] = mxfp8.SCALE_NAN
    with pytest.raises(ValueError, match="NaN among the scales"):
        CublasLinear().prepare(mx, None)


@pytest.mark.parametrize("m", [1, 130])
def test_cublas_is_told_recipe_and_layout(monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    def scaled_mm(*arguments: Any) -> Tensor:
        a, b, a_scale, a_recipe, b_scale, b_recipe, a_swizzle, b_swizzle, bias, dtype = arguments
        assert a_recipe is b_recipe is ScalingType.BlockWise1x32
        assert a_swizzle is b_swizzle is SwizzleType.SWIZZLE_32_4_4
        assert a_scale.dtype == b_scale.dtype == torch.float8_e8m0fnu
        y = read(a, a_scale.view(torch.uint8), 128) @ read(b.t(), b_scale.view(torch.uint8), 128).T
        result: Tensor = (y + bias.double()).to(dtype)
        return result

    monkeypatch.setattr(vendor, "scaled_mm", scaled_mm)
    monkeypatch.setattr(vendor, "quantize_rows", quantize)
    mx, x = mxfp8.quantize(torch.randn(144, 100)), torch.randn(m, 100).to(torch.bfloat16)
    bias = torch.randn(144).to(torch.bfloat16)
    found = CublasLinear().run(x, CublasLinear().prepare(mx, bias))
    expected, magnitude = product(mxfp8.dequantize(mxfp8.quantize(x.float())), mxfp8.dequantize(mx))
    assert_matches(found, expected + bias.double(), BF16, magnitude + bias.double().abs())


def test_torch_takes_these_arguments() -> None:
    """Torch's own check of dtypes, recipe and sizes of scales, on tensors without memory."""
    with FakeTensorMode():
        data = torch.empty(144, 128, dtype=torch.float8_e4m3fn)
        scale = torch.empty(1024, dtype=torch.uint8)
        weight = VendorLinearWeight(data, LaidOutScales(scale, ScaleLayout.TILES_128X4, 144, 4), None)
        a = BlockQuantized(data[:7], LaidOutScales(scale[:512], ScaleLayout.TILES_128X4, 7, 4))
        y = CublasLinear().multiply(a, weight, torch.bfloat16)
        assert (tuple(y.shape), y.dtype) == ((7, 144), torch.bfloat16)
        too_many = BlockQuantized(data[:7], weight.scales)
        with pytest.raises(RuntimeError, match="scale"):
            CublasLinear().multiply(too_many, weight, torch.bfloat16)


def test_the_real_library_has_this_signature() -> None:
    try:
        real = importlib.import_module("flashinfer")
    except ImportError:
        pytest.skip("flashinfer is not installed")
    options = {"out_dtype": torch.bfloat16, "use_8x4_sf_layout": False, "backend": "cutlass"}
    inspect.signature(real.mm_mxfp8).bind(None, None, None, None, **options)
    for word, numbers in SUPPORTED.items():
        assert all(real.mm_mxfp8.is_backend_supported(word, number) for number in numbers)
    rows = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 4).contiguous()
    assert torch.equal(real.shuffle_matrix_a(rows, 128), shuffle(rows, 128))
