"""The operations that a model is made of: what each computes, what a backend is asked about it, and what it is given.

For every operation there is a specification, which a backend sees before it is chosen, and a protocol, which it implements.
Layers call these and nothing else. Shapes: T tokens of all sequences one after another, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from eightfold.kernels.registry import Hardware
from eightfold.quant.fp8 import WeightTensor
from eightfold.quant.mxfp8 import MXTensor

Activation: TypeAlias = Literal["silu", "relu2"]
"""silu(x) = x * sigmoid(x); relu2(x) = max(x, 0)²."""


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One dense product y = x Wᵀ + b, as far as a backend needs to know it.

    Attributes:
        layer: the name that errors and reports use, such as "model.layers.0.mlp.gate_up_proj".
        out_features: N, rows of the weight.
        in_features: K.
        weight_format: "mxfp8", "fp8" for `FP8Tensor`, or the dtype of an unquantized weight: "bfloat16", "float16", "float32".
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


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses experts. With logits l = x Gᵀ in fp32:

        scores  s = softmax(l) or sigmoid(l)
        choice  of the top_k largest s + correction_bias; with groups only within the topk_groups groups whose two largest sum
                to most; of equal ones the lower id wins
        weights w = s of the chosen, divided by their sum (plus 1e-20 under sigmoid) where `normalize`, times `scale`

    Mixtral (arXiv 2401.04088) takes softmax and normalizes; sigmoid, bias and groups are those of DeepSeek-V3 (arXiv
    2412.19437, section 2.1.2), which Nemotron-H follows.

    Attributes:
        num_experts: E.
        top_k: experts of a token.
        scoring: the function on the logits.
        normalize: whether the weights of a token are divided by their sum.
        scale: factor on the weights, after that.
        num_groups: groups of neighbouring experts; divides E.
        topk_groups: groups that a token may choose from.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    normalize: bool
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """The experts of one layer: y = sum over a token's experts e of weight * W2[e] a(W13[e] x).

    Gated, a(h) = act(h[:I]) * h[I:] and W13 has 2 I rows; else a(h) = act(h) and it has I.

    Attributes:
        layer: the name that errors and reports use, such as "backbone.layers.1.mixer.experts".
        num_experts: E.
        top_k: experts of a token.
        in_features: K, width of x and of y.
        intermediate_size: I.
        gated: whether there is a gate.
        activation: the function on the gate, or on the whole where there is none.
        weight_format: "mxfp8", "fp8", or the dtype of unquantized weights.
        activation_dtype: dtype of x and y.
        weights: W13 and W2 in MXFP8 once they are whole, for backends whose error depends on their values; None before that.
    """

    layer: str
    num_experts: int
    top_k: int
    in_features: int
    intermediate_size: int
    gated: bool
    activation: Activation
    weight_format: str
    activation_dtype: torch.dtype
    weights: tuple[MXTensor, MXTensor] | None = None


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """The recurrent part of one Mamba2 layer.

    Attributes:
        layer: the name that errors and reports use.
        num_heads: H.
        head_dim: P.
        state_size: N, width of a head's state.
        num_groups: G; heads of a group share B and C. Divides H.
        conv_kernel: taps of the causal convolution.
        dt_limits: smallest and largest step size.
        activation_dtype: dtype of everything but the parameters of the scan and the states.
        state_dtype: dtype of the scan's states, float32 or bfloat16.
    """

    layer: str
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    dt_limits: tuple[float, float]
    activation_dtype: torch.dtype
    state_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """Where the recurrent states of a batch's sequences live. Shared by all layers; built by the runner.

    Sequence s has the tokens `query_start[s] : query_start[s + 1]`. Its state is read from the slot `slots[s]` (as zeros where
    `is_new[s]`), and written back there after its last token. A save also copies the state as it is after the first
    `save_lengths[v]` tokens of the sequence `save_sequences[v]` into the slot `save_slots[v]`; no slot occurs twice.

    Attributes:
        slots: `int64 [S]`.
        is_new: `bool [S]`.
        query_start: `int32 [S + 1]`.
        save_sequences: `int64 [V]`, ascending.
        save_lengths: `int64 [V]`, at least 1; ascending within a sequence.
        save_slots: `int64 [V]`.
        max_query_len: most tokens of a sequence; 1 where the batch only decodes.
    """

    slots: Tensor
    is_new: Tensor
    query_start: Tensor
    save_sequences: Tensor
    save_lengths: Tensor
    save_slots: Tensor
    max_query_len: int


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """Where the sequences of a batch live: in the KV cache, and among the recurrent states where the model has such."""

    attention: AttentionMetadata
    state: StateMetadata | None = None


class LinearBackend(Protocol):
    """One way to compute a dense product."""

    name: str

    def declines(self, spec: LinearSpec, hardware: Hardware) -> str | None:
        """Why this backend cannot take `spec` on `hardware`, in a few words; None where it can."""

    def prepare(self, weight: WeightTensor, bias: Tensor | None) -> Any:
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

    def relu2(self, x: Tensor) -> Tensor:
        """`max(x, 0)²`, of the shape of x `[T, I]`."""

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
        """RMS norm of `x * silu(gate)` over groups of `group_size` neighbours, times weight; in fp32, returned in x's dtype.

        The gate comes before the norm, as in Mamba2 (arXiv 2405.21060).

        Args:
            x: `[T, width]`; rows may lie apart.
            gate: `[T, width]`; rows may lie apart.
            weight: `[width]`.
            eps: added to the mean square of a group.
            group_size: divides `width`.
        """

    def route(
        self, hidden_states: Tensor, gate: Tensor, correction_bias: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """Choose experts for each token; `Routing` has the formula. All of it in fp32, whatever the activations are.

        Args:
            hidden_states: `[T, hidden]`.
            gate: `[num_experts, hidden]`.
            correction_bias: `float32 [num_experts]`, added to the scores for the choice alone; or None.
            routing: the rule.

        Returns:
            Expert ids `int64 [T, top_k]`, best first, and their weights `float32 [T, top_k]`.
        """

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store keys and values `[T, num_kv_heads, head_dim]` at their slots in the caches."""


