"""The one table of tolerances. The same values hold everywhere, and each has its reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a result may lie from the exact one of the same operands. The format's own error has no part in it.

    Attributes:
        name: for messages.
        relative_norm: bound on the Frobenius norm of the difference, over that of the exact result.
        accumulation: for each element, share of the sum of magnitudes that went into it.
        rounding: for each element, share of itself that rounding it to its dtype may change.
        why: where the numbers come from.
        dtypes: what the result may be; empty where any will do.
    """

    name: str
    relative_norm: float
    accumulation: float
    rounding: float
    why: str
    dtypes: tuple[torch.dtype, ...] = ()


EXACT = Tolerance("exact", 0.0, 0.0, 0.0, "the operation moves or decodes values and rounds nothing")
FP32 = Tolerance(
    "fp32 result",
    1e-6,
    1e-6,
    0.0,
    "an fp32 sum of thousands of terms over several lanes is within a few units of 2^-24 of the sum of magnitudes",
    (torch.float32,),
)
BF16 = Tolerance(
    "bf16 result",
    3e-3,
    1e-6,
    2**-8,
    "accumulated in fp32 as above, then rounded once to 8 significant bits: by 1.7e-3 as a norm over many elements of like "
    "size, and by up to 2.2e-3 where a few large ones carry it",
    (torch.bfloat16,),
)
FP16 = Tolerance(
    "fp16 result",
    4e-4,
    1e-6,
    2**-11,
    "accumulated in fp32 as above, then rounded once to 11 significant bits: by an eighth of what bf16 loses",
    (torch.float16,),
)
FP8_TENSOR_CORE = Tolerance(
    "result of an FP8 tensor core",
    3e-3,
    1e-3,
    2**-8,
    "the tensor core adds FP8 products in an accumulator of about 14 bits, and the sum is rounded to bf16 at the coarsest",
    (torch.bfloat16, torch.float16, torch.float32),
)
TOLERANCES = (EXACT, FP32, BF16, FP16, FP8_TENSOR_CORE)
OF_DTYPE = {tolerance.dtypes[0]: tolerance for tolerance in (FP32, BF16, FP16)}

LOGITS = 1e-4
"""Largest difference of a logit of a tiny fp32 model from transformers': logits reach about 8, and 4.5e-5 is what order of
summation alone has been seen to give."""
