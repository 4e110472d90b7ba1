"""`eightfold generate`: prompts from the command line, a file or stdin; answers to stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eightfold.cli.flags import Given, Verbose, takes_flags
from eightfold.cli.loading import load_llm
from eightfold.cli.output import complain, write
from eightfold.cli.serve import require_libraries
from eightfold.errors import InputError
from eightfold.hub.names import identify
from eightfold.types import SamplingParams

if TYPE_CHECKING:
    from eightfold.llm import RequestOutput


@takes_flags()
def generate(
    given: Given,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to go on from.")] = None,
    input_file: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help="One prompt a line; - is stdin. FILE.jsonl is a batch of OpenAI's requests, one a line, answered alike.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a prompt.")] = False,
    verbose: Verbose = False,
) -> None:
    """Answer prompts. One prompt streams to the terminal; several run as one batch."""
    if input_file is not None and input_file.endswith(".jsonl"):
        _batch(given, _lines(input_file), [*(prompts or []), *(["--json"] if as_json else [])], verbose)
        return
    texts = [*(prompts or []), *(_lines(input_file) if input_file is not None else [])]
    if not texts:
        raise InputError("prompt", got="none", expected="a PROMPT, or --input FILE with one a line")
    # A wrong name is refused before anything heavy is imported.
    identify(given.config.model, given.config.revision, needs_weights=given.config.needs_weights)
    llm = load_llm(given, verbose)
    if len(texts) == 1 and given.params.n == 1 and not as_json:
        for event in llm.stream(texts[0], given.params):
            write(event.text, end="")
        write()
        return
    outputs = llm.generate(texts, given.params)
    for number, (text, output) in enumerate(zip(texts, outputs, strict=True)):
        if as_json:
            write(json.dumps(_record(text, output), ensure_ascii=False))
            continue
        for completion in output.completions:
            label = f"{number + 1}" if len(output.completions) == 1 else f"{number + 1}.{completion.index + 1}"
            write(f"[{label}] {text}{completion.text}")


def _batch(given: Given, lines: Sequence[str], others: Sequence[str], verbose: bool) -> None:
    """Answer a file of requests, each with everything in its own line; errors are answers too."""
    if others:
        raise InputError("--input", got=f"a batch, and {' '.join(others)} beside it", expected="the batch alone")
    if given.params != SamplingParams():
        raise InputError("--input", got="a batch, and sampling flags", expected="sampling parameters in the batch's bodies")
    require_libraries()
    identify(given.config.model, given.config.revision, needs_weights=given.config.needs_weights)
    from eightfold.batch import run_batch

    llm = load_llm(given, verbose)
    num_failed = run_batch(llm, lines, write, names=(given.config.model,))
    if num_failed:
        complain(f"{num_failed} of {len(lines)} requests were refused; their lines say why")


def _lines(name: str) -> Sequence[str]:
    """The lines of a file that are not empty."""
    path = Path(name)
    if name != "-" and not path.is_file():
        raise InputError("--input", got=f"{name}, which is no file", expected="a text file with one prompt a line, or -")
    try:
        content = sys.stdin.read() if name == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError("--input", got=f"{name} ({error})", expected="text in UTF-8") from error
    return [line for line in content.split("\n") if line.strip()]


def _record(prompt: str, output: RequestOutput) -> dict[str, object]:
    return {
        "prompt": prompt,
        "completions": [
            {
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "logprobs": None if completion.logprobs is None else [item.logprob for item in completion.logprobs],
            }
            for completion in output.completions
        ],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "time_to_first_token": output.timing.time_to_first_token,
        "tokens_per_second": output.timing.tokens_per_second,
    }
