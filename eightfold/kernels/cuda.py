"""The GPU's backends for dense products: `fold` (FP8 x FP8 on folded weights) and `dequant` (exact weights in bf16).

The kernels and what bounds them are in `gemm.py` and `quantize.py`; here a weight is brought into the layout that they take,
and each product gets its configuration. `run` never waits for the GPU and allocates through torch's caching allocator alone, so
it can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from eightfold.kernels import gemm, jit
from eightfold.kernels.gemm import FoldedWeight
from eightfold.kernels.operations import LinearSpec
from eightfold.kernels.quantize import dequantize_mxfp8, fold_mxfp8, quantize_tokens
from eightfold.kernels.registry import Hardware
from eightfold.kernels.tuning import Gpu, choose_config
from eightfold.quant.fp8 import FP8Tensor, WeightTensor
from eightfold.quant.mxfp8 import SCALE_BIAS, SCALE_NAN, MXTensor

# A fold may change a weight by this much, as a relative Frobenius norm: 1/265 of what MXFP8 itself changed. An element changes
# by 2^-10 of its row's scale at most; under the ceil rule the row's largest is over 224 scales, so sqrt(K) * 4.4e-6 bounds it.
MAX_FOLD_ERROR = 1e-4
# Up to this many tokens, widening W again for every tile of tokens is cheaper than writing it out in bf16 once.
_DEQUANT_TILE_TOKENS = 64

_NATIVE_E4M3 = (8, 9)
HOPPER = (9, 0)
# Shared memory that one program can have, by compute capability.
_SHARED_BYTES = {(8, 9): 99 << 10, (9, 0): 227 << 10}


@dataclass(frozen=True, slots=True)
class FoldLinearWeight:
    """What `FoldLinear.prepare` makes.

    Attributes:
        weight: the operands of the product.
        in_features: K, before padding.
        relative_error: what folding changed, over the norm of the MXFP8 weight; for `inspect`.
        gpu: where the weight lives.
        overlap: whether that GPU lets a launch begin before the kernel ahead of it ends.
    """

    weight: FoldedWeight
    in_features: int
    relative_error: float
    gpu: Gpu
    overlap: bool


class FoldLinear:
    """y = x Wᵀ + b with W under one power of two a row and x in FP8 with a scale a token."""

    name = "fold"

    def declines(self, spec: LinearSpec, hardware: Hardware) -> str | None:
        """Needs FP8 tensor cores (compute capability 8.9 or 9.0), bf16 or fp16 activations, an MXFP8 weight that folds well."""
        reason = declines_fold(spec.weight_format, spec.activation_dtype, hardware)
        return reason or jit.MISSING or (None if spec.weight is None else declines_values(spec.weight))

    def prepare(self, weight: WeightTensor, bias: Tensor | None) -> FoldLinearWeight:
        """Fold the weight; its MXFP8 form is not kept."""
        if not isinstance(weight, MXTensor):
            raise TypeError(f"fold takes an MXTensor, got a {type(weight).__name__}")
        gpu, capability = describe(weight.data.device)
        folded = fold_mxfp8(weight, native=True)
        row_scale = torch.exp2(folded.row_scale.float() - SCALE_BIAS)  # [N]
        return FoldLinearWeight(
            weight=FoldedWeight(folded.data, row_scale, bias),
            in_features=weight.shape[1],
            relative_error=folded.relative_error,
            gpu=gpu,
            overlap=capability >= HOPPER,
        )

    def run(self, x: Tensor, prepared: FoldLinearWeight) -> Tensor:
        """y `[M, N]` from x `[M, K]` in bf16 or fp16."""
        weight = prepared.weight
        num_tokens, n = x.shape[0], weight.data.shape[0]
        if num_tokens == 0:
            return x.new_empty((0, n))
        x = x if x.stride(1) == 1 else x.contiguous()
        library = x.dtype == torch.bfloat16 and n % 16 == 0
        config = choose_config(prepared.gpu, n, prepared.in_features, num_tokens, library=library)
        a, token_scale = quantize_tokens(x, native=True, overlap=prepared.overlap)
        if config.kernel == "library":
            return gemm.library_gemm(a, token_scale, weight)
        return gemm.fold_gemm(a, token_scale, weight, config, x.dtype, overlap=prepared.overlap)


class DequantLinear:
    """y = x Wᵀ + b in bf16, with W widened exactly: in registers for few tokens, whole and through cuBLAS for many.

    A weight that is not quantized has nothing to widen and goes to cuBLAS as it is.
    """

    name = "dequant"

    def declines(self, spec: LinearSpec, hardware: Hardware) -> str | None:
        """Needs bf16 tensor cores (compute capability 8.0 and up); weights in MXFP8, or dense in the activation dtype."""
        capability = hardware.capability
        if hardware.device.type != "cuda" or capability is None:
            return "needs a CUDA GPU"
        if capability < (8, 0):
            return f"needs bf16 tensor cores, of compute capability 8.0 and up, and this GPU has {_dotted(capability)}"
        if spec.weight_format == str(spec.activation_dtype).removeprefix("torch."):
            return None
        if spec.weight_format != "mxfp8":
            return f"{spec.weight_format} weights with {spec.activation_dtype} activations"
        if spec.activation_dtype != torch.bfloat16:
            return f"{spec.activation_dtype} activations: only bf16 holds every MXFP8 number exactly"
        return jit.MISSING

    def prepare(self, weight: WeightTensor, bias: Tensor | None) -> tuple[MXTensor | Tensor, Tensor | None]:
        """Keep both as they are."""
        if isinstance(weight, FP8Tensor):
            raise TypeError("dequant takes weights in MXFP8 or dense ones, got an FP8Tensor")
        if isinstance(weight, MXTensor) and bool((weight.scale == SCALE_NAN).any()):
            raise ValueError("dequant takes finite values, got NaN among the scales")
        return weight, bias

    def run(self, x: Tensor, prepared: tuple[MXTensor | Tensor, Tensor | None]) -> Tensor:
        """y `[M, N]` from x `[M, K]`, in the dtype of x."""
        weight, bias = prepared
        if not isinstance(weight, MXTensor):
            return torch.nn.functional.linear(x, weight, bias)
        if 0 < x.shape[0] <= _DEQUANT_TILE_TOKENS:
            return gemm.dequant_gemm(x if x.stride(1) == 1 else x.contiguous(), weight, bias)
        return torch.nn.functional.linear(x, dequantize_mxfp8(weight, x.dtype), bias)


@functools.cache
def describe(device: torch.device) -> tuple[Gpu, tuple[int, int]]:
    """What configurations depend on, and the compute capability."""
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    shared_bytes = _SHARED_BYTES[capability]
    return Gpu(properties.name, properties.multi_processor_count, shared_bytes, capability >= HOPPER), capability


def declines_fold(weight_format: str, activation_dtype: torch.dtype, hardware: Hardware) -> str | None:
    """Why FP8 products on folded weights are not for this work on this GPU, whatever the weights' values are."""
    capability = hardware.capability
    if hardware.device.type != "cuda" or capability is None:
        return "needs a CUDA GPU"
    if capability < _NATIVE_E4M3:
        return f"needs FP8 tensor cores, of compute capability 8.9 or 9.0, and this GPU has {_dotted(capability)}"
    if capability >= (10, 0):
        return f"is not tested on compute capability {_dotted(capability)}"
    if weight_format != "mxfp8":
        return f"{weight_format} weights"
    if activation_dtype not in (torch.bfloat16, torch.float16):
        return f"{activation_dtype} activations"
    return None


def declines_values(weight: MXTensor) -> str | None:
    """Why this weight should not be folded, where it should not; asked when it is whole."""
    error = fold_mxfp8(weight, native=True).relative_error
    within = error <= MAX_FOLD_ERROR
    return None if within else f"folding changes the weight by {error:.1e}, over the bound of {MAX_FOLD_ERROR:.0e}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
