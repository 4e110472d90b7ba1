"""The command line. Heavy imports wait until a command needs them, so that `--help` is fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from eightfold._version import __version__
from eightfold.cli import bench, bench_offline, chat, demo, diff, doctor, evaluate, generate, inspect, quantize, serve
from eightfold.cli.output import admit_any_text, complain, write
from eightfold.cli.sglang import REFUSED_FLAGS
from eightfold.config import refuse_unknown
from eightfold.errors import InputError

BAD_INPUT, INTERRUPTED = 2, 130
"""Exit codes: what is usual for usage errors, and what a shell says of SIGINT. A broken pipe ends quietly with 1."""


class Commands(TyperGroup):
    """Commands, of which an unknown one is refused with the known ones and the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names."""
        refuse_unknown("command", args[:1], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="eightfold",
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    generate.generate,
    chat.chat,
    inspect.inspect,
    doctor.doctor,
    demo.demo,
    serve.serve,
    quantize.quantize,
    diff.diff,
)
for command in COMMANDS:
    app.command()(command)
app.command(name="eval")(evaluate.evaluate)
benchmarks = typer.Typer(
    name="bench", cls=Commands, callback=bench.overview, invoke_without_command=True, rich_markup_mode=None
)
benchmarks.command()(bench.serve)
benchmarks.command()(bench_offline.latency)
benchmarks.command()(bench_offline.throughput)
app.add_typer(benchmarks)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """LLM inference in MXFP8, quantized as the checkpoint loads."""
    if version:
        write(f"eightfold {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        write(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: the words after the program's name; None takes this process's.

    Returns:
        The exit code.
    """
    admit_any_text()
    try:
        code = app(args=arguments, prog_name="eightfold", standalone_mode=False)
    except InputError as error:
        return _refuse(str(error))
    except typer.TyperException as error:
        option = str(getattr(error, "option_name", ""))
        return _refuse(f"{option}: {REFUSED_FLAGS[option]}" if option in REFUSED_FLAGS else error.format_message())
    except KeyboardInterrupt:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _refuse(message: str) -> int:
    complain(f"eightfold: {message}")
    return BAD_INPUT
