"""What the server itself can do and what it costs a token: `python -m eightfold.benchmarks.ceiling`.

`eightfold serve --engine null` answers with an engine of no cost, and 64 streams of `eightfold bench serve` read it, all on
this machine. Three runs:

1. The engine as fast as it goes: tokens a second in all. The engine runs ahead of the streams, so a frame holds many tokens.
2. A step each 3 ms, 21,333 tokens a second: whether the server keeps up with one frame for each token.
3. A step each 20 ms: what the server adds to a token. The null engine ends a step at a whole multiple of its time on the
   clock that all processes of a Linux machine share, so the rest of a frame's time of arrival is its age: encoding, the way
   between the processes, detokenizing, the frame, HTTP, loopback, and the generator's reading, behind those of the same step
   that are served first. 64 streams that come at once wait for one another: the median token waits for 32 others.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from eightfold.benchmarks.measures import Answer, summarize
from eightfold.benchmarks.report import print_report
from eightfold.benchmarks.serve import Run, Workload, run
from eightfold.benchmarks.text import state_of_the_union
from eightfold.benchmarks.traffic import CONVERSATIONS, Fixed, Mix
from eightfold.errors import InputError

KEEP_UP_MS = 3.0
AGE_MS = 20.0
_READY = re.compile(r"ready on (http://\S+)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and chat template to use")
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument("--requests", type=int, default=5, help="requests of each stream in each run")
    options = parser.parse_args(arguments)
    rows, result = [], {}
    for name, step_ms in (("as fast as it goes", 0.0), ("a step each 3 ms", KEEP_UP_MS), ("a step each 20 ms", AGE_MS)):
        print(f"engine: {name}", file=sys.stderr, flush=True)
        with null_server(options.model, step_ms) as address:
            workload = Workload(address, max_concurrency=options.streams, num_warmups=options.streams)
            # Answers of unlike lengths, so that requests do not all begin at once.
            workload = replace(
                workload, num_prompts=options.streams * options.requests, mix=Mix(Fixed(100), CONVERSATIONS.output)
            )
            done = run(workload, state_of_the_union())
        figures = figures_of(done, step_ms)
        rows.append([name, *(_shown(value) for value in figures.values())])
        result[name] = figures
    header = [
        "engine",
        "tokens/s",
        "tokens/frame",
        "ITL p50 ms",
        "ITL p99 ms",
        "age p50 ms",
        "age p90 ms",
        "age p99 ms",
        "client",
    ]
    print_report(f"ceiling, {options.streams} streams", header, rows, {"runs": result})


@contextmanager
def null_server(model: str, step_ms: float) -> Iterator[str]:
    """The address of a server with an engine of no cost, which ends with the block.

    Raises:
        InputError: it does not start.
    """
    words = ["serve", model, "--engine", "null", "--null-step-ms", f"{step_ms:g}", "--port", "0", "--log-level", "warning"]
    process = subprocess.Popen([sys.executable, "-m", "eightfold", *words], stdout=subprocess.PIPE, text=True)
    try:
        said = []
        for line in process.stdout or ():
            said.append(line)
            if match := _READY.search(line):
                yield match.group(1)
                return
        raise InputError(
            "eightfold serve", got="".join(said) or f"exit code {process.wait()}", expected="a server that is ready"
        )
    finally:
        process.terminate()
        process.communicate()


def figures_of(done: Run, step_ms: float) -> dict[str, float | None]:
    """The columns of one run; ages in milliseconds, None where a token can be older than a step."""
    summary = summarize(done.answers, start=done.start, duration=done.duration, limits={})
    if summary["failed"]:
        raise InputError("the server", got=f"failed requests: {summary['errors']}", expected="none")
    ages = ages_ms(done.answers, step_ms) if step_ms == AGE_MS else None
    percentiles = [math.nan] * 3 if ages is None else [float(value) for value in np.percentile(ages, (50, 90, 99))]
    return {
        "output_throughput": summary["output_throughput"],
        "tokens_per_frame": summary["tokens_per_frame"],
        "median_itl_ms": summary["median_itl_ms"],
        "p99_itl_ms": summary["p99_itl_ms"],
        **{
            f"{name}_age_ms": None if math.isnan(value) else value
            for name, value in zip(("median", "p90", "p99"), percentiles, strict=True)
        },
        "client_share": done.client_share,
    }


def ages_ms(answers: Sequence[Answer], step_ms: float) -> np.ndarray:
    """Milliseconds from the end of a step to the arrival of each of its frames."""
    times = np.asarray([time for answer in answers for time in answer.frame_times])
    return times * 1e3 % step_ms


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


if __name__ == "__main__":
    main()
