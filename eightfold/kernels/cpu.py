"""The CPU's backends: native kernels behind the contracts of `registry.py`.

The arithmetic is in `csrc/`, whose headers give the algorithms and what bounds them. Here shapes and dtypes are settled,
outputs are made and addresses taken. A prepared weight keeps its addresses as numbers: at two hundred calls a token, asking
tensors for them again would cost as much as a small product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eightfold.errors import InputError
from eightfold.kernels import native
from eightfold.kernels.operations import AttentionMetadata, AttentionSpec, LinearSpec, Routing
from eightfold.kernels.reference_mixers import gated_rms_norm, route
from eightfold.kernels.registry import Hardware
from eightfold.quant.fp8 import FP8Tensor, WeightTensor
from eightfold.quant.mxfp8 import SCALE_NAN, MXTensor

_ACTIVATION_DTYPES = (torch.float32, torch.bfloat16)
_WEIGHT_FORMATS = ("mxfp8", "bfloat16", "float16", "float32")
# E4M3's NaN is all ones under the sign.
_E4M3_MAGNITUDE = 0x7F


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """A weight as it was loaded, with the addresses that the kernels take.

    Attributes:
        tensors: what the addresses point into, kept alive.
        type_code: the weight's format, as csrc/types.h numbers it.
        data: address of the elements `[N, K]`.
        scale: address of the scales `[N, ceil(K / 32)]`, or 0.
        bias: address of the fp32 bias `[N]`, or 0.
        out_features: N.
        in_features: K.
    """

    tensors: tuple[Tensor, ...]
    type_code: int
    data: int
    scale: int
    bias: int
    out_features: int
    in_features: int


class CpuLinear:
    """y = x Wᵀ + b with W decoded on the fly: in registers for a few tokens, in panels that fit the cache for many."""

    name = "cpu"

    def declines(self, spec: LinearSpec, hardware: Hardware) -> str | None:
        """Needs a CPU, the native library, and fp32 or bf16 activations."""
        if spec.weight_format not in _WEIGHT_FORMATS:
            return f"{spec.weight_format} weights"
        return _declines(spec.activation_dtype, hardware)

    def prepare(self, weight: WeightTensor, bias: Tensor | None) -> CpuWeight:
        """Keep the weight's own storage, at 33/32 bytes an element for MXFP8, and the bias in fp32.

        Raises:
            InputError: an MXFP8 weight with a NaN among its elements or scales, which the kernels do not recognise.
        """
        kept: list[Tensor]
        if isinstance(weight, MXTensor):
            kept = [weight.data.contiguous(), weight.scale.contiguous()]
            type_code = native.MXFP8_CODE
            if _any_equal(kept[0], _E4M3_MAGNITUDE, _E4M3_MAGNITUDE) or _any_equal(kept[1], 0xFF, SCALE_NAN):
                raise InputError(f"MXFP8 weight {list(weight.shape)}", got="NaN", expected="finite elements and scales")
        elif isinstance(weight, FP8Tensor):
            raise TypeError("cpu takes weights in MXFP8 or dense ones, got an FP8Tensor")
        else:
            kept = [weight.contiguous()]
            type_code = native.TYPE_CODES[weight.dtype]
        if bias is not None:
            kept.append(bias.float().contiguous())
        return CpuWeight(
            tensors=tuple(kept),
            type_code=type_code,
            data=kept[0].data_ptr(),
            scale=kept[1].data_ptr() if isinstance(weight, MXTensor) else 0,
            bias=kept[-1].data_ptr() if bias is not None else 0,
            out_features=weight.shape[0],
            in_features=weight.shape[1],
        )

    def run(self, x: Tensor, prepared: CpuWeight) -> Tensor:
        """y `[M, N]` in the dtype of x `[M, K]`, summed in fp32."""
        if x.shape[1] != prepared.in_features:
            raise ValueError(f"x {list(x.shape)} does not fit a weight with K = {prepared.in_features}")
        x = x.contiguous()
        num_tokens = x.shape[0]
        y = x.new_empty((num_tokens, prepared.out_features))
        _library().linear(
            x.data_ptr(),
            native.TYPE_CODES[x.dtype],
            prepared.data,
            prepared.type_code,
            prepared.scale,
            prepared.bias,
            y.data_ptr(),
            num_tokens,
            prepared.out_features,
            prepared.in_features,
            torch.get_num_threads(),
        )
        return y


class CpuAttention:
    """Paged attention in one pass over the keys, with the softmax's maximum and sum carried along, all in fp32."""

    name = "cpu"

    def declines(self, spec: AttentionSpec, hardware: Hardware) -> str | None:
        """Needs a CPU, the native library, and fp32 or bf16 activations."""
        return _declines(spec.activation_dtype, hardware)

    def run(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Causal attention `[num_tokens, num_heads * head_dim]`; shapes as in `AttentionBackend.run`."""
        query, query_stride = _dense_heads(query)
        block_tables = metadata.block_tables
        num_seqs, max_blocks = block_tables.shape
        out = query.new_empty((query.shape[0], spec.num_heads * spec.head_dim))
        _library().attention(
            query.data_ptr(),
            query_stride,
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            out.data_ptr(),
            native.TYPE_CODES[query.dtype],
            block_tables.data_ptr(),
            metadata.query_start.data_ptr(),
            metadata.context_lens.data_ptr(),
            num_seqs,
            max_blocks,
            key_cache.shape[1],
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.scale,
            spec.sliding_window or 0,
            torch.get_num_threads(),
        )
        return out


class CpuFused:
    """The small operations, each in one pass over its input, with fp32 arithmetic inside."""

    name = "cpu"

    def declines(self, spec: torch.dtype, hardware: Hardware) -> str | None:
        """Needs a CPU, the native library, and fp32 or bf16 activations."""
        return _declines(spec, hardware)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `FusedBackend.rms_norm`."""
        x = x.contiguous()
        out = torch.empty_like(x)
        _norm(x, 0, weight, out, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `FusedBackend.add_rms_norm`. The sum is written into `residual`, which is returned, where that is contiguous."""
        x, residual = x.contiguous(), residual.contiguous()
        out = torch.empty_like(x)
        _norm(x, residual.data_ptr(), weight, out, eps)
        return out, residual

    def rotary(self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See `FusedBackend.rotary`. Works in place where heads lie side by side."""
        query, query_stride = _dense_heads(query)
        key, key_stride = _dense_heads(key)
        num_tokens, num_heads, head_dim = query.shape
        _library().rotary(
            query.data_ptr(),
            query_stride,
            num_heads,
            key.data_ptr(),
            key_stride,
            key.shape[1],
            native.TYPE_CODES[query.dtype],
            cos_sin.data_ptr(),
            positions.data_ptr(),
            num_tokens,
            head_dim,
            cos_sin.shape[1],
            torch.get_num_threads(),
        )
        return query, key

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `FusedBackend.silu_and_mul`."""
        x = x.contiguous()
        num_tokens, width = x.shape[0], x.shape[1] // 2
        out = x.new_empty((num_tokens, width))
        _library().silu_and_mul(
            x.data_ptr(), out.data_ptr(), native.TYPE_CODES[x.dtype], num_tokens, width, torch.get_num_threads()
        )
        return out

    def relu2(self, x: Tensor) -> Tensor:
        """See `FusedBackend.relu2`."""
        return x.relu().square_()

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
        """See `FusedBackend.gated_rms_norm`."""
        return gated_rms_norm(x, gate, weight, eps, group_size)

    def route(
        self, hidden_states: Tensor, gate: Tensor, correction_bias: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """See `FusedBackend.route`."""
        return route(hidden_states, gate, correction_bias, routing)

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `FusedBackend.write_kv`."""
        key, key_stride = _dense_heads(key)
        value, value_stride = _dense_heads(value)
        num_tokens, num_kv_heads, head_dim = key.shape
        element_size = key.element_size()
        _library().write_kv(
            key.data_ptr(),
            key_stride * element_size,
            value.data_ptr(),
            value_stride * element_size,
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slot_mapping.data_ptr(),
            num_tokens,
            num_kv_heads * head_dim * element_size,
        )


def _library() -> native.Library:
    library = native.status().library
    if library is None:
        raise RuntimeError(native.status().detail)
    return library


def _declines(activation_dtype: torch.dtype, hardware: Hardware) -> str | None:
    if hardware.device.type != "cpu":
        return f"device is {hardware.device.type}"
    status = native.status()
    if status.library is None:
        return status.detail
    if activation_dtype not in _ACTIVATION_DTYPES:
        return f"{str(activation_dtype).removeprefix('torch.')} activations"
    return None


def _any_equal(data: Tensor, mask: int, value: int) -> bool:
    return _library().any_equal(data.data_ptr(), data.numel(), mask, value)


def _dense_heads(x: Tensor) -> tuple[Tensor, int]:
    """`[T, heads, head_dim]` whose heads lie side by side within a token, and the elements from one token to the next.

    Tokens may lie apart, as in a view of a fused qkv.
    """
    token_stride, head_stride, stride = x.stride()
    if stride == 1 and head_stride == x.shape[2]:
        return x, token_stride
    x = x.contiguous()
    return x, x.shape[1] * x.shape[2]


def _norm(x: Tensor, residual: int, weight: Tensor, out: Tensor, eps: float) -> None:
    width = x.shape[-1]
    _library().norm(
        x.data_ptr(),
        residual,
        weight.data_ptr(),
        out.data_ptr(),
        native.TYPE_CODES[x.dtype],
        native.TYPE_CODES[weight.dtype],
        x.numel() // width,
        width,
        eps,
        torch.get_num_threads(),
    )
