"""A process of an engine that goes wrong as the revision of its model says, and in its first step at the latest."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from eightfold.server.engine_process import run
from eightfold.server.null_engine import NullEngine
from eightfold.server.null_engine import load as load_null
from eightfold.server.wire import Load, ServedModel
from eightfold.types import Progress, TokenEvent


def main(arguments: Sequence[str]) -> None:
    """Run the process."""
    run(arguments, load)


class BreaksInAStep(NullEngine):
    def step(self) -> list[TokenEvent]:
        raise RuntimeError("a kernel failed")


def load(message: Load, report: Progress) -> tuple[NullEngine, Callable[[], ServedModel]]:
    match message.options.pop("revision", None):
        case "breaks while it loads":
            raise RuntimeError("no memory")
        case "exits":
            sys.exit(3)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            time.sleep(600)
        case "reports":
            for done in range(5):
                report("load", done + 1, 5)
    engine, describe = load_null(message, report)
    engine.__class__ = BreaksInAStep
    return engine, describe
