"""Which layers to leave in bf16 so that the model stays within a budget of KL divergence, and as few of them as will do.

Rounding errors of different layers are nearly independent, and to second order the KL divergence of a model is then the sum of
what each layer causes alone. So

    measure    for each layer, the KL of the model in which only that layer is quantized
    order      the layers by it, the largest first
    keep       the first n of them, with the smallest n whose model meets the budget

and the last step measures instead of adding up: it begins at the n that the sums predict, and halves the interval in which the
answer lies until n meets the budget and n - 1 does not. The whole takes as many runs over the calibration text as there are
layers, and a few more. Among choices of n layers the first n need not be the best ones, which only trying all would find.

Two models are in memory, one quantized and one not, and the mixed one is the quantized one in which some modules are replaced
by their twins. A "layer" is what the kernels multiply at once: a fused qkv counts as one, and so do all experts of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from eightfold.errors import InputError
from eightfold.evaluate import LogitsFn, evaluate, load_model, logits_of
from eightfold.layers.module import Module
from eightfold.layers.weight import Weight
from eightfold.models.loader import open_checkpoint, plan, read_model
from eightfold.quality import Pair
from eightfold.quant.policy import Policy, matches
from eightfold.types import Progress

# Points of the curve beside those that the search measures.
_CURVE_POINTS = 8


@dataclass(frozen=True, slots=True)
class Unit:
    """What is kept or quantized as a whole.

    Attributes:
        layers: the checkpoint's names of the layers that it is made of.
        bytes_kept: bytes in memory as it is in the files.
        bytes_quantized: bytes in memory in MXFP8.
    """

    layers: tuple[str, ...]
    bytes_kept: int
    bytes_quantized: int


@dataclass(frozen=True, slots=True)
class Point:
    """One measured choice.

    Attributes:
        kept: how many units are kept, those with the largest effect.
        nbytes: bytes of the model's weights in memory.
        kl: KL divergence on the calibration text, in nats.
    """

    kept: int
    nbytes: int
    kl: float


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """What the budget buys.

    Attributes:
        budget: in nats.
        units: all of them, the one with the largest effect first.
        effects: KL of the model in which only that unit is quantized, in the same order.
        kept: how many of them are kept.
        curve: what was measured, by number of units kept; bytes against KL.
        ignored_layers: the units that are kept, as `--quantization-ignored-layers` takes them.
        num_tokens: scored tokens of the calibration text.
    """

    budget: float
    units: tuple[Unit, ...]
    effects: tuple[float, ...]
    kept: int
    curve: tuple[Point, ...]
    ignored_layers: tuple[str, ...]
    num_tokens: int

    @property
    def chosen(self) -> Point:
        """The point of the curve that was chosen."""
        return next(point for point in self.curve if point.kept == self.kept)


class MixedModel:
    """A quantized model in which any of its quantized modules can be replaced by the one that is not.

    Args:
        pair: the checkpoint, which is not quantized in its files, and how it would be.

    Attributes:
        units: what can be replaced, in the order of the model.
        bytes_quantized: bytes of all weights in memory with nothing kept.
        logits: the model as it is at the moment.
        reference: the model that is not quantized.
    """

    def __init__(self, pair: Pair) -> None:
        if pair.is_serialized:
            raise InputError(
                "--quantization-budget",
                got=f"{pair.path}, which is quantized in its files",
                expected="the checkpoint that it was made from: what was lost does not come back",
            )
        quantized = load_model(pair.path, pair.kernels, policy=pair.policy, rule=pair.rule)
        dense = load_model(pair.path, pair.kernels, policy=Policy(None))
        self.logits, self.reference = logits_of(quantized, pair.kernels), logits_of(dense, pair.kernels)
        self._twins = list(_twins(quantized, dense))
        sizes = [_Sizes(pair, policy) for policy in (pair.policy, Policy(None))]
        self.bytes_quantized = sizes[0].total
        self.units = tuple(
            Unit(sizes[0].layers(names), sizes[1].of(names), sizes[0].of(names))
            for names in (_quantized_weights(twins[2]) for twins in self._twins)
        )

    def keep(self, kept: Iterable[int]) -> None:
        """Have the units of these numbers as they are in the files, and all others quantized."""
        numbers = set(kept)
        for number, (parent, name, quantized, dense) in enumerate(self._twins):
            setattr(parent, name, dense if number in numbers else quantized)


def choose(pair: Pair, windows: Sequence[Sequence[int]], budget: float, *, report: Progress | None = None) -> KeptLayers:
    """Find the fewest layers to keep.

    Args:
        pair: the checkpoint, and how it would be quantized.
        windows: token ids of the calibration text. The reference's logits of all of them are held in memory.
        budget: the KL divergence that is allowed, in nats.
        report: told about runs over the text, as the phase "measure".

    Raises:
        InputError: the checkpoint is quantized in its files, or no layer would be quantized.
    """
    mixed = MixedModel(pair)
    if not mixed.units:
        raise InputError("--quantization-budget", got="a model of which nothing is quantized", expected="--quantization mxfp8")
    reference = _remembered(mixed.reference, windows)
    num_units, num_tokens = len(mixed.units), sum(len(window) - 1 for window in windows)
    done = 0

    def measure(kept: Iterable[int]) -> float:
        nonlocal done
        mixed.keep(kept)
        kl = evaluate(mixed.logits, reference, windows).kl
        done += 1
        if report is not None:
            report("measure", min(done, num_units), num_units)
        return kl

    numbers = range(num_units)
    effects = {number: measure(other for other in numbers if other != number) for number in numbers}
    order = sorted(numbers, key=lambda number: -effects[number])
    known: dict[int, float] = {num_units: 0.0}

    def kl_at(count: int) -> float:
        if count not in known:
            known[count] = measure(order[:count])
        return known[count]

    fewest(kl_at, [effects[number] for number in order], budget)
    for step in range(_CURVE_POINTS):
        kl_at(num_units * step // _CURVE_POINTS)
    # The curve is not quite monotonic, and a point of it may meet the budget with fewer still.
    kept = min(count for count, kl in known.items() if kl <= budget)
    units = tuple(mixed.units[number] for number in order)
    names = [layer for unit in units[:kept] for layer in unit.layers]
    everything = [layer for unit in units for layer in unit.layers]
    already = pair.policy.ignored_layers
    return KeptLayers(
        budget=budget,
        units=units,
        effects=tuple(effects[number] for number in order),
        kept=kept,
        curve=tuple(Point(count, _bytes(mixed, units, count), kl) for count, kl in sorted(known.items())),
        ignored_layers=(*already, *shortest_names(names, everything)),
        num_tokens=num_tokens,
    )


def fewest(kl_at: Callable[[int], float], effects: Sequence[float], budget: float) -> int:
    """The smallest n with `kl_at(n) <= budget`, where the KL falls as n grows.

    Args:
        kl_at: the KL divergence with the first n units kept; it is 0 with all of them.
        effects: what each unit causes alone, the largest first: where to begin.
        budget: the bound.

    Returns:
        An n that meets the budget while n - 1 does not.
    """
    none = kl_at(0)
    if none <= budget:
        return 0
    fails, meets = 0, len(effects)
    total = math.fsum(effects)
    # Effects add up to about the whole, and what they miss is taken to be shared in proportion.
    predicted = next((n for n in range(meets + 1) if none * math.fsum(effects[n:]) <= budget * total), meets)
    for first in (predicted, predicted - 1):
        if fails < first < meets:
            fails, meets = (fails, first) if kl_at(first) <= budget else (first, meets)
    while meets - fails > 1:
        middle = (fails + meets) // 2
        fails, meets = (fails, middle) if kl_at(middle) <= budget else (middle, meets)
    return meets


def shortest_names(chosen: Sequence[str], layers: Sequence[str]) -> tuple[str, ...]:
    """Dotted names, as short as can be, that match all of `chosen` and nothing else of `layers`: one for a block kept whole."""
    rest = set(chosen)
    found: list[str] = []
    for layer in chosen:
        if layer not in rest:
            continue
        parts = layer.split(".")
        # The name with the fewest parts that names no layer outside.
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            matched = {other for other in layers if matches(name, other)}
            if matched <= set(chosen):
                found.append(name)
                rest -= matched
                break
        else:  # a layer inside another one, which has no name that the other has not
            found.append(layer)
    return tuple(found)


class _Sizes:
    """Bytes and names of the weights of a model, as a policy would have them."""

    def __init__(self, pair: Pair, policy: Policy) -> None:
        model, self._checkpoint = read_model(pair.path), open_checkpoint(pair.path)
        load_plan = plan(model, self._checkpoint, policy, pair.kernels)
        self.total = load_plan.weight_bytes
        self._bytes: dict[str, int] = {}
        self._parts: dict[str, list[str]] = {}
        for part, places in load_plan.destinations.items():
            for place in places:
                name = place.weight.name
                self._bytes[name] = self._bytes.get(name, 0) + place.nbytes
                self._parts.setdefault(name, []).append(part)

    def of(self, names: Iterable[str]) -> int:
        return sum(self._bytes.get(name, 0) for name in names)

    def layers(self, names: Iterable[str]) -> tuple[str, ...]:
        parts = [part for name in names for part in self._parts[name]]
        return tuple(dict.fromkeys(self._checkpoint.tensors[part].stored_name.rpartition(".")[0] for part in parts))


_Twins = tuple[Module, str, Module, Module]


def _twins(quantized: Module, dense: Module) -> Iterable[_Twins]:
    """Where the quantized model has a module with quantized weights: whose attribute it is, its name, it, and its twin."""
    for parent, other in zip(quantized.modules(), dense.modules(), strict=True):
        for name, child in vars(parent).items():
            if isinstance(child, Module) and _quantized_weights(child):
                yield parent, name, child, vars(other)[name]


def _quantized_weights(module: Module) -> list[str]:
    """Names of the quantized weights that a module multiplies with itself."""
    return [value.name for value in vars(module).values() if isinstance(value, Weight) and value.decision.quantized]


def _bytes(mixed: MixedModel, units: Sequence[Unit], kept: int) -> int:
    return mixed.bytes_quantized + sum(unit.bytes_kept - unit.bytes_quantized for unit in units[:kept])


def _remembered(model: LogitsFn, windows: Sequence[Sequence[int]]) -> LogitsFn:
    """A model that was asked about each window once."""
    known = {tuple(window): model(window) for window in windows}
    return lambda window: known[tuple(window)]
