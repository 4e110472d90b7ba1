"""README and docs are true: files, symbols, flags, links, make targets and command lines exist, and the version is one."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

from eightfold import __version__
from eightfold.cli import app
from eightfold.config import EngineConfig
from eightfold.kernels.selection import LINEAR
from eightfold.models.registry import FAMILIES
from eightfold.types import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted((ROOT / "docs").glob("*.md"))]
MOST_LINES = {"README.md": 150, "docs/architecture.md": 80}
MOST_COLUMNS = 128


def leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its words, also those of groups."""
    for name, command in group.commands.items():
        yield from leaves(command, f"{prefix}{name} ") if hasattr(command, "commands") else [(f"{prefix}{name}", command)]


COMMANDS: dict[str, Any] = dict(leaves(typer.main.get_command(app)))
KEYWORDS = {"LLM": EngineConfig, "SamplingParams": SamplingParams}
# Flags of other programs that the pages name.
FOREIGN_FLAGS = {"--help"}
# Hosts of package indexes, and paths of somebody's own machine, belong in no file. Written so that this file has none.
FORBIDDEN = [".".join(words) for words in (("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch"), ("npmjs", "org"))]
FORBIDDEN += ["/".join(("", *words)) for words in (("work", "venv"), ("work", "main"), ("work", "shared"), ("opt", "wheels"))]
TEXT_SUFFIXES = {".py", ".md", ".toml", ".cpp", ".h", ".json", ".yml", ".cfg", ""}

Check = Callable[[str, Path], list[str]]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def code_words(text: str) -> list[str]:
    """What stands in backquotes, outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def command_lines(text: str) -> Iterator[str]:
    """Command lines in fenced blocks and in backquotes."""
    for block in blocks(text, "sh"):
        yield from (line for line in block.splitlines() if line.strip())
    yield from (word for word in code_words(text) if word.startswith(("eightfold ", "make ", "python -m ")))


def flags() -> set[str]:
    """Every flag of every command and of every benchmark."""
    ours = {flag for command in COMMANDS.values() for item in command.params for flag in (*item.opts, *item.secondary_opts)}
    benchmarks = (file.read_text() for file in (ROOT / "eightfold/benchmarks").glob("*.py"))
    return ours.union(*(re.findall(r'"(--[a-z][\w-]*)"', source) for source in benchmarks))


def missing_files(text: str, root: Path) -> list[str]:
    """Paths in backquotes that are nowhere."""
    words = [word for word in code_words(text) if re.fullmatch(r"\.?[\w-]+(/[\w.-]*)+", word) and not word.startswith(".venv")]
    words += [word for word in code_words(text) if re.fullmatch(r"[\w-]+\.(py|md|toml)", word)]
    return [f"file {word}" for word in words if not (root / word).exists() and word not in ("a/b.py", "tests/a/test_b.py")]


def broken_links(text: str, root: Path) -> list[str]:
    """Links to files that do not exist, from the page's own folder or from the root."""
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    return [f"link {item}" for item in targets if item and not ((root / item).exists() or (root / "docs" / item).exists())]


def unknown_symbols(text: str, root: Path) -> list[str]:
    """Dotted names below `eightfold` that cannot be imported."""
    return [f"symbol {name}" for name in re.findall(r"\beightfold(?:\.\w+)+\b", text) if not exists(name)]


def exists(name: str) -> bool:
    """Whether a dotted name is a file of the tree, a module, or an attribute of one."""
    parts = name.split(".")
    if parts[-1] in ("py", "md"):
        return True
    for length in range(len(parts), 0, -1):
        try:
            if importlib.util.find_spec(".".join(parts[:length])) is None:
                continue
        except ModuleNotFoundError:
            continue
        if length == len(parts):
            return True
        found: object = importlib.import_module(".".join(parts[:length]))
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def unknown_flags(text: str, root: Path) -> list[str]:
    """Flags in backquotes that no command has."""
    found = [flag for word in code_words(text) for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", word)]
    return [f"flag {flag}" for flag in found if flag not in flags() | FOREIGN_FLAGS]


def bad_commands(text: str, root: Path) -> list[str]:
    """Command lines that name no target, module or command, or that do not parse."""
    faults = []
    targets = re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), re.MULTILINE)
    for line in command_lines(text):
        match shlex.split(line, comments=True):
            case ["make", target] if target in targets:
                continue
            case ["python", "-m", module, *_] if exists(module):
                continue
            case ["eightfold", *words] if known := [name for name in COMMANDS if words[: name.count(" ") + 1] == name.split()]:
                (name,) = known
                try:
                    COMMANDS[name].make_context(name, words[name.count(" ") + 1 :])
                except Exception as error:
                    faults.append(f"command {line}: {error}")
                continue
        faults.append(f"command {line}")
    return faults


