"""What quantization costs in quality, on real text.

    python -m eightfold.benchmarks.perplexity --model smollm2
    python -m eightfold.benchmarks.perplexity --experts 4

Weights go through this package's own loader, and logits through its own model with fp32 activations. KL and the share of equal
likeliest tokens are against the weights as they are in the checkpoint. The last row also rounds the input of every quantized
dense product to FP8 with a scale a token, which is what the fold path multiplies on a GPU. With `--experts` the model is a
mixture that `eightfold/benchmarks/mixture.py` makes from the dense one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from eightfold.benchmarks.mixture import write_mixture
from eightfold.benchmarks.report import print_report
from eightfold.benchmarks.text import state_of_the_union
from eightfold.errors import InputError
from eightfold.evaluate import LogitsFn, checkpoint_logits, evaluate
from eightfold.hub.resolve import resolve_model
from eightfold.kernels.hardware import detect
from eightfold.kernels.operations import LinearBackend, LinearSpec
from eightfold.kernels.registry import Choice, Hardware
from eightfold.kernels.selection import Kernels
from eightfold.quant.fp8 import WeightTensor
from eightfold.quant.mxfp8 import E4M3_MAX, ScaleRule
from eightfold.quant.policy import Policy


@dataclass(slots=True)
class RoundedActivations:
    """A backend whose inputs are rounded to FP8, one scale amax / 448 for each token, before another one multiplies."""

    inner: LinearBackend
    name: str = "fp8 per token"

    def declines(self, spec: LinearSpec, hardware: Hardware) -> str | None:
        """As the backend inside."""
        return self.inner.declines(spec, hardware)

    def prepare(self, weight: WeightTensor, bias: Tensor | None) -> Any:
        """As the backend inside."""
        return self.inner.prepare(weight, bias)

    def run(self, x: Tensor, prepared: Any) -> Tensor:
        """y `[M, N]` from x `[M, K]` after rounding x."""
        scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
        return self.inner.run((x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale, prepared)


@dataclass(frozen=True, slots=True)
class RoundingKernels(Kernels):
    """Kernels whose quantized products round their inputs."""

    def linear(self, spec: LinearSpec) -> Choice[LinearBackend]:
        """The usual choice, wrapped for quantized weights."""
        choice = Kernels.linear(self, spec)
        if spec.weight_format != "mxfp8":
            return choice
        return Choice(RoundedActivations(choice.backend), choice.declined, choice.requested)


def windows_of(text: str, tokenizer: Any, *, num_windows: int, length: int) -> list[list[int]]:
    """The first `num_windows * length` tokens of a text, without a BOS, in windows.

    Raises:
        InputError: the text has fewer tokens.
    """
    needed = num_windows * length
    enough = text[: needed * 8]  # a token of prose has four or five characters
    token_ids = tokenizer.encode(enough, add_special_tokens=False)
    if len(token_ids) < needed:
        raise InputError(
            "text",
            got=f"{len(token_ids)} tokens",
            expected=f"at least {needed}: {num_windows} windows of {length}",
            remedy="Give more text, or fewer --windows or a smaller --length.",
        )
    return [token_ids[start : start + length] for start in range(0, needed, length)]


def rows(path: Path) -> dict[str, Callable[[], LogitsFn]]:
    """The rows of the table: a name, and how to load the model that it is about."""
    kernels = Kernels(detect("cpu"), torch.float32)
    rounding = RoundingKernels(detect("cpu"), torch.float32)
    mxfp8 = Policy("mxfp8")
    return {
        "as stored": lambda: checkpoint_logits(path, kernels, policy=Policy(None)),
        "mxfp8 floor": lambda: checkpoint_logits(path, kernels, policy=mxfp8, rule=ScaleRule.FLOOR),
        "mxfp8 ceil": lambda: checkpoint_logits(path, kernels, policy=mxfp8),
        "mxfp8 ceil, folded": lambda: checkpoint_logits(path, kernels, policy=mxfp8, folded=True),
        "mxfp8 ceil, folded, fp8 activations": lambda: checkpoint_logits(path, rounding, policy=mxfp8, folded=True),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id or an alias")
    parser.add_argument("--experts", type=int, help="make a mixture of so many experts from the model, and measure that")
    parser.add_argument("--text", type=Path, nargs="+", help="files to read instead of the State of the Union")
    parser.add_argument("--windows", type=int, default=8, help="windows to score")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    arguments = parser.parse_args()
    path = resolve_model(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.experts:
            path = write_mixture(path, Path(folder), num_experts=arguments.experts)
        measure(path, arguments)


def measure(path: Path, arguments: argparse.Namespace) -> None:
    """Score every row on the same windows, and print the table."""
    text = "".join(file.read_text(encoding="utf-8") for file in arguments.text) if arguments.text else state_of_the_union()
    tokenizer = AutoTokenizer.from_pretrained(path)
    windows = windows_of(text, tokenizer, num_windows=arguments.windows, length=arguments.length)
    loaders = rows(path)
    reference = loaders.pop("as stored")()
    results = {"as stored": evaluate(reference, reference, windows)}
    for name, load in loaders.items():
        results[name] = evaluate(load(), reference, windows)
    table = [
        [name, f"{quality.perplexity:.3f}", f"{quality.kl:.5f}", f"{quality.same_top1:.4f}"]
        for name, quality in results.items()
    ]
    scored = results["as stored"].num_tokens
    experts = f" as {arguments.experts} experts" if arguments.experts else ""
    print_report(
        f"perplexity {arguments.model}{experts}, {scored} tokens",
        ["weights", "perplexity", "KL", "same top-1"],
        table,
        {
            "tokens": scored,
            "rows": {
                name: {"perplexity": quality.perplexity, "kl": quality.kl, "same_top1": quality.same_top1}
                for name, quality in results.items()
            },
        },
    )


if __name__ == "__main__":
    main()
