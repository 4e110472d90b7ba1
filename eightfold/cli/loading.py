"""Loading a model for a command, with what a user should see of it on stderr."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from eightfold.cli.flags import Given
from eightfold.cli.output import complain, progress_bars

if TYPE_CHECKING:
    from pathlib import Path

    from eightfold.config import EngineConfig
    from eightfold.llm import LLM


def load_llm(given: Given, verbose: bool) -> LLM:
    """The model that the flags ask for. Tells of tensors that were passed over or cut, and if `verbose` of every decision.

    Raises:
        InputError: as `LLM` does.
    """
    from eightfold.llm import LLM

    with progress_bars() as report:
        llm = LLM(**given.options, report=report)
    if verbose:
        complain(llm.config.table())
    for note in llm.engine.loaded.report.notes:
        complain(note)
    return llm


def config_to_measure(given: Given, path: Path) -> EngineConfig:
    """The configuration of a command that measures quantization: MXFP8, and a checkpoint that is quantized already as it is.

    Args:
        given: flags of a command whose own default is MXFP8.
        path: folder of the checkpoint.

    Raises:
        CheckpointError: a configuration that is not supported.
    """
    from eightfold.models.checkpoint import serialized_form

    if given.named & {"quantization", "requantize"} or serialized_form(path) is None:
        return given.config
    return replace(given.config, quantization=None)
