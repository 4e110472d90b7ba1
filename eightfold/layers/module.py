"""The tree that a model is: modules hold weights and other modules as attributes, in the order of their definition."""

from __future__ import annotations

from collections.abc import Iterator

from eightfold.kernels.selection import Kernels
from eightfold.layers.weight import Weight


class Module:
    """A part of a model. It lists its weights for the loader, and takes its kernels when they are whole."""

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

    def bind(self, kernels: Kernels) -> None:
        """Take weights and backends, once all weights are whole. A module that keeps either extends this."""
        for child in self.children():
            child.bind(kernels)
