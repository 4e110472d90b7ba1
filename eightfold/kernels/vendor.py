"""Products of other libraries for GPUs with block-scaled tensor cores: three of FlashInfer's and that of cuBLAS.

All compute y = x Wᵀ + b with both sides in MXFP8, as `cuda_native.py` does, and differ in who wrote the kernel. The operands
are ours: weights as they were loaded, tokens from `quantize_rows.py`, so that the format and its rounding are the same whatever
library multiplies. What a library wants of them is the order of the scales (`scale_layouts.py` has the formulas) and, for
TensorRT-LLM, an order of the weight's rows.

| name | library, and its own word | scales of W | scales of x |
|---|---|---|---|
| flashinfer_cutlass | FlashInfer, "cutlass" | 128x4 | 128x4 |
| flashinfer_cutedsl | FlashInfer, "cute-dsl" | 128x4 | 128x4 |
| flashinfer_trtllm | FlashInfer, "trtllm" | rows shuffled, 128x4 | 8x4 for few tokens, else 128x4 |
| cublas | torch, `torch.nn.functional.scaled_mm` | 128x4 | 128x4 |

FlashInfer is optional, and is imported when a backend of it is asked for a GPU that could run it. It compiles kernels at first
use; so `prepare` tries every product on one token, and what does not run fails at load and not at a request. Nothing here waits
for a launch of FlashInfer's to say that its input may be read: the tokens' quantization does not overlap with it.

Sources: FlashInfer 0.7.4, `mm_mxfp8` and the checks beside it; PyTorch 2.11, `torch.nn.functional.scaled_mm`; cuBLAS 12.9, the
layout of scaling factors of 32 elements.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from eightfold.errors import BackendError
from eightfold.kernels import jit
from eightfold.kernels.cuda_native import BLOCK_SCALED, declines_block_scaled
from eightfold.kernels.operations import LinearSpec
from eightfold.kernels.quantize_rows import BlockQuantized, quantize_rows
from eightfold.kernels.registry import Hardware
from eightfold.kernels.scale_layouts import LaidOutScales, ScaleLayout, arrange
from eightfold.quant.fp8 import WeightTensor
from eightfold.quant.mxfp8 import BLOCK_SIZE, SCALE_NAN, MXTensor

_DATA_CENTER = ((10, 0), (10, 3))
# The height of a tile of results, by which TensorRT-LLM orders the rows of a weight.
_SHUFFLE_TILE = 128


@dataclass(frozen=True, slots=True)
class VendorLinearWeight:
    """What `prepare` makes of a weight `[N, K]`.

    Attributes:
        data: `float8_e4m3fn [N, K']`, K padded with zeros to a multiple of 32; rows in the library's order.
        scales: its scales in 128x4, rows in the same order.
        bias: `[N]` or None.
    """

    data: Tensor
    scales: LaidOutScales
    bias: Tensor | None


class _VendorLinear:
    """What the four have in common.

    Attributes:
        name: the backend's name.
        capabilities: compute capabilities that the library has a kernel for.
        smallest: N and padded K must be this at least.
        multiples: N and padded K must be multiples of these.
        dtypes: of activations and results.
        few_tokens: up to this many, the library takes the scales of x in 8x4.
    """

    name: str
    capabilities: tuple[tuple[int, int], ...] = _DATA_CENTER
    smallest: int = 1
    multiples: tuple[int, int]
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    few_tokens: int = 0

    def declines(self, spec: LinearSpec, hardware: Hardware) -> str | None:
        """Needs a GPU and a shape that the library takes, an MXFP8 weight, bf16 or fp16 activations, and the library."""
        capability = hardware.capability
        if (reason := declines_block_scaled(spec, hardware, amd=False)) or capability is None:
            return reason
        if capability not in self.capabilities:
            known = " or ".join(_dotted(one) for one in self.capabilities)
            return f"needs compute capability {known}, and this GPU has {_dotted(capability)}"
        if spec.activation_dtype not in self.dtypes:
            return f"{spec.activation_dtype} activations"
        n, k = spec.out_features, _padded(spec.in_features)
        if min(n, k) < self.smallest:
            return f"needs N and K of {self.smallest} and more, got {spec.out_features} x {spec.in_features}"
        for letter, size, given, multiple in zip("NK", (n, k), (n, spec.in_features), self.multiples, strict=True):
            if size % multiple != 0:
                return f"needs {letter} to be a multiple of {multiple}, got {given}"
        return jit.MISSING or self.missing(capability)

    def missing(self, capability: tuple[int, int]) -> str | None:
        """What has to be installed for this GPU and is not."""
        raise NotImplementedError

    def prepare(self, weight: WeightTensor, bias: Tensor | None) -> VendorLinearWeight:
        """Lay the scales out, pad K, and try the product on one token.

        Raises:
            BackendError: the library failed at this shape.
            TypeError: the weight is not in MXFP8.
            ValueError: NaN among the scales.
        """
        if not isinstance(weight, MXTensor):
            raise TypeError(f"{self.name} takes an MXTensor, got a {type(weight).__name__}")
        if bool((weight.scale == SCALE_NAN).any()):
            raise ValueError(f"{self.name} takes finite values, got NaN among the scales")
        n, k = weight.shape
        data = weight.data.view(torch.uint8)
        data = torch.nn.functional.pad(data, (0, _padded(k) - k)) if k % BLOCK_SIZE else data.contiguous()
        data, scale = self.order_rows(data), self.order_rows(weight.scale)
        scales = arrange(scale, ScaleLayout.TILES_128X4)
        prepared = VendorLinearWeight(data.view(torch.float8_e4m3fn), scales, bias)
        dtype = torch.bfloat16 if bias is None else bias.dtype
        try:
            self.run(torch.zeros((1, k), dtype=dtype, device=data.device), prepared)
        except Exception as error:
            raise BackendError(
                f"linear [{n} x {k}] mxfp8",
                got=f"backend {self.name}, whose library failed when it was tried on one token: {error}",
                expected="another backend, such as dequant, or the library mended",
            ) from error
        return prepared

    def order_rows(self, rows: Tensor) -> Tensor:
        """Bytes `[N, ...]` of elements or of scales, rows in the order that the library wants."""
        return rows

    def layout(self, num_tokens: int) -> ScaleLayout:
        """How the scales of so many tokens lie."""
        return ScaleLayout.TILES_8X4 if num_tokens <= self.few_tokens else ScaleLayout.TILES_128X4

    def run(self, x: Tensor, prepared: VendorLinearWeight) -> Tensor:
        """y `[M, N]` from x `[M, K]` in bf16 or fp16."""
        if x.shape[0] == 0:
            return x.new_empty((0, prepared.data.shape[0]))
        x = x if x.stride(1) == 1 else x.contiguous()
        a = quantize_rows(x, self.layout(x.shape[0]), native=True, overlap=False)
        assert isinstance(a, BlockQuantized)
        return self.multiply(a, prepared, x.dtype)

    def multiply(self, a: BlockQuantized, prepared: VendorLinearWeight, dtype: torch.dtype) -> Tensor:
        """The library's product, bias included."""
        raise NotImplementedError


