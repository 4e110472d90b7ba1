"""Which tensors are quantized, and why each other one is not.

The role of a tensor decides; a user's ignore list can take layers out. Every decision carries its reason, and the loader,
`inspect` and the tests all ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from eightfold.errors import InputError


class Role(Enum):
    """What a tensor is to the model. The value says why such a tensor is kept as it is, where it is."""

    LINEAR = "projection"
    EXPERTS = "experts"
    HEAD = "output head"
    EMBEDDING = "embedding"
    NORM = "norm"
    BIAS = "bias"
    ROUTER = "router: a wrong expert costs more than its bytes"
    CONVOLUTION = "convolution: four taps a channel"
    RECURRENCE = "recurrence: its errors add up over a whole text"

    @property
    def quantizable(self) -> bool:
        """Whether the policy ever quantizes such a tensor."""
        return self in (Role.LINEAR, Role.EXPERTS, Role.HEAD)

    @property
    def keeps_precision(self) -> bool:
        """Whether such a tensor keeps the dtype of the file whatever the activations have."""
        return self in (Role.ROUTER, Role.RECURRENCE)


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a tensor is quantized, and the reason in a few words."""

    quantized: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Policy:
    """What the user asked for.

    Attributes:
        quantization: "mxfp8", or None to keep everything.
        ignored_layers: dotted names, or parts of them, of layers to keep; matched at the dots.
        quantize_lm_head: quantize the output head too.
        requantize: turn weights that a checkpoint holds in another 8-bit format into "mxfp8".
    """

    quantization: str | None
    ignored_layers: tuple[str, ...] = ()
    quantize_lm_head: bool = False
    requantize: bool = False

    def decide(self, role: Role, layers: Sequence[str]) -> Decision:
        """Decide for one tensor.

        Args:
            role: what it is.
            layers: the checkpoint's names of the layers it is made of, such as the three projections of a fused qkv.

        Raises:
            InputError: the ignore list names some parts of a fused tensor and not others.
        """
        if self.quantization is None:
            return Decision(False, "quantization is off")
        if role is Role.HEAD and not self.quantize_lm_head:
            return Decision(False, "output head; --quantize-lm-head would include it")
        if not role.quantizable:
            return Decision(False, role.value)
        ignored = [layer for layer in layers if self._ignoring(layer)]
        if not ignored:
            return Decision(True, "")
        if len(ignored) < len(layers):
            rest = ", ".join(layer for layer in layers if layer not in ignored)
            raise InputError(
                "quantization_ignored_layers",
                got=f"{', '.join(ignored)} without {rest}",
                expected="all parts or none of them, since they are one fused tensor here",
            )
        return Decision(False, f"ignored by {self._ignoring(layers[0])}")

    def decide_stored(self, role: Role, layers: Sequence[str], stored: str | None, excluded: str | None) -> Decision:
        """Decide for one tensor of a checkpoint that is quantized already.

        Args:
            role: what it is.
            layers: as in `decide`.
            stored: the format that the checkpoint has it in; None where it is not quantized there.
            excluded: the checkpoint's own pattern that says so, if any.

        Raises:
            InputError: it would have to become what it is not, and nobody asked for that by name.
        """
        if stored is None:
            if role is Role.HEAD and self.quantize_lm_head:
                return self.decide(role, layers)
            kept = f"the checkpoint keeps it{f', by {excluded}' if excluded else ''}"
            return Decision(False, kept if role.quantizable else role.value)
        if not role.quantizable:
            return Decision(False, f"widened from {stored}; {role.value}")
        ignored = next((layer for layer in layers if self._ignoring(layer)), None)
        if ignored is not None:
            raise InputError(
                "quantization_ignored_layers",
                got=f"{self._ignoring(ignored)}, which matches {ignored}",
                expected=f"layers that the checkpoint has not quantized: this one is in {stored} already",
                remedy="Serve the checkpoint that this one was made from.",
            )
        if self.quantization not in (None, stored) and not self.requantize:
            raise InputError(
                "quantization",
                got=f"{self.quantization} for {layers[0]}, which the checkpoint has in {stored}",
                expected="no quantization, which serves it as it is",
                remedy="--requantize makes MXFP8 of it, at the price of rounding twice.",
            )
        return Decision(True, "")

    def check_ignored(self, layers: Iterable[str]) -> None:
        """Refuse a pattern that matches no layer that could be quantized.

        Raises:
            InputError: naming the pattern and a layer whose name shows the spelling.
        """
        known = tuple(layers)
        for pattern in self.ignored_layers:
            if not any(matches(pattern, layer) for layer in known):
                example = known[0] if known else "none: this model has no layer to quantize"
                raise InputError(
                    "quantization_ignored_layers", got=f"{pattern}, which matches no layer", expected=f"names such as {example}"
                )

    def _ignoring(self, layer: str) -> str | None:
        return next((pattern for pattern in self.ignored_layers if matches(pattern, layer)), None)


def matches(pattern: str, layer: str) -> bool:
    """Whether the dotted parts of `pattern` stand together among those of `layer`: `fc1` matches `a.fc1.b`, not `a.fc10`."""
    return f".{pattern.strip('.')}." in f".{layer}."
