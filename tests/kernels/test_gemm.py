"""The GPU's dense products: configurations, instructions, and results against fp64 products of the same operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eightfold.kernels import gemm, jit
from eightfold.kernels.cuda import DequantLinear, FoldLinear
from eightfold.kernels.quantize import quantize_tokens, quantize_tokens_reference
from eightfold.kernels.tuning import BUCKETS, LIBRARY, TABLES, Gpu, TileConfig, choose_config, fit, load_table, rule
from eightfold.quant import mxfp8
from tests.kernels.ahead_of_time import ptx
from tests.kernels.operands import fold_product, make, tokens
from tests.oracle import assert_matches, product
from tests.tolerances import BF16, FP8_TENSOR_CORE

gpu_test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")

H200 = Gpu("NVIDIA H200", 132, 227 << 10, True)
ADA = Gpu("NVIDIA L40S", 142, 99 << 10, False)


@pytest.mark.parametrize("gpu", [H200, ADA])
@pytest.mark.parametrize("n", [1, 32, 1856, 4096, 10304, 131072])
@pytest.mark.parametrize("library", [True, False])
def test_every_shape_has_a_configuration_that_fits(gpu: Gpu, n: int, library: bool) -> None:
    for num_tokens in (1, 7, 16, 17, 64, 65, 127, 129, 512, 8192):
        config = choose_config(gpu, n, 4096, num_tokens, library=library)
        assert config.kernel == "tile" or library
        assert config.shared_bytes < gpu.shared_bytes
        if config.kernel == "tile":
            assert config.block_k >= 64
            assert config.num_stages >= 2


def test_the_rule_follows_the_size_of_the_gpu() -> None:
    assert rule(4096, 16, 132, library=True).block_k == 512
    assert rule(28672, 16, 132, library=True).block_k == 256
    assert rule(4096, 256, 132, library=True).block_m == 128
    assert rule(28672, 2048, 132, library=True) == LIBRARY
    assert rule(28672, 2048, 132, library=False).kernel == "tile"


def test_shipped_tables_hold_exceptions_only() -> None:
    tables = sorted(TABLES.glob("*.json"))
    assert [path.stem for path in tables] == ["nvidia_h200"]
    for (n, _, bucket), config in load_table("NVIDIA H200").items():
        assert bucket in BUCKETS
        assert fit(config, H200.shared_bytes) == config
        assert config != fit(rule(n, bucket, H200.num_sms, library=True), H200.shared_bytes)


def compile_fold(capability: int, config: TileConfig) -> str:
    types = dict.fromkeys(("token_scale_ptr", "row_scale_ptr"), "*fp32") | dict.fromkeys(("bias_ptr", "y_ptr"), "*bf16")
    types |= {"w_ptr": "*u8", "a_desc": f"tensordesc<fp8e4nv[{config.block_m},{config.block_k}]>"}
    types["w_desc"] = f"tensordesc<fp8e4nv[{config.block_n},{config.block_k}]>"
    blocks = {"block_n": config.block_n, "block_m": config.block_m, "block_k": config.block_k}
    overlap = capability >= 90
    constants = {"has_bias": True, "max_imprecise": None, "prefetch": config.prefetch if overlap else 0, "overlap": overlap}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return ptx(gemm.fold_gemm_kernel, capability, types, constants | blocks, **options)


@needs_triton
@pytest.mark.parametrize("num_tokens", [1, 64, 256])
def test_fold_multiplies_fp8_by_the_copy_engine_on_hopper(num_tokens: int) -> None:
    text = compile_fold(90, rule(4096, num_tokens, 132, library=False))
    assert "wgmma.mma_async.sync.aligned.m64n" in text
    assert "k32.f32.e4m3.e4m3" in text
    assert "cp.async.bulk.tensor.2d" in text
    assert "griddepcontrol.wait" in text
    assert "prefetch.global.L2" in text


@needs_triton
@pytest.mark.parametrize("capability", [89, 120])
def test_fold_multiplies_fp8_on_gpus_without_wgmma(capability: int) -> None:
    text = compile_fold(capability, fit(rule(4096, 1, 132, library=False), ADA.shared_bytes))
    assert "e4m3.e4m3.f32" in text
    assert "mma.sync.aligned.m16n8k32" in text


@needs_triton
@pytest.mark.parametrize(
    ("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma.mma_async"), (100, "tcgen05.mma"), (120, "mma.sync")]
)
def test_dequant_multiplies_bf16_everywhere(capability: int, instruction: str) -> None:
    types = {"x_ptr": "*bf16", "w_ptr": "*u8", "scale_ptr": "*u8", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    constants = {"has_bias": True, "block_n": 64, "block_m": 16, "block_k": 128}
    text = ptx(gemm.dequant_gemm_kernel, capability, types, constants, num_warps=4, num_stages=4)
    assert instruction in text
    assert "bf16" in text
    assert "cp.async" in text


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `torch.empty` comes back full of NaN."""
    empty = torch.empty

    def full_of_nan(*args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = empty(*args, **kwargs)
        made.view(torch.uint8).fill_(0x7F if made.dtype == torch.float8_e4m3fn else 0xFF)
        return made

    monkeypatch.setattr(torch, "empty", full_of_nan)


@pytest.mark.gpu
@gpu_test
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (32, 32), (1856, 576), (64, 2688), (130, 33), (2688, 1856), (16, 8208)])
@pytest.mark.parametrize("m", [1, 7, 16, 33, 64, 127, 129, 600])
def test_fold_equals_the_product_of_its_operands(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    bias = torch.randn(n, device="cuda").to(dtype) if m % 2 else None
    prepared = FoldLinear().prepare(make(n, k), bias)
    x = tokens(m, k, dtype)
    found = FoldLinear().run(x, prepared)
    assert found.dtype == dtype
    expected, magnitude = fold_product(*quantize_tokens_reference(x), prepared.weight)
    assert_matches(found, expected, FP8_TENSOR_CORE, magnitude)


@pytest.mark.gpu
@gpu_test
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "config",
    [
        TileConfig("tile", 64, 16, 512, 4, 4, 512),
        TileConfig("tile", 64, 64, 256, 6, 4, 1024),
        TileConfig("tile", 64, 128, 128, 8, 4),
        TileConfig("tile", 128, 64, 128, 4, 4, 1024),
        TileConfig("tile", 128, 128, 128, 6, 8),
        TileConfig("tile", 128, 256, 128, 4, 8),
    ],
)
def test_every_tile_and_what_fp32_accumulation_gains(config: TileConfig) -> None:
    prepared = FoldLinear().prepare(make(300, 4112), None)
    a, scale = quantize_tokens(tokens(70, 4112), native=True, overlap=False)
    expected, magnitude = fold_product(a, scale, prepared.weight)
    norms = []
    for limit in (None, 64):
        found = gemm.fold_gemm(a, scale, prepared.weight, config, torch.float32, overlap=True, max_imprecise=limit)
        assert_matches(found, expected, FP8_TENSOR_CORE, magnitude)
        norms.append(float((found.double() - expected).norm()))
    assert norms[1] < norms[0] / 4


@pytest.mark.gpu
@gpu_test
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("n", "k"), [(1, 1), (32, 32), (1856, 576), (130, 33), (2688, 1856)])
@pytest.mark.parametrize("m", [1, 7, 33, 64, 65, 129])
def test_dequant_is_exact_but_for_the_rounding_of_the_result(m: int, n: int, k: int) -> None:
    bias = torch.randn(n, device="cuda").bfloat16() if m % 2 else None
    weight = make(n, k)
    x = tokens(m, k)
    found = DequantLinear().run(x, DequantLinear().prepare(weight, bias))
    expected, magnitude = product(x, mxfp8.dequantize(weight))
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    assert_matches(found, expected, BF16, magnitude)