class _FlashInferLinear(_VendorLinear):
    """A product of `flashinfer.mm_mxfp8`. The bias is added to the rounded result: the library has none.

    Attributes:
        word: what the library calls it.
    """

    word: str
    smallest = 128  # below, the library says, results may be NaN

    def missing(self, capability: tuple[int, int]) -> str | None:
        """FlashInfer, a version with this product, or a product for this GPU."""
        try:
            library = _flashinfer()
        except ModuleNotFoundError as error:
            if error.name == "flashinfer":
                return "flashinfer is not installed (pip install flashinfer-python)"
            return f"flashinfer cannot be imported: {error}"
        except ImportError as error:
            return f"flashinfer cannot be imported: {error}"
        product = getattr(library, "mm_mxfp8", None)
        if product is None:
            return f"flashinfer {library.__version__} has no mm_mxfp8, which 0.7.4 has"
        if not product.is_backend_supported(self.word, capability[0] * 10 + capability[1]):
            here = _dotted(capability)
            return f"flashinfer {library.__version__} has no product {self.word} of MXFP8 for compute capability {here}"
        return None

    def multiply(self, a: BlockQuantized, prepared: VendorLinearWeight, dtype: torch.dtype) -> Tensor:
        """`mm_mxfp8` takes W as a column-major `[K, N]`, and scales in one dimension."""
        layout = self.layout(a.data.shape[0])
        y: Tensor = _flashinfer().mm_mxfp8(
            a.data,
            prepared.data.t(),
            a.scales.need(layout),
            prepared.scales.need(ScaleLayout.TILES_128X4),
            out_dtype=dtype,
            use_8x4_sf_layout=layout is ScaleLayout.TILES_8X4,
            backend=self.word,
        )
        return y if prepared.bias is None else y.add_(prepared.bias)


