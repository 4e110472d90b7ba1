"""Backends, what they need, and how one is chosen, with the reasons.

A backend implements one operation of `operations.py`. It states its name, says why it declines a given piece of work (or
returns None), prepares a weight into the layout that it wants, and runs. `choose()` walks candidates in order of preference; it
is the only place where a choice is made, so the loader, `inspect`, `doctor` and the tests all get the same answer to the same
question. An exception inside a check is a fault of ours and propagates: it never counts as a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, Protocol, TypeVar

import torch

from eightfold.errors import BackendError

SpecT_contra = TypeVar("SpecT_contra", contravariant=True)
BackendT = TypeVar("BackendT", bound="Backend[Any]")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What this process runs on. Made once by `kernels.hardware.detect()`; tests make pretended ones.

    Attributes:
        device: where weights and activations live.
        name: for people, such as "NVIDIA H200" or "AMD EPYC (avx512)".
        capability: CUDA compute capability, such as (9, 0); None on a CPU and on a GPU of AMD.
        features: instruction sets that a CPU kernel may use: "avx2", "f16c", "avx512", "avx512_bf16", "neon"; the
            architecture of a GPU of AMD, such as "gfx950".
        memory_bytes: memory of the device.
        num_threads: CPU threads that an operation may use.
    """

    device: torch.device
    name: str
    capability: tuple[int, int] | None
    features: frozenset[str]
    memory_bytes: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Declined:
    """A candidate that was passed over, and why."""

    backend: str
    reason: str


class Backend(Protocol[SpecT_contra]):
    """What `choose()` needs of a backend: a name, and a reason where it cannot serve."""

    name: str

    def declines(self, spec: SpecT_contra, hardware: Hardware) -> str | None:
        """Why it cannot take `spec` on `hardware`, in a few words; None where it can."""


@dataclass(frozen=True, slots=True)
class Choice(Generic[BackendT]):
    """What `choose()` decided.

    Attributes:
        backend: the chosen backend.
        declined: the candidates ahead of it, in order of preference, each with its reason.
        requested: "auto", or the name that the user gave.
    """

    backend: BackendT
    declined: tuple[Declined, ...]
    requested: str


def choose(
    subject: str,
    candidates: Sequence[BackendT],
    spec: SpecT_contra,
    hardware: Hardware,
    *,
    requested: str = "auto",
) -> Choice[BackendT]:
    """Choose a backend for one piece of work.

    Args:
        subject: what is being decided, for errors: "linear model.layers.0.mlp.down_proj [576 x 1536] mxfp8".
        candidates: the backends for this hardware, best first.
        spec: the piece of work.
        hardware: where it will run.
        requested: "auto" walks the candidates; a name is used or refused, never replaced.

    Raises:
        BackendError: the named backend is not for this hardware or declines, or every candidate declines.
    """
    reasons = [(backend, backend.declines(spec, hardware)) for backend in candidates]
    able = [backend for backend, reason in reasons if reason is None]
    works = ", ".join(backend.name for backend in able) or "none of the backends built so far"
    if requested != "auto":
        for backend, reason in reasons:
            if backend.name == requested:
                if reason is None:
                    return Choice(backend, (), requested)
                raise BackendError(
                    subject, got=f"backend {requested}, which declines: {reason}", expected=f"one of: auto, {works}"
                )
        known = f"which is not for {hardware.name}"
        raise BackendError(subject, got=f"backend {requested}, {known}", expected=f"one of: auto, {works}")
    declined: list[Declined] = []
    for backend, reason in reasons:
        if reason is None:
            return Choice(backend, tuple(declined), requested)
        declined.append(Declined(backend.name, reason))
    listed = "; ".join(f"{item.backend}: {item.reason}" for item in declined)
    raise BackendError(
        subject, got=f"{hardware.name}, where every backend declines ({listed})", expected="a backend that accepts it"
    )


def check_name(option: str, name: str, table: Mapping[str, Sequence[Backend[Any]]], unbuilt: frozenset[str]) -> None:
    """Refuse the name of a backend that is none, before anything is chosen.

    Args:
        option: the option that it was given for.
        name: the name, or "auto".
        table: the backends of each kind of device.
        unbuilt: names that other engines know and this one does not have.

    Raises:
        BackendError: no device has a backend of that name.
    """
    known = list(dict.fromkeys(backend.name for candidates in table.values() for backend in candidates))
    if name in ("auto", *known):
        return
    near = get_close_matches(name, known, n=1)
    what = "which Eightfold does not have" if name in unbuilt else "which is no backend"
    raise BackendError(
        option,
        got=f"{name}, {what}",
        expected=f"one of: auto, {', '.join(known)}",
        remedy=f"Did you mean {near[0]}?" if near and name not in unbuilt else "",
    )
