"""The tree that a model is: modules hold weights and other modules as attributes, in the order of their definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from eightfold.kernels.registry import Choice
from eightfold.kernels.selection import Kernels
from eightfold.layers.weight import Weight

FormatOf: TypeAlias = Callable[[Weight], str]
"""The format that a weight will have: "mxfp8", or the name of a dtype."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A backend that a layer computes with.

    Attributes:
        operation: what it computes, with the format of its weights where there are some, such as "linear mxfp8".
        layer: the layer's name.
        choice: the backend, and why better ones declined.
        weights: the weights that it multiplies with.
    """

    operation: str
    layer: str
    choice: Choice[Any]
    weights: tuple[Weight, ...] = ()


class Module:
    """A part of a model. It lists its weights for the loader, and takes its kernels when they are whole.

    Attributes:
        chosen: the backends that it computes with itself, once it is bound.
    """

    chosen: tuple[Chosen, ...] = ()

    def children(self) -> Iterator[Module]:
        """The modules directly below this one."""
        for value in vars(self).values():
            if isinstance(value, Module):
                yield value
            elif isinstance(value, list):
                yield from (item for item in value if isinstance(item, Module))

    def modules(self) -> Iterator[Module]:
        """This module and all below it."""
        yield self
        for child in self.children():
            yield from child.modules()

    def weights(self) -> Iterator[Weight]:
        """The weights of this module and of all below it."""
        for module in self.modules():
            yield from (value for value in vars(module).values() if isinstance(value, Weight))

    def choose(self, kernels: Kernels, format_of: FormatOf) -> Iterator[Chosen]:
        """The backends that this module will compute with itself, as far as that can be known before weights are read.

        Raises:
            BackendError: a named backend cannot run it, or none can.
        """
        del kernels, format_of
        yield from ()

    def release(self) -> None:
        """Let go of layouts that are a backend's own, before weights are loaded again; memory in use as it is stays."""
        for child in self.children():
            child.release()

    def bind(self, kernels: Kernels) -> None:
        """Take weights and backends, once all weights are whole. A module that keeps either extends this."""
        for child in self.children():
            child.bind(kernels)
