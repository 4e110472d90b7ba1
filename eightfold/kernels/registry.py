"""Backends, what they need, and how one is chosen, with the reasons.

A backend implements one operation. It states its name, says why it declines a given piece of work (or returns None),
prepares a weight into the layout that it wants, and runs. `choose()` walks candidates in order of preference; it is the only
place where a choice is made, so the loader, `inspect`, `doctor` and the tests all get the same answer to the same question.
An exception inside a check is a fault of ours and propagates: it never counts as a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from eightfold.errors import BackendError
from eightfold.quant.mxfp8 import MXTensor

SpecT_contra = TypeVar("SpecT_contra", contravariant=True)
BackendT = TypeVar("BackendT", bound="Backend[Any]")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What this process runs on. Made once by `kernels.hardware.detect()`; tests make pretended ones.

    Attributes:
        device: where weights and activations live.
        name: for people, such as "NVIDIA H200" or "AMD EPYC (avx512)".
        capability: CUDA compute capability, such as (9, 0); None on a CPU.
        features: instruction sets that a CPU kernel may use: "avx2", "f16c", "avx512", "avx512_bf16", "neon".
        memory_bytes: memory of the device.
        num_threads: CPU threads that an operation may use.
    """

    device: torch.device
    name: str
    capability: tuple[int, int] | None
    features: frozenset[str]
    memory_bytes: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One dense product y = x Wᵀ + b, as far as a backend needs to know it.

    Attributes:
        layer: the name that errors and reports use, such as "model.layers.0.mlp.gate_up_proj".
        out_features: N, rows of the weight.
        in_features: K.
        weight_format: "mxfp8", or the dtype of an unquantized weight: "bfloat16", "float16", "float32".
        activation_dtype: dtype of x and of y.
        weight: the MXFP8 weight itself, once it is whole, for backends whose error depends on its values; None before that.
    """

    layer: str
    out_features: int
    in_features: int
    weight_format: str
    activation_dtype: torch.dtype
    weight: MXTensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Paged attention of one layer.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: width of a head.
        scale: factor on the scores.
        sliding_window: a query at position p sees keys p - window + 1 .. p; None sees all keys up to p.
        activation_dtype: dtype of queries, keys, values and the output.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    activation_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one batch live in the paged KV cache. Shared by all layers; built by the runner.

    A batch is a run of chunks, one for each sequence: chunk s holds query tokens `query_start[s] : query_start[s + 1]`, which
    are the last ones of a context of `context_lens[s]` tokens whose keys lie in the blocks `block_tables[s]`.

    Attributes:
        slot_mapping: `int64 [num_tokens]`, block * block_size + offset, where each token's key and value go.
        block_tables: `int32 [num_seqs, max_blocks]`, padded with 0.
        query_start: `int32 [num_seqs + 1]`, cumulative numbers of query tokens.
        context_lens: `int32 [num_seqs]`, tokens in the context, those of this batch included.
        max_query_len: the longest chunk; 1 where the batch only decodes.
        max_context_len: the longest context.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    max_query_len: int
    max_context_len: int


class LinearBackend(Protocol):
    """One way to compute a dense product."""

    name: str

    def declines(self, spec: LinearSpec, hardware: Hardware) -> str | None:
        """Why this backend cannot take `spec` on `hardware`, in a few words; None where it can."""

    def prepare(self, weight: MXTensor | Tensor, bias: Tensor | None) -> Any:
        """Turn a loaded weight `[N, K]` and bias `[N]` into this backend's own layout. Called once, when the weight is whole.

        The caller drops its own reference, so a backend that keeps the weight as it came holds no second copy.
        """

    def run(self, x: Tensor, prepared: Any) -> Tensor:
        """y `[M, N]` from x `[M, K]`, both in the activation dtype."""


class AttentionBackend(Protocol):
    """One way to attend over the paged cache."""

    name: str

    def declines(self, spec: AttentionSpec, hardware: Hardware) -> str | None:
        """Why this backend cannot take `spec` on `hardware`; None where it can."""

    def run(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Causal attention of every query over its own context.

        Args:
            query: `[num_tokens, num_heads, head_dim]`.
            key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`; holds the keys of this batch already.
            value_cache: like `key_cache`.

        Returns:
            `[num_tokens, num_heads * head_dim]`.
        """


