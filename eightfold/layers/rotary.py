"""Rotary position embeddings (RoPE, arXiv 2104.09864) as a table, and the ways in which checkpoints stretch them.

A head's first `rotary_dim` values are rotary_dim / 2 pairs; at position p, pair i turns by the angle p * f[i]. Plain RoPE has
f[i] = theta^(-2i / rotary_dim). The types that a checkpoint may name change f so that a model sees farther than it was trained:

    linear   f / factor, as if positions lay closer together. arXiv 2306.15595
    llama3   f for waves that fit `high_freq_factor` times or more into the original context, f / factor for those that fit
             `low_freq_factor` times or less, and a blend in between. Meta's Llama 3.1 reference code, apply_scaling
    yarn     the same idea with a ramp over the pairs, between those that turn `beta_fast` and `beta_slow` times within the
             original context, and a factor on the cosines and sines that sharpens attention. arXiv 2309.00071, section 3
    dynamic  a larger theta for a longer sequence: theta * (factor * L / original - (factor - 1))^(d / (d - 2)) for L tokens
             where L exceeds the original context. "NTK-aware" scaling, arXiv 2309.00071, section 3.3

Angles reach 131071 radians, where one bit of f in fp32 is a hundredth of a radian. So frequencies are computed in fp32, on the
CPU, and by the same operations in the same order as transformers' `modeling_rope_utils`: whoever trained or tuned a checkpoint
with it used these very bits, and every device serves them.

**Dynamic scaling under a paged cache.** Keys are cached rotated and are shared between sequences, so a frequency may depend on
neither the length of a sequence nor the moment at which a key was computed. transformers takes L from each forward pass: in a
prefill all keys get the frequencies of the whole prompt, and in decode each new token gets its own, beside keys that were
rotated by others; then an angle is no longer a function of distance. Here one L holds for all: the longest sequence that the
table is made for. A table no longer than the original context is plain RoPE, bit for bit what transformers computes for such
sequences, and `models.arch` gives this as the context length of such a checkpoint. A longer table is what transformers computes
for a prefill of that full length, and shorter sequences pay for the reach with somewhat coarser positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

RopeType: TypeAlias = Literal["default", "linear", "llama3", "yarn", "dynamic"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn into angles. Fields bear the names that `config.json` gives them.

    Attributes:
        type: which of the ways above.
        theta: base of the frequencies.
        rotary_dim: values of a head that are rotated, from the first on; even.
        factor: how far to stretch; all types but default.
        original_max_position_embeddings: the context length before stretching; llama3, yarn and dynamic.
        low_freq_factor: llama3.
        high_freq_factor: llama3.
        attention_factor: yarn; None derives it from `factor`, or from `mscale` and `mscale_all_dim` where both are given.
        beta_fast: yarn.
        beta_slow: yarn.
        mscale: yarn.
        mscale_all_dim: yarn.
        truncate: yarn; whether the ends of the ramp are rounded to whole pairs.
    """

    type: RopeType
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def rotary_table(rope: RopeConfig, max_position: int) -> Tensor:
    """Cosines and sines of every position that a model will see.

    Args:
        rope: the kind of rotation.
        max_position: number of positions, from 0. With dynamic scaling it also sets the frequencies.

    Returns:
        `float32 [max_position, rotary_dim]` on the CPU: cosines of the rotary_dim / 2 angles, then their sines, both times
        yarn's attention factor.
    """
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = positions.unsqueeze(1) * inverse_frequencies(rope, max_position)  # [max_position, rotary_dim / 2]
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(rope)


def inverse_frequencies(rope: RopeConfig, max_position: int) -> Tensor:
    """The angles per position, `float32 [rotary_dim / 2]`, by the formulas at the top of this module."""
    match rope.type:
        case "default":
            return _plain(rope.theta, rope.rotary_dim)
        case "linear":
            return _plain(rope.theta, rope.rotary_dim) / rope.factor
        case "llama3":
            return _llama3(rope)
        case "yarn":
            return _yarn(rope)
        case "dynamic":
            original = rope.original_max_position_embeddings
            stretch = rope.factor * max(max_position, original) / original - (rope.factor - 1)
            return _plain(rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)), rope.rotary_dim)


def attention_factor(rope: RopeConfig) -> float:
    """Yarn's factor on cosines and sines, whose square thus multiplies the scores; 1 for the other types.

    0.1 * ln(factor) + 1 by section 3.4 of the paper; with `mscale` m and `mscale_all_dim` a, as DeepSeek-V2 introduced them,
    (0.1 * m * ln(factor) + 1) / (0.1 * a * ln(factor) + 1).
    """
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    growth = 0.1 * math.log(max(rope.factor, 1.0))
    if rope.mscale and rope.mscale_all_dim:
        return (growth * rope.mscale + 1.0) / (growth * rope.mscale_all_dim + 1.0)
    return growth + 1.0


def _powers(theta: float, rotary_dim: int) -> Tensor:
    """theta^(2i / rotary_dim), `[rotary_dim / 2]`."""
    powers: Tensor = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    return powers


def _plain(theta: float, rotary_dim: int) -> Tensor:
    return 1.0 / _powers(theta, rotary_dim)


def _llama3(rope: RopeConfig) -> Tensor:
    frequencies = _plain(rope.theta, rope.rotary_dim)
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > original / low, wavelengths < original / high
    smooth = (original / wavelengths - low) / (high - low)  # 0 at the long end, 1 at the short one
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return torch.where(is_long, frequencies / rope.factor, torch.where(is_short, frequencies, blended))


def _yarn(rope: RopeConfig) -> Tensor:
    powers = _powers(rope.theta, rope.rotary_dim)
    first, last = _pair_that_turns(rope, rope.beta_fast), _pair_that_turns(rope, rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - stretched
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _pair_that_turns(rope: RopeConfig, turns: float) -> float:
    """The index, in fractions, of the pair that makes so many full turns within the original context."""
    positions_a_turn = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(positions_a_turn) / (2 * math.log(rope.theta))
