"""`eightfold bench`, and `eightfold bench serve`: measurements of a server that runs."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from eightfold._version import __version__
from eightfold.cli.output import complain, write
from eightfold.errors import InputError

INTERRUPTED = 130


def overview(context: typer.Context) -> None:
    """Measure an engine by itself, or a server that runs."""
    if context.invoked_subcommand is None:
        write(context.get_help())


def serve(
    base_url: Annotated[
        str, typer.Option(help="Address of the API, with or without /v1. [default: of --host and --port]", show_default=False)
    ] = "",
    host: Annotated[str, typer.Option(help="The server's host, where no --base-url says.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The server's port, where no --base-url says.")] = 30000,
    model: Annotated[str, typer.Option(help="The model's name there. [default: the first that it lists]")] = "",
    api_key: Annotated[str, typer.Option(help="Sent as Authorization: Bearer.")] = "",
    backend: Annotated[str, typer.Option(help="openai-chat or openai-completions.")] = "openai-chat",
    num_prompts: Annotated[int, typer.Option(help="Requests that are measured.")] = 200,
    request_rate: Annotated[float, typer.Option(help="Requests a second, as a Poisson process.")] = math.inf,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests at once; without --request-rate a closed loop.", show_default=False)
    ] = None,
    input_len: Annotated[
        int | None, typer.Option(help="Tokens of every prompt, about. [default: as in conversations]", show_default=False)
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(help="Tokens of every answer. [default: as in conversations]", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, passages and arrivals.")] = 0,
    num_warmups: Annotated[int, typer.Option(help="Requests before, which are not measured.")] = 1,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for all tokens of the workload's lengths.")] = True,
    temperature: Annotated[float, typer.Option(help="Of sampling.")] = 0.0,
    extra_body: Annotated[str, typer.Option(help="A JSON object of further fields of every request.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 600.0,
    goodput: Annotated[
        list[str] | None, typer.Option(metavar="METRIC:MS", help="Limits of a good request, such as ttft:500 itl:50.")
    ] = None,
    limits: Annotated[list[str] | None, typer.Argument(metavar="[METRIC:MS]...", help="More limits after --goodput.")] = None,
    text: Annotated[Path | None, typer.Option(help="A text file for the prompts. [default: State of the Union]")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the run into this PNG file.")] = None,
    save_result: Annotated[Path | None, typer.Option(help="Write the figures and each request's into this file.")] = None,
) -> None:
    """Put load on a server of OpenAI's API, and measure latencies and throughput.

    Prompts are passages of real text. Without --input-len and --output-len the lengths are a mix as in conversations.
    The last line is JSON, with the names of vLLM's benchmark. Ctrl-C ends the run early and prints what was measured.
    """
    from eightfold.benchmarks import plot as drawing
    from eightfold.benchmarks import serve as load
    from eightfold.benchmarks.measures import details, parse_goodput, render

    if limits and not goodput:
        raise InputError(limits[0], got="a word without a flag", expected="flags alone, or limits after --goodput")
    base_url = _address(base_url, host, port)
    workload = load.Workload(
        base_url=base_url,
        model=model,
        api_key=api_key,
        backend=backend,  # type: ignore[arg-type]
        num_prompts=num_prompts,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        mix=load.lengths(input_len, output_len),
        seed=seed,
        num_warmups=num_warmups,
        ignore_eos=ignore_eos,
        temperature=temperature,
        extra_body=_object(extra_body),
        timeout=timeout,
        goodput=parse_goodput([*(goodput or ()), *(limits or ())]),
    )
    if plot is not None:
        drawing.require_matplotlib()
    run = load.run(workload, _text(text), progress=_progress(num_prompts))
    result = {"benchmark": "serve", "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "eightfold": __version__}
    result |= load.result(workload, run)
    title = f"{backend} at {base_url}, model {run.model}"
    write(f"{title}\n\n{render(result, run.answers)}\n")
    if run.interrupted:
        complain(f"Interrupted: {run.unfinished} requests were under way and are not counted.")
    if run.client_share > load.BUSY_SHARE:
        share = f"{run.client_share:.0%} of a core"
        complain(f"The load generator itself used {share}; it may be what was measured. Run several, or less load.")
    if save_result is not None:
        _save(save_result, result | details(run.answers, run.start))
    if plot is not None:
        drawing.plot(plot, title, run.answers, start=run.start, duration=run.duration)
    write(json.dumps(result))
    if run.interrupted:
        raise typer.Exit(INTERRUPTED)


def _address(base_url: str, host: str, port: int) -> str:
    """Where the server is, from the three flags that may say it."""
    default_host, default_port = "127.0.0.1", 30000
    if base_url and (host, port) != (default_host, default_port):
        raise InputError("--base-url", got=f"{base_url}, and --host or --port beside it", expected="one of the two")
    return base_url or f"http://[{host}]:{port}" if ":" in host else base_url or f"http://{host}:{port}"


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError("--extra-body", got=text, expected='a JSON object, such as {"top_k": 20}')
    return value


def _text(file: Path | None) -> str:
    if file is None:
        from eightfold.benchmarks.text import state_of_the_union

        return state_of_the_union()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("--text", got=str(error), expected="a text file in UTF-8") from error


def _save(file: Path, record: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(record), encoding="utf-8")
    except OSError as error:
        raise InputError("--save-result", got=str(error), expected="a file that can be written") from error


def _progress(total: int) -> Any:
    """A callback that counts on stderr, at most five times a second; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        return None
    last = 0.0

    def report(done: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > 0.2 or done == total:
            last = now
            sys.stderr.write(f"\r{done} of {total} requests" + ("\n" if done == total else ""))
            sys.stderr.flush()

    return report
