"""Mamba2: a short convolution and a state space recurrence, between two projections (arXiv 2405.21060, section 7)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eightfold.kernels.operations import FusedBackend, MambaBackend, MambaSpec, StateMetadata
from eightfold.kernels.selection import Kernels
from eightfold.layers.caches import StateCache
from eightfold.layers.linear import Linear
from eightfold.layers.module import Chosen, FormatOf, Module
from eightfold.layers.weight import Weight
from eightfold.quant.policy import Role


class Mamba2(Module):
    """out(norm(scan(conv(in(x))) * silu(z))), where in(x) holds the gate z, the inputs x, B and C of the scan, and step sizes.

    Args:
        name: the layer's name in the checkpoint, such as "backbone.layers.0.mixer".
        hidden_size: width of the hidden states.
        num_heads: H.
        head_dim: P; the inner width is H P.
        state_size: N.
        num_groups: G; also the groups of the norm.
        conv_kernel: taps of the convolution.
        dt_limits: smallest and largest step size.
        norm_eps: epsilon of the norm.
        proj_bias: whether the two projections have biases.
        conv_bias: whether the convolution has one.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        state_size: int,
        num_groups: int,
        conv_kernel: int,
        dt_limits: tuple[float, float],
        norm_eps: float,
        proj_bias: bool,
        conv_bias: bool,
    ) -> None:
        self.name, self.num_heads, self.head_dim, self.state_size = name, num_heads, head_dim, state_size
        self.num_groups, self.conv_kernel, self.dt_limits, self.norm_eps = num_groups, conv_kernel, dt_limits, norm_eps
        self.inner_size, self.group_size = num_heads * head_dim, num_groups * state_size
        self.conv_size = self.inner_size + 2 * self.group_size
        in_size = self.inner_size + self.conv_size + num_heads
        self.in_proj = Linear(f"{name}.in_proj", hidden_size, {f"{name}.in_proj": in_size}, bias=proj_bias)
        taps = f"{name}.conv1d.weight"
        self.conv_weight = Weight(taps, Role.CONVOLUTION, {taps: self.conv_size}, 1, conv_kernel)
        self.conv_bias = self._vector("conv1d.bias", self.conv_size, Role.BIAS) if conv_bias else None
        self.a_log = self._vector("A_log", num_heads, Role.RECURRENCE)
        self.d = self._vector("D", num_heads, Role.RECURRENCE)
        self.dt_bias = self._vector("dt_bias", num_heads, Role.RECURRENCE)
        self.norm = self._vector("norm.weight", self.inner_size, Role.NORM)
        self.out_proj = Linear(f"{name}.out_proj", self.inner_size, {f"{name}.out_proj": hidden_size}, bias=proj_bias)
        self._spec: MambaSpec
        self._mamba: MambaBackend
        self._fused: FusedBackend

    def choose(self, kernels: Kernels, format_of: FormatOf) -> Iterator[Chosen]:
        """The backend of convolution and scan."""
        del format_of
        yield Chosen("mamba2", self.name, kernels.mamba(self._make_spec(kernels)))

    def bind(self, kernels: Kernels) -> None:
        """Take weights and backends. The parameters of the recurrence are fp32 from here on."""
        super().bind(kernels)
        self._spec = self._make_spec(kernels)
        self.chosen = (Chosen("mamba2", self.name, kernels.mamba(self._spec)),)
        self._mamba = self.chosen[0].choice.backend
        self._fused = kernels.fused().backend
        self._conv_weight = self.conv_weight.take_dense().squeeze(1)  # [C, kernel]
        self._conv_bias = None if self.conv_bias is None else self.conv_bias.take_dense()
        self._a = -torch.exp(self.a_log.take_dense().float())
        self._d, self._dt_bias = self.d.take_dense().float(), self.dt_bias.take_dense().float()
        self._norm = self.norm.take_dense()

    def __call__(self, hidden_states: Tensor, cache: StateCache, metadata: StateMetadata) -> Tensor:
        """`[T, hidden]` from hidden states `[T, hidden]`; takes the batch's tokens into the states in the cache."""
        gate, xbc, dt = self.in_proj(hidden_states).split((self.inner_size, self.conv_size, self.num_heads), dim=1)
        xbc = self._mamba.conv(xbc, self._conv_weight, self._conv_bias, cache.conv, metadata, self._spec)
        x, b, c = xbc.split((self.inner_size, self.group_size, self.group_size), dim=1)
        y = self._mamba.scan(
            x.unflatten(1, (self.num_heads, self.head_dim)),
            dt,
            self._a,
            b.unflatten(1, (self.num_groups, self.state_size)),
            c.unflatten(1, (self.num_groups, self.state_size)),
            self._d,
            self._dt_bias,
            cache.ssm,
            metadata,
            self._spec,
        )
        group_size = self.inner_size // self.num_groups
        return self.out_proj(self._fused.gated_rms_norm(y.flatten(1), gate, self._norm, self.norm_eps, group_size))

    def _vector(self, suffix: str, width: int, role: Role) -> Weight:
        name = f"{self.name}.{suffix}"
        return Weight(name, role, {name: width})

    def _make_spec(self, kernels: Kernels) -> MambaSpec:
        return MambaSpec(
            self.name,
            self.num_heads,
            self.head_dim,
            self.state_size,
            self.num_groups,
            self.conv_kernel,
            self.dt_limits,
            kernels.activation_dtype,
            kernels.state_dtype,
        )
