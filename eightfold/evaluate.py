"""How far a quantized model is from the one that it was made from: perplexity, KL divergence, and the same likeliest token.

A model is a function from the tokens of one window to the logits of every position. Windows are scored one at a time, so memory
holds the logits of one window of each model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from eightfold.errors import InputError
from eightfold.kernels.operations import AttentionMetadata, BatchMetadata, StateMetadata
from eightfold.kernels.selection import Kernels
from eightfold.layers.caches import CacheLayout, LayerCache, StateCache
from eightfold.models.causal_lm import CausalLM
from eightfold.models.loader import open_checkpoint, plan, read, read_model
from eightfold.quant.mxfp8 import ScaleRule
from eightfold.quant.policy import Policy

LogitsFn: TypeAlias = Callable[[Sequence[int]], Tensor]
"""Token ids of a window to logits `[num_tokens, vocab_size]`."""

# Positions whose probabilities are held at once.
_ROWS = 64


@dataclass(frozen=True, slots=True)
class Quality:
    """What was measured over `num_tokens` scored tokens.

    Attributes:
        perplexity: exp of the mean negative log probability of the token that follows.
        kl: mean over positions of KL(reference || model), in nats; 0 where the model is the reference.
        same_top1: share of positions at which both hold the same token for the likeliest.
        num_tokens: how many tokens were scored: all of a window but its first.
    """

    perplexity: float
    kl: float
    same_top1: float
    num_tokens: int


def evaluate(model: LogitsFn, reference: LogitsFn, windows: Iterable[Sequence[int]]) -> Quality:
    """Score a model on windows of text, against a reference.

    Args:
        model: the model in question.
        reference: the one that it was made from; may be the same function.
        windows: token ids, at least two a window.

    Raises:
        InputError: a window without a token to score, or no window at all.
    """
    loss, divergence, agreement, count = 0.0, 0.0, 0, 0
    for window in windows:
        if len(window) < 2:
            raise InputError("window", got=f"{len(window)} tokens", expected="at least 2, since the first one is not scored")
        logits = model(window)[:-1]  # [T - 1, vocab_size]
        expected_logits = logits if reference is model else reference(window)[:-1]
        following = torch.tensor(window[1:], device=logits.device).unsqueeze(1)
        # A few positions at a time: there are several temporaries, and each would be as large as the logits.
        parts = zip(logits.split(_ROWS), expected_logits.split(_ROWS), following.split(_ROWS), strict=True)
        for logits_part, expected_part, tokens in parts:
            logprobs = logits_part.float().log_softmax(dim=-1)  # [<= 64, vocab_size]
            expected = expected_part.float().log_softmax(dim=-1)
            loss -= float(logprobs.gather(1, tokens).sum(dtype=torch.float64))
            divergence += float((expected.exp() * (expected - logprobs)).sum(dtype=torch.float64))
            agreement += int((expected.argmax(dim=-1) == logprobs.argmax(dim=-1)).sum())
        count += len(window) - 1
    if count == 0:
        raise InputError("windows", got="none", expected="at least one window of tokens")
    # A model that is broken far enough has a loss whose exponential Python's own exp() refuses.
    perplexity = float(torch.tensor(loss / count, dtype=torch.float64).exp())
    return Quality(perplexity, divergence / count, agreement / count, count)


def checkpoint_logits(
    path: Path,
    kernels: Kernels,
    *,
    policy: Policy,
    rule: ScaleRule = ScaleRule.CEIL,
    folded: bool = False,
    block_size: int = 16,
) -> LogitsFn:
    """Load a checkpoint, and give the function from a window to its logits.

    Args:
        path: the checkpoint's folder.
        kernels: what it runs on.
        policy: what is quantized.
        rule: the scale rule.
        folded: fold every quantized weight, and keep the result in MXFP8's form, so that any backend runs it.
        block_size: tokens in a block of the cache that a window gets.
    """
    return logits_of(load_model(path, kernels, policy=policy, rule=rule, folded=folded), kernels, block_size=block_size)


def load_model(
    path: Path, kernels: Kernels, *, policy: Policy, rule: ScaleRule = ScaleRule.CEIL, folded: bool = False
) -> CausalLM:
    """A checkpoint as a model that is bound, with arguments as of `checkpoint_logits`."""
    model, checkpoint = read_model(path), open_checkpoint(path)
    read(checkpoint, plan(model, checkpoint, policy, kernels), kernels, rule=rule)
    if folded:
        for weight in model.weights():
            weight.fold()
    model.bind(kernels)
    return model


def logits_of(model: CausalLM, kernels: Kernels, *, block_size: int = 16) -> LogitsFn:
    """The function from a window to the logits of a model that is bound to these kernels."""
    device = kernels.hardware.device

    @torch.inference_mode()
    def logits(window: Sequence[int]) -> Tensor:
        num_blocks = -(-len(window) // block_size)
        positions = torch.arange(len(window), device=device)
        query_start = torch.tensor([0, len(window)], dtype=torch.int32, device=device)
        none = torch.empty(0, dtype=torch.int64, device=device)
        metadata = BatchMetadata(
            AttentionMetadata(
                slot_mapping=positions,
                block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(0),
                query_start=query_start,
                context_lens=query_start[1:],
                max_query_len=len(window),
                max_context_len=len(window),
            ),
            StateMetadata(
                slots=torch.zeros(1, dtype=torch.int64, device=device),
                is_new=torch.ones(1, dtype=torch.bool, device=device),
                query_start=query_start,
                save_sequences=none,
                save_lengths=none,
                save_slots=none,
                max_query_len=len(window),
            ),
        )
        caches = _caches(model.arch.layout, kernels, num_blocks, block_size)
        return model.logits(model(torch.tensor(window, device=device), positions, caches, metadata))

    return logits


def _caches(layout: CacheLayout, kernels: Kernels, num_blocks: int, block_size: int) -> list[LayerCache]:
    """Room for one window."""
    device, dtype = kernels.hardware.device, kernels.activation_dtype
    kv_shape = (num_blocks, block_size, layout.num_kv_heads, layout.head_dim)

    def one(attends: bool, recurs: bool) -> LayerCache:
        kv = (torch.empty(kv_shape, dtype=dtype, device=device), torch.empty(kv_shape, dtype=dtype, device=device))
        if not recurs or layout.conv_shape is None or layout.ssm_shape is None:
            return LayerCache(kv if attends else None)
        conv = torch.empty((1, *layout.conv_shape), dtype=dtype, device=device)
        ssm = torch.empty((1, *layout.ssm_shape), dtype=kernels.state_dtype, device=device)
        return LayerCache(kv if attends else None, StateCache(conv, ssm))

    return [one(attends, recurs) for attends, recurs in zip(layout.attends, layout.recurs, strict=True)]