def bad_python(text: str, root: Path) -> list[str]:
    """Python blocks that do not parse, import what is not there, or pass unknown keywords."""
    faults = []
    for block in blocks(text, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("eightfold"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                faults += [f"import {name}" for name in names if not exists(name)]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KEYWORDS:
                known = {item.name for item in fields(KEYWORDS[node.func.id])}
                faults += [f"keyword {item.arg} of {node.func.id}" for item in node.keywords if item.arg not in known]
    return faults


CHECKS: tuple[Check, ...] = (missing_files, broken_links, unknown_symbols, unknown_flags, bad_commands, bad_python)


def forbidden_words(root: Path) -> list[str]:
    """Files of the tree that hold a forbidden word."""
    faults = []
    for file in sorted(root.rglob("*")):
        name = file.relative_to(root)
        hidden = any(part.startswith(".") and part != ".ci" for part in name.parts[:-1])
        if (
            hidden
            or name.name == ".git"
            or name.parts[0] in ("build", "dist", "benchmarks")
            or not file.is_file()
            or file.suffix not in TEXT_SUFFIXES
        ):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        faults += [f"{name}: {word}" for word in FORBIDDEN if word in text]
    return faults


def changelog_version(text: str) -> str:
    """The version of the newest entry, which has a date."""
    match = re.search(r"^## (\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)$", text, re.MULTILINE)
    return match.group(1) if match else "none"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.parametrize("check", CHECKS)
def test_the_page_is_true(check: Check, page: Path) -> None:
    assert check(page.read_text(encoding="utf-8"), ROOT) == []


@pytest.mark.parametrize(
    ("check", "text", "fault"),
    [
        (missing_files, "see `eightfold/quant/gone.py`", "file eightfold/quant/gone.py"),
        (missing_files, "see `eightfold/gone/`", "file eightfold/gone/"),
        (missing_files, "see `gone.py`", "file gone.py"),
        (broken_links, "[here](docs/gone.md#part)", "link docs/gone.md"),
        (unknown_symbols, "`eightfold.quant.mxfp8.gone`", "symbol eightfold.quant.mxfp8.gone"),
        (unknown_symbols, "`eightfold.gone`", "symbol eightfold.gone"),
        (unknown_flags, "`--quantisation`", "flag --quantisation"),
        (bad_commands, "```sh\nmake gone\n```", "command make gone"),
        (bad_commands, "`eightfold gone`", "command eightfold gone"),
        (bad_commands, "`eightfold bench gone`", "command eightfold bench gone"),
        (bad_commands, "`eightfold bench serve --gone 1`", "command eightfold bench serve --gone 1: No such option"),
        (bad_commands, "```sh\neightfold generate m --gone 1\n```", "command eightfold generate m --gone 1: No such option"),
        (bad_commands, "```sh\neightfold generate m --top-k many\n```", "command eightfold generate m --top-k many"),
        (bad_commands, "`python -m eightfold.benchmarks.gone`", "command python -m eightfold.benchmarks.gone"),
        (bad_python, "```python\nfrom eightfold import Gone\n```", "import eightfold.Gone"),
        (bad_python, "```python\nLLM('m', quantisation='mxfp8')\n```", "keyword quantisation of LLM"),
    ],
)
def test_a_planted_fault_is_named(check: Check, text: str, fault: str) -> None:
    assert any(found.startswith(fault) for found in check(text, ROOT)), check(text, ROOT)


def too_long(text: str, most_lines: int) -> list[str]:
    """Why a text does not fit on its page."""
    lines = text.splitlines()
    faults = [f"{len(lines)} lines"] if len(lines) > most_lines else []
    return faults + [f"line {number}: {len(line)} columns" for number, line in enumerate(lines, 1) if len(line) > MOST_COLUMNS]


@pytest.mark.parametrize(("page", "most"), MOST_LINES.items())
def test_pages_are_short(page: str, most: int) -> None:
    assert too_long((ROOT / page).read_text(encoding="utf-8"), most) == []
    assert too_long("a\n" * (most + 1), most) == [f"{most + 1} lines"]
    assert too_long("\n" + "a" * 129, most) == ["line 2: 129 columns"]


def test_the_readme_names_the_model_types_of_the_code() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    named = re.search(r"`model_type` ([a-z0-9_, ]+)", text)
    assert named is not None
    assert sorted(named.group(1).strip().split(", ")) == sorted(FAMILIES)


def test_the_page_of_backends_names_those_of_the_code() -> None:
    text = (ROOT / "docs/backends.md").read_text(encoding="utf-8")
    section = text.split("## Dense products")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == {b.name for row in LINEAR.values() for b in row}


def test_the_version_is_that_of_the_changelog() -> None:
    assert changelog_version((ROOT / "CHANGELOG.md").read_text()) == __version__
    assert changelog_version("## 9.9.9") == "none"


def test_no_file_holds_a_forbidden_word(tmp_path: Path) -> None:
    assert forbidden_words(ROOT) == []
    (tmp_path / "a.md").write_text(f"from {FORBIDDEN[0]}")
    assert forbidden_words(tmp_path) == [f"a.md: {FORBIDDEN[0]}"]


def test_the_page_of_models_is_what_the_registry_says() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/models_doc.py", "--check"], check=False)
    assert done.returncode == 0, "docs/models.md is out of date: run scripts/models_doc.py"
    assert {name for name in FAMILIES if f"## {name}\n" not in (ROOT / "docs/models.md").read_text()} == set()
