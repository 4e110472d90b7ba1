"""`eightfold generate`: prompts from the command line, a file or stdin; answers to stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eightfold.cli.flags import Given, Verbose, takes_flags
from eightfold.cli.output import complain, progress_bars, write
from eightfold.errors import InputError
from eightfold.hub.names import identify

if TYPE_CHECKING:
    from eightfold.llm import RequestOutput


@takes_flags()
def generate(
    given: Given,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to go on from.")] = None,
    input_file: Annotated[
        str | None, typer.Option("--input", metavar="FILE", help="One prompt a line; - is stdin.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a prompt.")] = False,
    verbose: Verbose = False,
) -> None:
    """Answer prompts. One prompt streams to the terminal; several run as one batch."""
    texts = [*(prompts or []), *(_lines(input_file) if input_file is not None else [])]
    if not texts:
        raise InputError("prompt", got="none", expected="a PROMPT, or --input FILE with one a line")
    identify(given.config.model, given.config.revision)  # a wrong name is refused before anything heavy is imported
    from eightfold.llm import LLM

    with progress_bars() as report:
        llm = LLM(**given.options, report=report)
    if verbose:
        complain(llm.config.table())
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


def _lines(name: str) -> Sequence[str]:
    """The lines of a file that are not empty."""
    path = Path(name)
    if name != "-" and not path.is_file():
        raise InputError("--input", got=f"{name}, which is no file", expected="a text file with one prompt a line, or -")
    try:
        content = sys.stdin.read() if name == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError("--input", got=f"{name} ({error})", expected="text in UTF-8") from error
    return [line for line in content.splitlines() if line.strip()]


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
