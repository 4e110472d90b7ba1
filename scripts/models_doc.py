"""Write docs/models.md from the registry of model types. `--check` only says whether the file is what it would be."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from eightfold.models.families import CHANGES_RESULTS
from eightfold.models.registry import FAMILIES, Family

TARGET = Path(__file__).resolve().parents[1] / "docs/models.md"

INTRODUCTION = """\
# Models

`python scripts/models_doc.py` writes this page from `eightfold/models/registry.py`; a test compares the two.

A checkpoint is a folder of safetensors with a `config.json`: in bf16, fp16 or fp32, or quantized already in one of the forms of
[checkpoints.md](checkpoints.md). Its `model_type` decides how it is read.
Defaults of keys that are left out are those of transformers' configuration class. What would change the numbers and is not
computed here is refused at load by the name of its key, before a weight is read; so is a tensor that is missing, of another
shape than the configuration says, or not expected at all. Where two keys say the same thing in different spellings, they must
agree.

Experts whose up projections have more rows than their down projections have columns come from an exporter that pads; they are
cut to the columns, with one line that says so. Fewer rows are an error.
"""


def render() -> str:
    """The page."""
    return "\n".join([INTRODUCTION, _table(), *(_section(name, family) for name, family in FAMILIES.items()), _refused()])


def _table() -> str:
    rows = [f"| `{name}` | {family.models} |" for name, family in FAMILIES.items()]
    return "\n".join(["| `model_type` | models |", "|---|---|", *rows, ""])


def _section(name: str, family: Family) -> str:
    lines = [f"- Layers: {family.layers}."]
    lines += [f"- Accepted: {spelling}." for spelling in family.spellings]
    lines += [f"- Tensor names: `{pattern}` is read as `{name}`." for pattern, name in family.renames.items()]
    lines += [f"- Not used: `{pattern}`, {reason}." for pattern, reason in family.unused.items()]
    lines += [f"- Refused: {item}." for item in family.refuses]
    if family.reads:
        lines.append(f"- Has a meaning for: {_listed(sorted(family.reads))}.")
    return "\n".join([f"## {name}", "", *(_wrapped(line, indent="  ") for line in lines), ""])


def _refused() -> str:
    return "\n".join(
        [
            "## Refused everywhere else",
            "",
            "Unless a section above gives it a meaning, a key of these that is there with a value that matters is refused:",
            _wrapped(f"{_listed(CHANGES_RESULTS)}."),
            "Also quantization that is not in `docs/checkpoints.md`, architectures that do not end in `ForCausalLM`, and",
            "rotations of other types than default, linear, dynamic, llama3 and yarn.",
            "",
        ]
    )


def _wrapped(text: str, *, indent: str = "") -> str:
    return textwrap.fill(text, 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is out of date")
    page = render()
    if parser.parse_args().check:
        return 0 if TARGET.read_text(encoding="utf-8") == page else 1
    TARGET.write_text(page, encoding="utf-8")
    print(f"wrote {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
