"""Loading a model for a command, with what a user should see of it on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eightfold.cli.flags import Given
from eightfold.cli.output import complain, progress_bars

if TYPE_CHECKING:
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
