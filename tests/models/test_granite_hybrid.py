"""Granite hybrids: a comparison with transformers sees a wrong multiplier. `test_causal_lm.py` compares the right ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eightfold.layers.rotary import RopeConfig
from eightfold.models.granite_hybrid import GraniteHybrid, GraniteHybridArch
from eightfold.models.loader import read_model
from tests.models.checkpoints import LENGTH, case, random_prompt, reference_model, save_checkpoint
from tests.models.paged_run import PagedRun, load_model

CHANGES: tuple[tuple[str, Callable[[GraniteHybridArch], GraniteHybridArch]], ...] = (
    ("granite-hybrid", lambda arch: replace(arch, embedding_multiplier=1.0)),
    ("granite-hybrid", lambda arch: replace(arch, residual_multiplier=1.0)),
    ("granite-hybrid", lambda arch: replace(arch, logits_scaling=1.0)),
    ("granite-hybrid", lambda arch: replace(arch, attention_scale=arch.head_dim**-0.5)),
    ("granite-hybrid", lambda arch: replace(arch, rope=RopeConfig("default", 10_000.0, arch.head_dim))),
    ("granite-hybrid-rope", lambda arch: replace(arch, rope=None)),
)


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_comparison_sees_a_wrong_feature(
    name: str, change: Callable[[GraniteHybridArch], GraniteHybridArch], tmp_path: Path
) -> None:
    folder = save_checkpoint(case(name), tmp_path)
    found = read_model(folder)
    assert isinstance(found, GraniteHybrid)
    run = PagedRun(load_model(folder, GraniteHybrid(change(found.arch))), [random_prompt(LENGTH)])
    run.step({0: LENGTH})
    with pytest.raises(AssertionError, match="not close"):
        run.check(reference_model(folder))
