"""Which backends exist, in which order each kind of hardware tries them, and the choices for one model.

The tables are the whole policy of `auto`. A backend is added by its class and its place in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from eightfold.kernels.chunked_mamba import ChunkedMamba
from eightfold.kernels.cpu import CpuAttention, CpuFused, CpuLinear
from eightfold.kernels.cpu_moe import CpuMoe
from eightfold.kernels.cuda import DequantLinear, FoldLinear
from eightfold.kernels.cuda_moe import FoldMoe
from eightfold.kernels.cuda_native import NativeLinear
from eightfold.kernels.operations import (
    AttentionBackend,
    AttentionSpec,
    FusedBackend,
    LinearBackend,
    LinearSpec,
    LowLatencyBackend,
    MambaBackend,
    MambaSpec,
    MoeBackend,
    MoeSpec,
)
from eightfold.kernels.reference import ReferenceAttention, ReferenceFused, ReferenceLinear
from eightfold.kernels.reference_mixers import GeneralProduct, ReferenceMamba, ReferenceMoe
from eightfold.kernels.registry import Choice, Hardware, check_name, choose
from eightfold.kernels.vendor import CublasLinear, FlashInferCuteDsl, FlashInferCutlass, FlashInferTrtllm

LINEAR: Mapping[str, tuple[LinearBackend, ...]] = MappingProxyType(
    {
        "cpu": (CpuLinear(), ReferenceLinear()),
        # FlashInferTrtllm takes nothing that those ahead of it leave: it runs where it is named.
        "cuda": (
            FoldLinear(),
            FlashInferCuteDsl(),
            FlashInferCutlass(),
            CublasLinear(),
            NativeLinear(),
            DequantLinear(),
            FlashInferTrtllm(),
            ReferenceLinear(),
        ),
    }
)
ATTENTION: Mapping[str, tuple[AttentionBackend, ...]] = MappingProxyType(
    {"cpu": (CpuAttention(), ReferenceAttention()), "cuda": (ReferenceAttention(),)}
)
FUSED: Mapping[str, tuple[FusedBackend, ...]] = MappingProxyType(
    {"cpu": (CpuFused(), ReferenceFused()), "cuda": (ReferenceFused(),)}
)

MOE: Mapping[str, tuple[MoeBackend, ...]] = MappingProxyType(
    {"cpu": (CpuMoe(), ReferenceMoe()), "cuda": (FoldMoe(), ReferenceMoe())}
)
MAMBA: Mapping[str, tuple[MambaBackend, ...]] = MappingProxyType(
    {"cpu": (ChunkedMamba(), ReferenceMamba()), "cuda": (ChunkedMamba(), ReferenceMamba())}
)
LOW_LATENCY: Mapping[str, tuple[LowLatencyBackend, ...]] = MappingProxyType(
    {"cpu": (GeneralProduct(),), "cuda": (GeneralProduct(),)}
)

# Words that SGLang's flags accept and that are not built here: refused with a sentence of their own.
UNBUILT_LINEAR = frozenset(
    {
        "aiter",
        "cutlass",
        "deep_gemm",
        "flashinfer_deepgemm",
    }
)
UNBUILT_MOE = frozenset(
    {
        "aiter",
        "cutlass",
        "deep_gemm",
        "experimental_sgl_marlin",
        "experimental_sgl_trtllm",
        "flashinfer_cutedsl",
        "flashinfer_cutlass",
        "flashinfer_megamoe",
        "flashinfer_mxfp4",
        "flashinfer_trtllm",
        "flashinfer_trtllm_routed",
        "hpc_ops",
        "humming",
        "intel_xpu",
        "lora_cutedsl",
        "lora_marlin",
        "lora_triton",
        "marlin",
        "megamoe",
        "triton",
        "triton_kernel",
    }
)
# Formats of weights for which a backend can be named.
QUANTIZED = ("mxfp8", "fp8")
UNBUILT_ATTENTION = frozenset(
    {"aiter", "fa3", "fa4", "flashinfer", "flashmla", "flex_attention", "torch_native", "triton", "trtllm_mha"}
)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The operations of one model on one machine: what layers ask when their weights are whole.

    Attributes:
        hardware: where it runs.
        activation_dtype: dtype of the activations.
        linear_backend: "auto" or the name that the user gave for quantized products.
        attention_backend: the same for attention.
        moe_backend: the same for quantized experts.
        state_dtype: dtype of the states of recurrent layers.

    Raises:
        BackendError: a name that no backend has.
    """

    hardware: Hardware
    activation_dtype: torch.dtype
    linear_backend: str = "auto"
    attention_backend: str = "auto"
    moe_backend: str = "auto"
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_name("fp8_gemm_backend", self.linear_backend, LINEAR, UNBUILT_LINEAR)
        check_name("attention_backend", self.attention_backend, ATTENTION, UNBUILT_ATTENTION)
        check_name("moe_runner_backend", self.moe_backend, MOE, UNBUILT_MOE)

    def linear(self, spec: LinearSpec) -> Choice[LinearBackend]:
        """The backend of one dense product. The user's word counts for quantized weights; others go by `auto`.

        Raises:
            BackendError: the named backend cannot run it, naming the layer, its shape and what would work.
        """
        subject = f"linear {spec.layer} [{spec.out_features} x {spec.in_features}] {spec.weight_format}"
        requested = self.linear_backend if spec.weight_format in QUANTIZED else "auto"
        candidates = LINEAR.get(self.hardware.device.type, ())
        return choose(subject, candidates, spec, self.hardware, requested=requested)

    def attention(self, spec: AttentionSpec) -> Choice[AttentionBackend]:
        """The backend of one layer's attention; raises BackendError as `linear` does."""
        subject = f"attention [{spec.num_heads} heads over {spec.num_kv_heads}, {spec.head_dim} wide]"
        candidates = ATTENTION.get(self.hardware.device.type, ())
        return choose(subject, candidates, spec, self.hardware, requested=self.attention_backend)

    def moe(self, spec: MoeSpec) -> Choice[MoeBackend]:
        """The backend of a layer's experts, for which the user's word counts as in `linear`; raises as that does."""
        shape = f"{spec.num_experts} x {spec.intermediate_size} x {spec.in_features}"
        subject = f"{'gated ' if spec.gated else ''}experts {spec.layer} [{shape}] {spec.weight_format}"
        requested = self.moe_backend if spec.weight_format in QUANTIZED else "auto"
        candidates = MOE.get(self.hardware.device.type, ())
        return choose(subject, candidates, spec, self.hardware, requested=requested)

    def mamba(self, spec: MambaSpec) -> Choice[MambaBackend]:
        """The backend of a recurrent layer."""
        shape = f"{spec.num_heads} heads of {spec.head_dim} x {spec.state_size}"
        return choose(f"mamba2 {spec.layer} [{shape}]", MAMBA.get(self.hardware.device.type, ()), spec, self.hardware)

    def low_latency(self, spec: LinearSpec) -> Choice[LowLatencyBackend]:
        """The backend for few tokens of a product that asks for one; "general" leaves them to the general product."""
        subject = f"low latency {spec.layer} [{spec.out_features} x {spec.in_features}] {spec.weight_format}"
        return choose(subject, LOW_LATENCY.get(self.hardware.device.type, ()), spec, self.hardware)

    def fused(self) -> Choice[FusedBackend]:
        """The backend of the small operations."""
        return choose("fused operations", FUSED.get(self.hardware.device.type, ()), self.activation_dtype, self.hardware)
