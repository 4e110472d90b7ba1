"""The tree of modules."""

from __future__ import annotations

from eightfold.kernels.selection import Kernels
from eightfold.layers.linear import Linear
from eightfold.layers.module import Module
from eightfold.layers.norm import RMSNorm
from tests.layers.helpers import fill, kernels


class Leaf(Module):
    """Remembers that it was bound."""

    def __init__(self) -> None:
        self.norm = RMSNorm("norm", 8, 1e-5)
        self.bound = 0

    def bind(self, kernels: Kernels) -> None:
        super().bind(kernels)
        self.bound += 1


class Tree(Module):
    """A linear, and two leaves in a list."""

    def __init__(self) -> None:
        self.first = Linear("first", 8, {"first": 4}, bias=True)
        self.leaves = [Leaf(), Leaf()]
        self.other = "no module"


def test_weights_and_modules_in_the_order_of_definition() -> None:
    tree = Tree()
    assert [weight.name for weight in tree.weights()] == ["first.weight", "first.bias", "norm.weight", "norm.weight"]
    assert [type(module).__name__ for module in tree.modules()] == ["Tree", "Linear", "Leaf", "RMSNorm", "Leaf", "RMSNorm"]


def test_bind_reaches_every_module_once() -> None:
    tree = Tree()
    fill(tree)
    tree.bind(kernels())
    assert [leaf.bound for leaf in tree.leaves] == [1, 1]
