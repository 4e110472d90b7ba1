"""Habits that can be read from the sources, each check shown to find a planted fault."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest

import eightfold
from eightfold.engine.engine import Engine

PACKAGE = Path(eightfold.__file__).parent
UNCACHED = ("engine", "layers", "models")
STATELESS = ("engine", "layers", "models", "kernels", "quant", "cache")
# Input from users and checkpoints passes through these; elsewhere an assert may guard against our own mistakes.
NO_ASSERT_FOLDERS = ("cli", "server", "models", "hub", "engine", "quant", "layers", "cache")
NO_ASSERT = (*NO_ASSERT_FOLDERS, "config.py", "llm.py", "text.py", "errors.py", "evaluate.py", "inspection.py")
DOCUMENTED = ("quant", "kernels", "engine", "layers", "models", "cache", "hub", "text.py", "llm.py", "types.py", "config.py")
MAY_READ_ENVIRONMENT = ("config.py",)
MAY_WRITE_FROZEN = ("config.py", "types.py")
MOST_LINES = 450
# Longer files, each with its reason.
LONG_FILES: dict[str, str] = {}
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
CHANGING = ("add", "append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")
MUTABLE_CALLS = ("dict", "list", "set", "defaultdict", "OrderedDict", "deque", "Counter")

Check = Callable[[Path], list[str]]


def sources(package: Path, within: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.Module]]:
    """Files of the package (below `within`, where given) and their syntax trees."""
    for file in sorted(package.rglob("*.py")):
        name = str(file.relative_to(package))
        if not within or any(name == prefix or name.startswith(f"{prefix}/") for prefix in within):
            yield name, ast.parse(file.read_text(encoding="utf-8"))


def mutable_state(package: Path) -> list[str]:
    """Lists, dicts and sets of a module or a class that are not named as constants, and `global` statements."""
    faults = []
    for name, tree in sources(package, STATELESS):
        owners = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef)]
        for node in (statement for owner in owners for statement in owner.body):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                written = ", ".join(ast.unparse(target) for target in targets)
                is_call = isinstance(node.value, ast.Call) and ast.unparse(node.value.func).split(".")[-1] in MUTABLE_CALLS
                if (isinstance(node.value, MUTABLE) or is_call) and not written.strip("_").isupper() and written != "__all__":
                    faults.append(f"{name} line {node.lineno}: {written} can change")
        faults += [f"{name} line {node.lineno}: global" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    return faults


def changed_constants(package: Path) -> list[str]:
    """Module-level constants that a function of the module writes into."""
    faults = []
    for name, tree in sources(package, STATELESS):
        constants = {
            ast.unparse(target)
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
            for target in targets:
                if isinstance(target, ast.Subscript) and ast.unparse(target.value) in constants:
                    faults.append(f"{name} line {target.lineno}: {ast.unparse(target.value)} is written to")
            method = node.func if isinstance(node, ast.Call) else None
            if isinstance(method, ast.Attribute) and method.attr in CHANGING and ast.unparse(method.value) in constants:
                faults.append(f"{name} line {method.lineno}: {ast.unparse(method.value)} is written to")
    return faults


def cached_functions(package: Path) -> list[str]:
    """Functions whose results outlive the engine that asked: hidden state of the process."""
    return [
        f"{name} line {node.lineno}: {node.name} is cached"
        for name, tree in sources(package, UNCACHED)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        if any(ast.unparse(item).split("(")[0].split(".")[-1] in ("cache", "lru_cache") for item in node.decorator_list)
    ]


def environment_reads(package: Path) -> list[str]:
    """Reads of the environment outside the one place that decides."""
    faults = []
    for name, tree in sources(package):
        for node in ast.walk(tree):
            imported = (
                [f"os.{item.name}" for item in node.names] if isinstance(node, ast.ImportFrom) and node.module == "os" else []
            )
            read = [ast.unparse(node)] if isinstance(node, ast.Attribute) else imported
            if name not in MAY_READ_ENVIRONMENT and isinstance(node, ast.Attribute | ast.ImportFrom):
                faults += [f"{name} line {node.lineno}: {item}" for item in read if item in ("os.environ", "os.getenv")]
    return faults


def frozen_writes(package: Path) -> list[str]:
    """Writes through the freeze of a dataclass."""
    return [
        f"{name} line {node.lineno}: object.__setattr__"
        for name, tree in sources(package)
        if name not in MAY_WRITE_FROZEN
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "object.__setattr__"
    ]


def asserts(package: Path) -> list[str]:
    """Assert statements where values come from users or checkpoints: they vanish under `python -O`."""
    return [
        f"{name} line {node.lineno}: assert"
        for name, tree in sources(package, NO_ASSERT)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]


def undocumented(package: Path) -> list[str]:
    """Public modules, classes and functions without a docstring."""
    faults = []
    for name, tree in sources(package, DOCUMENTED):
        public = [("module", tree)] + [
            (node.name, node)
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        ]
        faults += [
            f"{name}: {title}" for title, node in public if ast.get_docstring(node) is None and not _is_inner(node, tree)
        ]
    return faults


def unannotated(package: Path) -> list[str]:
    """Public functions with a parameter or a result without a type."""
    faults = []
    for name, tree in sources(package):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                stars = [item for item in (node.args.vararg, node.args.kwarg) if item is not None]
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *stars]
                bare = [item.arg for item in given if item.annotation is None and item.arg not in ("self", "cls")]
                bare += ["result"] if node.returns is None else []
                faults += [f"{name} line {node.lineno}: {node.name} has no type for {item}" for item in bare]
    return faults


def _is_inner(node: ast.AST, tree: ast.Module) -> bool:
    """Whether a function stands inside another, or is the protocol stub of a private class."""
    return any(
        node in ast.walk(outer) and node is not outer
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef) or (isinstance(outer, ast.ClassDef) and outer.name.startswith("_"))
    )


def long_files(package: Path) -> list[str]:
    """Files that ask to be split and have no reason."""
    counts = {str(file.relative_to(package)): len(file.read_text().splitlines()) for file in package.rglob("*.py")}
    return [f"{name}: {count} lines" for name, count in sorted(counts.items()) if count > MOST_LINES and name not in LONG_FILES]


def similar_models(package: Path) -> list[str]:
    """Pairs of model files that share more than half of their lines, imports aside: all are made of the same layers."""
    lines = {
        file.name: {
            line.strip() for line in file.read_text().splitlines() if len(line.strip()) > 20 and not line.startswith("from ")
        }
        for file in sorted((package / "models").glob("*.py"))
    }
    return [
        f"{first} and {second}"
        for first, second in combinations(lines, 2)
        if 2 * len(lines[first] & lines[second]) > min(len(lines[first]), len(lines[second])) > 0
    ]


CHECKS: tuple[Check, ...] = (
    mutable_state,
    cached_functions,
    changed_constants,
    environment_reads,
    frozen_writes,
    asserts,
    undocumented,
    unannotated,
    long_files,
    similar_models,
)


@pytest.mark.parametrize("check", CHECKS)
def test_the_package_has_the_habit(check: Check) -> None:
    assert check(PACKAGE) == []


@pytest.mark.parametrize(
    ("check", "files", "message"),
    [
        (mutable_state, {"engine/a.py": "cache = {}"}, "engine/a.py line 1: cache can change"),
        (mutable_state, {"models/a.py": "def f():\n    global x\n    x = 1"}, "models/a.py line 2: global"),
        (mutable_state, {"layers/a.py": "from collections import deque\nqueue = deque()"}, "layers/a.py line 2: queue"),
        (mutable_state, {"engine/a.py": "class A:\n    seen = []"}, "engine/a.py line 2: seen can change"),
        (cached_functions, {"models/a.py": "@functools.lru_cache(maxsize=1)\ndef f(): ..."}, "models/a.py line 2: f is cached"),
        (cached_functions, {"layers/a.py": "@cache\ndef f(): ..."}, "layers/a.py line 2: f is cached"),
        (changed_constants, {"layers/a.py": "TABLE = {}\ndef f():\n    TABLE[1] = 2"}, "layers/a.py line 3: TABLE is written"),
        (changed_constants, {"models/a.py": "SEEN = set()\ndef f():\n    SEEN.add(2)"}, "models/a.py line 3: SEEN is written"),
        (environment_reads, {"llm.py": "import os\nx = os.environ['A']"}, "llm.py line 2: os.environ"),
        (environment_reads, {"hub/a.py": "from os import environ"}, "hub/a.py line 1: os.environ"),
        (frozen_writes, {"engine/a.py": "object.__setattr__(x, 'a', 1)"}, "engine/a.py line 1"),
        (asserts, {"hub/a.py": "assert x"}, "hub/a.py line 1: assert"),
        (undocumented, {"kernels/a.py": '"""Text."""\nclass A:\n    def f(self): ...'}, "kernels/a.py: A"),
        (undocumented, {"kernels/a.py": '"""Text."""\nclass A:\n    """Text."""\n    def f(self): ...'}, "kernels/a.py: f"),
        (undocumented, {"quant/a.py": "x = 1"}, "quant/a.py: module"),
        (unannotated, {"hub/a.py": "def f(self, x) -> None: ..."}, "hub/a.py line 1: f has no type for x"),
        (unannotated, {"hub/a.py": "def f(**options) -> None: ..."}, "hub/a.py line 1: f has no type for options"),
        (unannotated, {"hub/a.py": "async def f(x: int): ..."}, "hub/a.py line 1: f has no type for result"),
        (long_files, {"models/a.py": "x = 1\n" * 451}, "models/a.py: 451 lines"),
        (
            similar_models,
            {"models/a.py": "a_rather_long_statement = 1\n", "models/b.py": "a_rather_long_statement = 1\n"},
            "a.py and b.py",
        ),
    ],
)
def test_a_planted_fault_is_named(tmp_path: Path, check: Check, files: dict[str, str], message: str) -> None:
    (tmp_path / "models").mkdir()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert any(message in fault for fault in check(tmp_path)), check(tmp_path)


def test_the_step_is_short() -> None:
    assert len(inspect.getsource(Engine.step).splitlines()) < 30


def test_reasons_for_long_files_are_still_needed() -> None:
    assert all(len((PACKAGE / name).read_text().splitlines()) > MOST_LINES and reason for name, reason in LONG_FILES.items())
