"""For each module a/b.py there is tests/a/test_b.py, and no such test outlives its module."""

from __future__ import annotations

import ast
from pathlib import Path

import eightfold

PACKAGE = Path(eightfold.__file__).parent
TESTS = Path(__file__).resolve().parents[1]

# Modules without a test of their own name, each with the reason.
WITHOUT_TEST = {
    "__init__.py": "lazy names, which tests/project/test_imports.py and tests/project/test_docs.py import",
    "kernels/tuning/__init__.py": "tests/kernels/test_gemm.py tests its rule and tables with the products that follow them",
    "__main__.py": "two lines that tests/cli run in a process",
    "_version.py": "a constant that tests/project/test_docs.py compares with the changelog",
}


def missing_tests(package: Path, tests: Path) -> list[str]:
    """Modules whose test is not where their name says; a folder's `__init__.py` counts once it holds more than a docstring."""
    missing = []
    for module in sorted(package.rglob("*.py")):
        name = module.relative_to(package)
        is_folder = name.name == "__init__.py"
        if str(name) in WITHOUT_TEST or (is_folder and len(ast.parse(module.read_text(encoding="utf-8")).body) <= 1):
            continue
        expected = tests / (
            f"{name.parent.parent}/test_{name.parent.name}.py" if is_folder else f"{name.parent}/test_{name.name}"
        )
        if not expected.is_file():
            missing.append(f"{name} has no {expected.relative_to(tests.parent)}")
    return missing


def stale_tests(package: Path, tests: Path) -> list[str]:
    """Tests in the package's folders whose module is gone."""
    folders = [folder for folder in tests.rglob("*") if folder.is_dir() and (package / folder.relative_to(tests)).is_dir()]
    found = sorted(file.relative_to(tests) for folder in folders for file in folder.glob("test_*.py"))
    modules = {file: package / file.parent / file.name.removeprefix("test_") for file in found}
    return [f"tests/{file}" for file, module in modules.items() if not module.exists() and not module.with_suffix("").is_dir()]


def test_every_module_has_its_test() -> None:
    assert missing_tests(PACKAGE, TESTS) == []


def test_a_missing_test_is_named(tmp_path: Path) -> None:
    (tmp_path / "eightfold/a").mkdir(parents=True)
    (tmp_path / "eightfold/a/b.py").touch()
    assert missing_tests(tmp_path / "eightfold", tmp_path / "tests") == ["a/b.py has no tests/a/test_b.py"]


def test_a_folder_with_code_needs_a_test_too(tmp_path: Path) -> None:
    (tmp_path / "eightfold/a/b").mkdir(parents=True)
    (tmp_path / "eightfold/a/__init__.py").write_text('"""Text."""')
    (tmp_path / "eightfold/a/b/__init__.py").write_text('"""Text."""\nx = 1')
    assert missing_tests(tmp_path / "eightfold", tmp_path / "tests") == ["a/b/__init__.py has no tests/a/test_b.py"]


def test_no_test_outlives_its_module(tmp_path: Path) -> None:
    assert stale_tests(PACKAGE, TESTS) == []
    for folder in ("eightfold/a", "tests/a", "tests/project"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "test_gone.py").touch()
    assert stale_tests(tmp_path / "eightfold", tmp_path / "tests") == ["tests/a/test_gone.py"]


def test_every_exception_still_exists() -> None:
    assert all((PACKAGE / name).is_file() for name in WITHOUT_TEST)
