"""The one table of tolerances. The same values hold everywhere, and each has its reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a result may lie from the exact one of the same operands.

    Attributes:
        accumulation: share of the sum of magnitudes that went into an element; also the bound on the relative Frobenius norm.
        rounding: share of an element that rounding it to its dtype may change.
        why: where the numbers come from.
    """

    accumulation: float
    rounding: float
    why: str


FP32 = Tolerance(
    1e-6, 0.0, "an fp32 sum of thousands of terms over several lanes is within a few units of 2^-24 of the sum of magnitudes"
)
BF16 = Tolerance(1e-6, 2**-8, "accumulated in fp32 as above, then rounded once to 8 significant bits")
FP16 = Tolerance(1e-6, 2**-11, "accumulated in fp32 as above, then rounded once to 11 significant bits")
KERNEL_TOLERANCES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}

LOGITS = 1e-4
"""Largest difference of a logit of a tiny fp32 model from transformers': logits reach about 8, and 4.5e-5 is what order of
summation alone has been seen to give."""
