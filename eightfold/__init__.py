"""Eightfold: LLM inference in MXFP8, quantized as the checkpoint loads.

Importing this package loads nothing heavy; torch and transformers arrive with the first use of a public name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from eightfold._version import __version__

if TYPE_CHECKING:
    from eightfold.config import EngineConfig
    from eightfold.llm import LLM
    from eightfold.types import Grammar, SamplingParams

__all__ = ["LLM", "EngineConfig", "Grammar", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "eightfold.llm",
    "EngineConfig": "eightfold.config",
    "Grammar": "eightfold.types",
    "SamplingParams": "eightfold.types",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'eightfold' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
