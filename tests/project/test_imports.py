"""The import rules hold, and each check finds a planted breach."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import eightfold
from tests.project.imports import (
    CHECKS,
    cycles,
    direction_faults,
    hardware_faults,
    layout_faults,
    library_faults,
    local_import_faults,
    rule_for,
    torch_faults,
)

PACKAGE = Path(eightfold.__file__).parent
LIGHT = ("engine.scheduler", "cache.blocks", "cache.prefix", "cache.manager", "errors", "types", "config")


@pytest.mark.parametrize("check", CHECKS)
def test_the_package_keeps_the_rules(check: Callable[[Path], list[str]]) -> None:
    assert check(PACKAGE) == []


PLANTED: list[tuple[Callable[[Path], list[str]], dict[str, str], str]] = [
    (direction_faults, {"layers/a.py": "from eightfold.models.b import c"}, "layers.a line 1 imports eightfold.models.b"),
    (
        direction_faults,
        {"quant/a.py": "def f():\n    import eightfold.kernels.b"},
        "quant.a line 2 imports eightfold.kernels.b",
    ),
    (
        direction_faults,
        {"models/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from eightfold.engine.engine import Engine"},
        "models.a line 3",
    ),
    (direction_faults, {"engine/scheduler.py": "from eightfold.models.registry import FAMILIES"}, "engine.scheduler line 1"),
    (direction_faults, {"hub/a.py": "from eightfold.models import arch"}, "hub.a line 1"),
    (direction_faults, {"llm.py": "import eightfold.cli"}, "llm line 1"),
    (direction_faults, {"text.py": "from eightfold.engine.engine import Engine"}, "text line 1"),
    (direction_faults, {"engine/engine.py": "from eightfold.cache.pools import CachePool"}, "engine.engine line 1"),
    (direction_faults, {"engine/sampler.py": "from eightfold.kernels.b import c"}, "engine.sampler line 1"),
    (direction_faults, {"models/a.py": "from eightfold.quant.policy import Policy"}, "models.a line 1"),
    (direction_faults, {"models/a.py": "from eightfold.cache.pools import CachePool"}, "models.a line 1"),
    (direction_faults, {"layers/a.py": "from ..models import b"}, "layers.a line 1 imports models.b"),
    (direction_faults, {"engine/engine.py": "async def f():\n    from eightfold.llm import LLM"}, "engine.engine line 2"),
    (direction_faults, {"memory.py": "import eightfold.errors"}, "memory line 1"),
    (direction_faults, {"text.py": "import eightfold.config"}, "text line 1"),
    (direction_faults, {"errors.py": "import eightfold.types"}, "errors line 1"),
    (cycles, {"cache/a.py": "import eightfold.cache.b", "cache/b.py": "import eightfold.cache.a"}, "cache.a imports itself"),
    (
        torch_faults,
        {"cache/blocks.py": "import eightfold.cache.helper", "cache/helper.py": "from torch import nn"},
        "cache.blocks imports torch",
    ),
    (torch_faults, {"engine/scheduler.py": "import torch"}, "engine.scheduler imports torch"),
    (torch_faults, {"cache/manager.py": "", "cache/__init__.py": "import torch"}, "cache.manager imports torch"),
    (
        direction_faults,
        {"hub/a.py": "x = import_module('eightfold.engine.engine')"},
        "hub.a line 1 imports eightfold.engine.engine",
    ),
    (
        library_faults,
        {"models/a.py": "import importlib\nx = importlib.import_module('fastapi')"},
        "models.a line 2 imports fastapi",
    ),
    (library_faults, {"engine/engine.py": "import fastapi"}, "engine.engine line 1 imports fastapi"),
    (library_faults, {"llm.py": "from rich.table import Table"}, "llm line 1 imports rich.table"),
    (library_faults, {"engine/engine.py": "from tokenizers import Tokenizer"}, "engine.engine line 1 imports tokenizers"),
    (local_import_faults, {"models/a.py": "def f():\n    import json"}, "models.a line 2 imports json inside a function"),
    (hardware_faults, {"layers/a.py": "import torch\nx = torch.cuda.is_available()"}, "layers.a line 2 asks torch.cuda"),
    (hardware_faults, {"llm.py": "from torch.cuda import is_available"}, "llm line 1 imports torch.cuda"),
    (hardware_faults, {"layers/a.py": "from torch import cuda"}, "layers.a line 1 imports torch.cuda"),
    (hardware_faults, {"models/a.py": "from platform import machine"}, "models.a line 1 imports platform.machine"),
    (layout_faults, {"layers/a.py": "import torch\nx = torch.float8_e4m3fn"}, "layers.a line 2 knows torch.float8_e4m3fn"),
]


@pytest.mark.parametrize(("check", "files", "message"), PLANTED)
def test_a_planted_breach_is_named(
    tmp_path: Path, check: Callable[[Path], list[str]], files: dict[str, str], message: str
) -> None:
    package = tmp_path / "eightfold"
    others = ("models/b", "models/arch", "models/registry", "kernels/b", "engine/engine", "cli", "cache/pools", "config", "llm")
    for name in (*others, "errors", "types", "quant/policy", *(n[:-3] for n in files)):
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(files.get(f"{name}.py", ""))
    faults = check(package)
    expected = message.replace("eightfold.", "", 1) if "imports eightfold." in message else message
    assert any(expected in fault for fault in faults), faults


def test_every_check_has_a_planted_breach() -> None:
    assert {check for check, _, _ in PLANTED} == set(CHECKS)


def test_a_module_without_a_layer_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"stray\.module stands in no layer"):
        rule_for("stray.module")


def test_what_must_do_without_torch_does_when_it_runs() -> None:
    imports = ", ".join(f"eightfold.{name}" for name in LIGHT)
    subprocess.run([sys.executable, "-c", f"import sys, {imports}; sys.exit('torch' in sys.modules)"], check=True)


def test_importing_the_package_is_cheap_and_brings_no_torch() -> None:
    code = "import sys, eightfold; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3
