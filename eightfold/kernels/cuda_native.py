"""The backend `triton` for dense products, on GPUs whose tensor cores take MXFP8: the kernel is in `native_gemm.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eightfold.kernels import jit
from eightfold.kernels.native_gemm import native_gemm
from eightfold.kernels.operations import LinearSpec
from eightfold.kernels.quantize_rows import BlockQuantized, quantize_rows
from eightfold.kernels.registry import Hardware
from eightfold.kernels.scale_layouts import ScaleLayout
from eightfold.quant.fp8 import WeightTensor
from eightfold.quant.mxfp8 import SCALE_NAN, MXTensor

# Compute capabilities with a block-scaled instruction, and the word by which `Hardware.features` names AMD's GPU that has one.
BLOCK_SCALED = ((10, 0), (10, 3), (12, 0), (12, 1))
GFX950 = "gfx950"


@dataclass(frozen=True, slots=True)
class NativeLinearWeight:
    """What `NativeLinear.prepare` makes: the weight as it came, its bias, and whether launches may overlap."""

    weight: MXTensor
    bias: Tensor | None
    overlap: bool


class NativeLinear:
    """y = x Wᵀ + b with both sides in MXFP8 and the scales applied by the tensor core."""

    name = "triton"

    def declines(self, spec: LinearSpec, hardware: Hardware) -> str | None:
        """Needs block-scaled tensor cores, an MXFP8 weight, and bf16 or fp16 activations."""
        return declines_block_scaled(spec, hardware, amd=True) or jit.MISSING

    def prepare(self, weight: WeightTensor, bias: Tensor | None) -> NativeLinearWeight:
        """Keep the weight as it is."""
        if not isinstance(weight, MXTensor):
            raise TypeError(f"triton takes an MXTensor, got a {type(weight).__name__}")
        if bool((weight.scale == SCALE_NAN).any()):
            raise ValueError("triton takes finite values, got NaN among the scales")
        is_nvidia = weight.data.is_cuda and torch.version.hip is None
        return NativeLinearWeight(MXTensor(weight.data.contiguous(), weight.scale.contiguous()), bias, is_nvidia)

    def run(self, x: Tensor, prepared: NativeLinearWeight) -> Tensor:
        """y `[M, N]` from x `[M, K]` in bf16 or fp16."""
        if x.shape[0] == 0:
            return x.new_empty((0, prepared.weight.shape[0]))
        x = x if x.stride(1) == 1 else x.contiguous()
        a = quantize_rows(x, ScaleLayout.LINEAR, native=True, overlap=prepared.overlap)
        assert isinstance(a, BlockQuantized)
        return native_gemm(a, prepared.weight, prepared.bias, x.dtype, overlap=prepared.overlap)


def declines_block_scaled(spec: LinearSpec, hardware: Hardware, *, amd: bool) -> str | None:
    """Why a product of MXFP8 by MXFP8 is not for this work on this GPU, where it is not.

    Args:
        amd: whether gfx950 will do.
    """
    capability = hardware.capability
    is_amd = amd and GFX950 in hardware.features
    if hardware.device.type != "cuda" or (capability is None and not is_amd):
        return "needs a CUDA GPU or gfx950" if amd else "needs a CUDA GPU"
    if capability is not None and capability not in BLOCK_SCALED:
        known = ", ".join(f"{major}.{minor}" for major, minor in BLOCK_SCALED)
        other = " or gfx950" if amd else ""
        here = f"{capability[0]}.{capability[1]}"
        return f"needs block-scaled tensor cores, of compute capability {known}{other}, and this GPU has {here}"
    if spec.weight_format != "mxfp8":
        return f"{spec.weight_format} weights"
    if spec.activation_dtype not in (torch.bfloat16, torch.float16):
        return f"{spec.activation_dtype} activations"
    return None