class FlashInferCutlass(_FlashInferLinear):
    """CUTLASS through FlashInfer, on every GPU with block-scaled tensor cores."""

    name = "flashinfer_cutlass"
    word = "cutlass"
    capabilities = BLOCK_SCALED
    multiples = (32, BLOCK_SIZE)


class FlashInferCuteDsl(_FlashInferLinear):
    """Kernels in the CuTe DSL through FlashInfer."""

    name = "flashinfer_cutedsl"
    word = "cute-dsl"
    multiples = (32, BLOCK_SIZE)

    def missing(self, capability: tuple[int, int]) -> str | None:
        """As for the others; and the package of the DSL, which FlashInfer asks for at the call."""
        if reason := super().missing(capability):
            return reason
        found = importlib.util.find_spec("cutlass") is not None
        return None if found else "the CuTe DSL is not installed (pip install nvidia-cutlass-dsl)"


class FlashInferTrtllm(_FlashInferLinear):
    """TensorRT-LLM's kernels through FlashInfer."""

    name = "flashinfer_trtllm"
    word = "trtllm"
    multiples = (128, 256)
    dtypes = (torch.bfloat16,)
    few_tokens = 32  # others that call it change to 8x4 here; not measured

    def order_rows(self, rows: Tensor) -> Tensor:
        """FlashInfer's own permutation within blocks of 32 rows; elements and scales move together."""
        shuffled: Tensor = _flashinfer().shuffle_matrix_a(rows, _SHUFFLE_TILE)
        return shuffled


class CublasLinear(_VendorLinear):
    """cuBLAS through torch, with scales in E8M0."""

    name = "cublas"
    multiples = (16, BLOCK_SIZE)

    def missing(self, capability: tuple[int, int]) -> str | None:
        """A CUDA toolkit whose cuBLAS has the product: 12.8 and up."""
        version = torch.version.cuda
        if version is None:
            return f"this torch is built without CUDA, and compute capability {_dotted(capability)} needs 12.8 or later"
        major, minor = (int(part) for part in version.split(".")[:2])
        return None if (major, minor) >= (12, 8) else f"needs a torch built with CUDA 12.8 or later, and this one has {version}"

    def multiply(self, a: BlockQuantized, prepared: VendorLinearWeight, dtype: torch.dtype) -> Tensor:
        """Names recipe and layout, where `torch._scaled_mm` would guess both from sizes."""
        scale_a, scale_b = (scales.need(ScaleLayout.TILES_128X4) for scales in (a.scales, prepared.scales))
        return scaled_mm(
            a.data,
            prepared.data.t(),
            scale_a.view(torch.float8_e8m0fnu),
            ScalingType.BlockWise1x32,
            scale_b.view(torch.float8_e8m0fnu),
            ScalingType.BlockWise1x32,
            SwizzleType.SWIZZLE_32_4_4,
            SwizzleType.SWIZZLE_32_4_4,
            prepared.bias,
            dtype,
        )


def _flashinfer() -> Any:
    return importlib.import_module("flashinfer")


def _padded(k: int) -> int:
    return -(-k // BLOCK_SIZE) * BLOCK_SIZE


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
