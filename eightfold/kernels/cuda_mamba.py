"""The GPU's backend for Mamba2: `triton`. The kernels and what bounds them are in `causal_conv.py` and `mamba2.py`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from eightfold.kernels import jit
from eightfold.kernels.causal_conv import causal_conv
from eightfold.kernels.cuda import HOPPER
from eightfold.kernels.mamba2 import choose_scan_tile, scan
from eightfold.kernels.mamba2_step import ScanInputs, choose_step_tile, has_single_tokens, scan_step
from eightfold.kernels.operations import MambaSpec, StateMetadata
from eightfold.kernels.registry import Hardware

_AMPERE = (8, 0)
# Major compute capabilities whose products read operands from shared memory: wgmma, tcgen05.
_SHARED_OPERANDS = (9, 10)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A program holds a head's rows, times the state's width, in registers.
_MOST_STATE = 256


class CudaMamba:
    """Convolution and scan in a launch each; a scan of few long sequences takes two, and of a mixed batch one more."""

    name = "triton"

    def declines(self, spec: MambaSpec, hardware: Hardware) -> str | None:
        """Needs compute capability 8.0 and up, and states of up to 256 elements a row."""
        capability = hardware.capability
        if hardware.device.type != "cuda" or capability is None:
            return "needs a CUDA GPU"
        if capability < _AMPERE:
            return f"needs compute capability 8.0 and up, and this GPU has {capability[0]}.{capability[1]}"
        if spec.activation_dtype not in _DTYPES or spec.state_dtype not in _DTYPES:
            return f"{spec.activation_dtype} activations and {spec.state_dtype} states"
        if spec.state_size > _MOST_STATE:
            return f"states of {spec.state_size} elements a row, over {_MOST_STATE}"
        return jit.MISSING

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, metadata: StateMetadata, spec: MambaSpec
    ) -> Tensor:
        """See `MambaBackend.conv`."""
        del spec
        x = x if x.stride(1) == 1 else x.contiguous()
        if x.shape[0] == 0:
            return torch.empty_like(x)
        return causal_conv(x, weight.contiguous(), bias, conv_state, metadata, overlap=_overlaps(x.device))

    def scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        ssm_state: Tensor,
        metadata: StateMetadata,
        spec: MambaSpec,
    ) -> Tensor:
        """See `MambaBackend.scan`."""
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        num_tokens, num_seqs = x.shape[0], metadata.slots.shape[0]
        if num_tokens == 0:
            return y
        inputs = ScanInputs(_dense(x), _dense(dt), a, _dense(b), _dense(c), d, dt_bias)
        overlap = _overlaps(x.device)
        if has_single_tokens(metadata, num_tokens):
            scan_step(inputs, ssm_state, y, metadata, spec, choose_step_tile(num_seqs, spec), overlap=overlap)
        if metadata.max_query_len > 1:
            num_processors, shared_operands = _describe(x.device)
            tile = choose_scan_tile(
                num_tokens,
                metadata.max_query_len,
                spec,
                num_processors=num_processors,
                shared_operands=shared_operands,
            )
            scan(inputs, ssm_state, y, metadata, spec, tile, overlap=overlap)
        return y


def _dense(rows: Tensor) -> Tensor:
    """Rows in which all elements lie beside each other; the rows themselves may lie apart."""
    return rows if rows[0].is_contiguous() else rows.contiguous()


@functools.cache
def _overlaps(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= HOPPER


@functools.cache
def _describe(device: torch.device) -> tuple[int, bool]:
    """What the choice of a scan's tile depends on: multiprocessors, and whether operands are read from shared memory."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major in _SHARED_OPERANDS