class LowLatencyBackend(Protocol):
    """A dense product for few tokens, where the time of a launch or of a barrier counts more than that of the bytes.

    A layer that asks for one keeps its general product for larger batches.

    Attributes:
        max_tokens: it takes products of at most this many tokens; 0 for the backend that leaves all to the general product.
    """

    name: str
    max_tokens: int

    def declines(self, spec: LinearSpec, hardware: Hardware) -> str | None:
        """Why this backend cannot take `spec` on `hardware`; None where it can."""

    def prepare(self, weight: WeightTensor, bias: Tensor | None) -> Any:
        """As `LinearBackend.prepare`."""

    def run(self, x: Tensor, prepared: Any) -> Tensor:
        """y `[M, N]` from x `[M, K]`, M at most `max_tokens`."""


class MoeBackend(Protocol):
    """One way to compute the experts of a layer."""

    name: str

    def declines(self, spec: MoeSpec, hardware: Hardware) -> str | None:
        """Why this backend cannot take `spec` on `hardware`; None where it can."""

    def prepare(self, w13: WeightTensor, w2: WeightTensor, spec: MoeSpec) -> Any:
        """Turn the loaded experts into this backend's own layout. Called once, when both weights are whole.

        Args:
            w13: `[E, 2 I, K]`, gates before ups, where the experts are gated; else exactly `[E, I, K]`.
            w2: `[E, K, I]`.
            spec: what was asked when this backend was chosen.
        """

    def run(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, prepared: Any) -> Tensor:
        """y `[T, K]` in the dtype of x; the sum over a token's experts is in fp32 and in the order of the choice.

        Args:
            x: `[T, K]`.
            expert_ids: `int64 [T, top_k]`; no expert twice for a token.
            expert_weights: `float32 [T, top_k]`.
            prepared: what `prepare` made.
        """


class MambaBackend(Protocol):
    """The two recurrent operations of Mamba2 (arXiv 2405.21060)."""

    name: str

    def declines(self, spec: MambaSpec, hardware: Hardware) -> str | None:
        """Why this backend cannot take `spec` on `hardware`; None where it can."""

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, metadata: StateMetadata, spec: MambaSpec
    ) -> Tensor:
        """silu of the causal depthwise convolution of each sequence, with its last inputs carried over.

        y[t, c] = silu(bias[c] + sum over j of weight[c, j] * x[t - (kernel - 1) + j, c]), where x before the first token is the
        sequence's state, and the state becomes the last kernel - 1 inputs.

        Args:
            x: `[T, C]`, channels beside each other; rows may lie apart.
            weight: `[C, kernel]`.
            bias: `[C]` or None.
            conv_state: `[num_slots, C, kernel - 1]` in the activation dtype; oldest input first.
            metadata: where the sequences and their states are.
            spec: the layer.

        Returns:
            `[T, C]`.
        """

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
        """The state space recurrence of each sequence, in fp32. With step = clamp(softplus(dt + dt_bias), dt_limits),

            state[h] = exp(step * a[h]) * state[h] + step * x[h] b[g]ᵀ,      y[h] = state[h] c[g] + d[h] * x[h]

        for each token in turn, head h of group g = h / (H / G).

        Args:
            x: `[T, H, P]`.
            dt: `[T, H]`.
            a: `float32 [H]`, negative.
            b: `[T, G, N]`.
            c: `[T, G, N]`.
            d: `float32 [H]`.
            dt_bias: `float32 [H]`.
            ssm_state: `[num_slots, H, P, N]` in the state dtype.
            metadata: where the sequences and their states are.
            spec: the layer.

        Returns:
            `[T, H, P]` in the dtype of x. Tokens of x, dt, b and c may lie apart, as in views of one projection.
        """
