"""The choice of a backend, with its reasons."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from eightfold.errors import BackendError
from eightfold.kernels.registry import Declined, Hardware, check_name, choose

HARDWARE = Hardware(torch.device("cpu"), "a machine", None, frozenset(), 1 << 30, 2)


@dataclass
class Fake:
    """A backend that declines sizes above a limit."""

    name: str
    limit: int

    def declines(self, spec: int, hardware: Hardware) -> str | None:
        return None if spec <= self.limit else f"takes up to {self.limit}"


FAST, SLOW = Fake("fast", 10), Fake("slow", 100)


def test_auto_takes_the_first_that_accepts_and_keeps_the_reasons_of_the_better_ones() -> None:
    choice = choose("work", (FAST, SLOW), 50, HARDWARE)
    assert choice.backend is SLOW
    assert choice.declined == (Declined("fast", "takes up to 10"),)
    assert choose("work", (FAST, SLOW), 5, HARDWARE).declined == ()


def test_a_named_backend_runs_although_a_better_one_exists() -> None:
    choice = choose("work", (FAST, SLOW), 5, HARDWARE, requested="slow")
    assert (choice.backend, choice.declined, choice.requested) == (SLOW, (), "slow")


def test_a_named_backend_that_declines_is_an_error_with_what_would_work() -> None:
    with pytest.raises(
        BackendError, match=r"work: got backend fast, which declines: takes up to 10; expected one of: auto, slow"
    ):
        choose("work", (FAST, SLOW), 50, HARDWARE, requested="fast")


def test_a_name_of_other_hardware_is_an_error_with_what_would_work() -> None:
    with pytest.raises(
        BackendError, match=r"work: got backend other, which is not for a machine; expected one of: auto, fast, slow"
    ):
        choose("work", (FAST, SLOW), 5, HARDWARE, requested="other")


@pytest.mark.parametrize("name", ["auto", "fast", "slow"])
def test_names_that_are_known_somewhere_pass(name: str) -> None:
    check_name("backend", name, {"cpu": (FAST,), "cuda": (SLOW, FAST)}, frozenset())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cutlass", r"option: got cutlass, which Eightfold does not have; expected one of: auto, fast, slow$"),
        ("flast", r"option: got flast, which is no backend; expected one of: auto, fast, slow\. Did you mean fast\?"),
        ("", r"option: got , which is no backend"),
    ],
)
def test_a_name_that_is_not_built_and_one_that_is_unknown_are_told_apart(name: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        check_name("option", name, {"cpu": (FAST, SLOW)}, frozenset({"cutlass"}))


def test_when_all_decline_the_error_lists_every_reason() -> None:
    with pytest.raises(BackendError, match=r"fast: takes up to 10; slow: takes up to 100"):
        choose("work", (FAST, SLOW), 500, HARDWARE)


def test_a_fault_inside_a_check_is_not_a_refusal() -> None:
    class Broken:
        name = "broken"

        def declines(self, spec: int, hardware: Hardware) -> str | None:
            raise KeyError("a fault of ours")

    with pytest.raises(KeyError, match="a fault of ours"):
        choose("work", (Broken(),), 5, HARDWARE)