class FusedBackend(Protocol):
    """The small operations between the products. Tensors are contiguous along their last dimension."""

    name: str

    def declines(self, spec: torch.dtype, hardware: Hardware) -> str | None:
        """Why this backend cannot take activations of dtype `spec` on `hardware`; None where it can."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, in fp32, returned in x's dtype. x `[..., H]`."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`residual + x`, and its RMS norm: returns (normed, sum), each `[T, H]`. May write the sum into `residual`."""

    def rotary(self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by position, first half against second half ("neox" order). May work in place.

        Args:
            query: `[T, num_heads, head_dim]`.
            key: `[T, num_kv_heads, head_dim]`.
            cos_sin: `float32 [max_position, rotary_dim]`: cosines of the rotary_dim / 2 angles, then their sines.
            positions: `int64 [T]`.
        """

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """`silu(gate) * up` from `[T, 2 * I]`, whose first I columns are the gate. Returns `[T, I]`."""

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store keys and values `[T, num_kv_heads, head_dim]` at their slots in the caches."""


@dataclass(frozen=True, slots=True)
class Declined:
    """A candidate that was passed over, and why."""

    backend: str
    reason: str


class Backend(Protocol[SpecT_contra]):
    """What `choose()` needs of a backend: a name, and a reason where it cannot serve."""

    name: str

    def declines(self, spec: SpecT_contra, hardware: Hardware) -> str | None:
        """Why it cannot take `spec` on `hardware`, in a few words; None where it can."""


@dataclass(frozen=True, slots=True)
class Choice(Generic[BackendT]):
    """What `choose()` decided.

    Attributes:
        backend: the chosen backend.
        declined: the candidates ahead of it, in order of preference, each with its reason.
        requested: "auto", or the name that the user gave.
    """

    backend: BackendT
    declined: tuple[Declined, ...]
    requested: str


def choose(
    subject: str,
    candidates: Sequence[BackendT],
    spec: SpecT_contra,
    hardware: Hardware,
    *,
    requested: str = "auto",
    unbuilt: frozenset[str] = frozenset(),
) -> Choice[BackendT]:
    """Choose a backend for one piece of work.

    Args:
        subject: what is being decided, for errors: "linear model.layers.0.mlp.down_proj [576 x 1536] mxfp8".
        candidates: the backends for this hardware, best first.
        spec: the piece of work.
        hardware: where it will run.
        requested: "auto" walks the candidates; a name is used or refused, never replaced.
        unbuilt: names that other engines know and this one does not have.

    Raises:
        BackendError: the named backend is unknown, not for this hardware or declines, or every candidate declines.
    """
    reasons = [(backend, backend.declines(spec, hardware)) for backend in candidates]
    able = [backend for backend, reason in reasons if reason is None]
    works = ", ".join(backend.name for backend in able) or "none of the backends built so far"
    if requested != "auto":
        for backend, reason in reasons:
            if backend.name == requested:
                if reason is None:
                    return Choice(backend, (), requested)
                raise BackendError(
                    subject, got=f"backend {requested}, which declines: {reason}", expected=f"one of: auto, {works}"
                )
        known = "which Eightfold does not have" if requested in unbuilt else f"which is not for {hardware.name}"
        raise BackendError(subject, got=f"backend {requested}, {known}", expected=f"one of: auto, {works}")
    declined: list[Declined] = []
    for backend, reason in reasons:
        if reason is None:
            return Choice(backend, tuple(declined), requested)
        declined.append(Declined(backend.name, reason))
    listed = "; ".join(f"{item.backend}: {item.reason}" for item in declined)
    raise BackendError(
        subject, got=f"{hardware.name}, where every backend declines ({listed})", expected="a backend that accepts it"
    )
