"""For each module a/b.py there is tests/a/test_b.py."""

from __future__ import annotations

from pathlib import Path

import eightfold

PACKAGE = Path(eightfold.__file__).parent
TESTS = Path(__file__).resolve().parents[1]

# Modules without a test of their own name, each with the reason.
WITHOUT_TEST = {
    "__main__.py": "two lines that tests/cli run in a process",
    "_version.py": "a constant that tests/project/test_docs.py compares with the changelog",
}


def missing_tests(package: Path, tests: Path) -> list[str]:
    """Modules whose test is not where their name says."""
    missing = []
    for module in sorted(package.rglob("*.py")):
        name = module.relative_to(package)
        if name.name == "__init__.py" or str(name) in WITHOUT_TEST:
            continue
        expected = tests / name.parent / f"test_{name.name}"
        if not expected.is_file():
            missing.append(f"{name} has no {expected.relative_to(tests.parent)}")
    return missing


def test_every_module_has_its_test() -> None:
    assert missing_tests(PACKAGE, TESTS) == []


def test_a_missing_test_is_named(tmp_path: Path) -> None:
    (tmp_path / "eightfold/a").mkdir(parents=True)
    (tmp_path / "eightfold/a/b.py").touch()
    assert missing_tests(tmp_path / "eightfold", tmp_path / "tests") == ["a/b.py has no tests/a/test_b.py"]


def test_every_exception_still_exists() -> None:
    assert all((PACKAGE / name).is_file() for name in WITHOUT_TEST)
