"""The GPU's backend for the small operations: `triton`. The kernels and what bounds them are in `fused.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from eightfold.kernels import jit
from eightfold.kernels.cuda_attention import describe
from eightfold.kernels.fused import (
    activation_kernel,
    choose_kernel,
    gate_kernel,
    rms_norm_kernel,
    rotary_kernel,
    write_kv_kernel,
)
from eightfold.kernels.jit import launch_options
from eightfold.kernels.operations import Routing
from eightfold.kernels.registry import Hardware

# bf16 numbers that a number of each dtype is the sum of.
_BF16_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
# Values of a norm's program, where its rows are short.
_NORM_VALUES = 2048
# Cuts of the router's product along the hidden size.
_MOST_CUTS = 16


class TritonFused:
    """Each operation in one pass over its input, with fp32 arithmetic inside. It never waits for the GPU."""

    name = "triton"

    def declines(self, spec: torch.dtype, hardware: Hardware) -> str | None:
        """Needs a CUDA GPU of compute capability 8.0 and up, and bf16, fp16 or fp32 activations."""
        capability = hardware.capability
        if hardware.device.type != "cuda" or capability is None:
            return "needs a CUDA GPU"
        if capability < (8, 0):
            return f"needs compute capability 8.0 and up, and this GPU has {capability[0]}.{capability[1]}"
        return jit.MISSING if spec in _BF16_PARTS else f"{spec} activations"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `FusedBackend.rms_norm`."""
        if x.ndim == 1:
            return self.rms_norm(x.unsqueeze(0), weight, eps).squeeze(0)
        rows = x.unsqueeze(1) if x.ndim == 2 else x if x.ndim == 3 else x.reshape(-1, 1, x.shape[-1])
        return _norm("plain", rows, rows, weight, eps).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `FusedBackend.add_rms_norm`. The sum is written into `residual`, which is returned."""
        return _norm("add", x.unsqueeze(1), residual.unsqueeze(1), weight, eps).squeeze(1), residual

    def rotary(self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See `FusedBackend.rotary`. It works in place."""
        num_tokens, num_heads, _ = query.shape
        num_kv_heads, half = key.shape[1], cos_sin.shape[1] // 2
        if num_tokens == 0:
            return query, key
        block = _power_of_two(half)
        heads = max(1, min(_power_of_two(num_heads), 1024 // block))
        overlap = describe(query.device).overlap
        rotary_kernel[(num_tokens, -(-num_heads // heads) - (-num_kv_heads // heads))](
            query,
            key,
            cos_sin,
            positions,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            half=half,
            heads=heads,
            block=block,
            overlap=overlap,
            num_warps=4,
            **launch_options(overlap=overlap),
        )
        return query, key

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `FusedBackend.silu_and_mul`."""
        return _activate(x, x.shape[1] // 2, gated=True)

    def relu2(self, x: Tensor) -> Tensor:
        """See `FusedBackend.relu2`."""
        return _activate(x, x.shape[1], gated=False)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
        """See `FusedBackend.gated_rms_norm`."""
        groups = (-1, group_size)
        return _norm("gated", x.unflatten(1, groups), gate.unflatten(1, groups), weight, eps).flatten(1)

    def route(
        self, hidden_states: Tensor, gate: Tensor, correction_bias: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """See `FusedBackend.route`. The logits are as exact as those of an fp32 product, and not the same bits."""
        num_tokens, device = hidden_states.shape[0], hidden_states.device
        ids = torch.empty((num_tokens, routing.top_k), dtype=torch.int64, device=device)
        weights = torch.empty((num_tokens, routing.top_k), dtype=torch.float32, device=device)
        if num_tokens == 0:
            return ids, weights
        logits = _gate_product(hidden_states, gate)  # [cuts, T, E]
        overlap = describe(device).overlap
        choose_kernel[(num_tokens,)](
            logits,
            logits if correction_bias is None else correction_bias,
            ids,
            weights,
            num_tokens,
            routing.scale,
            cuts=logits.shape[0],
            num_experts=routing.num_experts,
            top_k=routing.top_k,
            sigmoid=routing.scoring == "sigmoid",
            biased=correction_bias is not None,
            normalize=routing.normalize,
            num_groups=routing.num_groups,
            topk_groups=routing.topk_groups,
            groups=_power_of_two(routing.num_groups),
            members=_power_of_two(routing.num_experts // routing.num_groups),
            slots=_power_of_two(routing.top_k),
            overlap=overlap,
            num_warps=1 if routing.num_experts <= 512 else 4,
            **launch_options(overlap=overlap),
        )
        return ids, weights

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `FusedBackend.write_kv`."""
        num_tokens, num_kv_heads, head_dim = key.shape
        if num_tokens == 0:
            return
        key, value = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (key, value))
        block = _power_of_two(num_kv_heads * head_dim)
        overlap = describe(key.device).overlap
        write_kv_kernel[(num_tokens,)](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            key.stride(0),
            value.stride(0),
            size=num_kv_heads * head_dim,
            block=block,
            overlap=overlap,
            num_warps=max(1, min(8, block // 256)),
            **launch_options(overlap=overlap),
        )


def _norm(mode: str, x: Tensor, other: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm_kernel` over the last dimension of x `[outer, inner, size]`; the result is contiguous."""
    outer, inner, size = x.shape
    out = torch.empty((outer, inner, size), dtype=x.dtype, device=x.device)
    num_rows, block = outer * inner, _power_of_two(size)
    if num_rows == 0:
        return out
    rows = max(1, min(_NORM_VALUES // block, _power_of_two(num_rows)))
    overlap = describe(x.device).overlap
    rms_norm_kernel[(-(-num_rows // rows),)](
        x,
        other,
        weight,
        out,
        num_rows,
        x.stride(0),
        x.stride(1),
        other.stride(0),
        eps,
        mode=mode,
        inner=inner,
        size=size,
        rows=rows,
        block=block,
        overlap=overlap,
        num_warps=max(1, min(16, rows * block // 512)),
        **launch_options(overlap=overlap),
    )
    return out


def _activate(x: Tensor, size: int, *, gated: bool) -> Tensor:
    """`activation_kernel` over the rows of x."""
    y = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
    block = min(1024, _power_of_two(size))
    overlap = describe(x.device).overlap
    if y.numel() > 0:
        activation_kernel[(x.shape[0], -(-size // block))](
            x,
            y,
            x.stride(0),
            size=size,
            gated=gated,
            block=block,
            overlap=overlap,
            num_warps=4,
            **launch_options(overlap=overlap),
        )
    return y


def _gate_product(x: Tensor, gate: Tensor) -> Tensor:
    """Logits `float32 [cuts, T, E]` whose sum over cuts is x gateᵀ, from x `[T, hidden]` and gate `[E, hidden]`."""
    num_tokens, hidden = x.shape
    num_experts, device = gate.shape[0], describe(x.device)
    block_t = 16 if num_tokens <= 256 else 64
    block_e = min(64, max(16, _power_of_two(num_experts)))
    block_k = 64
    tiles = -(-num_tokens // block_t) * -(-num_experts // block_e)
    steps = -(-hidden // block_k)
    # Few different numbers of cuts, since each is a kernel of its own.
    wanted = 1 << (min(_MOST_CUTS, max(1, 2 * device.num_sms // tiles), steps).bit_length() - 1)
    steps_each = -(-steps // wanted)
    cuts = -(-steps // steps_each)
    logits = torch.empty((cuts, num_tokens, num_experts), dtype=torch.float32, device=x.device)
    gate_kernel[(-(-num_tokens // block_t), -(-num_experts // block_e), cuts)](
        x,
        gate.contiguous(),
        logits,
        num_tokens,
        x.stride(0),
        num_experts=num_experts,
        hidden=hidden,
        cut_k=steps_each * block_k,
        x_parts=_BF16_PARTS[x.dtype],
        gate_parts=_BF16_PARTS[gate.dtype],
        block_t=block_t,
        block_e=block_e,
        block_k=block_k,
        native=x.is_cuda,
        overlap=device.overlap,
        num_warps=4,
        num_stages=3,
        **launch_options(overlap=device.overlap),
    )
    return logits


def _power_of_two(size: int) -> int:
    """The smallest power of two that is no less than `size`."""
    return 1 << (size - 1).bit_length()
