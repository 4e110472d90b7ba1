"""Tokens a second of a whole model on this CPU: ours beside transformers and, where it is installed, llama.cpp.

    python -m eightfold.benchmarks.generation

Every engine gets the same prompt, the same number of threads and greedy sampling. Prefill is the time to the first token of a
long prompt, decode the pace of the tokens after a short one; tokenizing, sampling and each engine's own overhead are counted.
llama.cpp runs the same model in Q8_0, its nearest format: 34/32 bytes a weight, where MXFP8 has 33/32.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from eightfold.benchmarks.llama_cpp import LlamaCpp, is_installed, q8_0_file
from eightfold.benchmarks.report import print_report
from eightfold.hub.aliases import ALIASES
from eightfold.hub.resolve import resolve_model
from eightfold.llm import LLM
from eightfold.types import Quantization, SamplingParams

PROMPT = (
    "The history of the city begins with a small harbour at the mouth of the river, where ships from the north came to trade. "
)
EXPECTED = "Paris"


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second."""

    prefill: float
    decode: float


class Ours:
    """This engine, through `LLM`."""

    def __init__(self, path: Path, quantization: Quantization | None) -> None:
        self.llm = LLM(str(path), quantization=quantization, disable_prefix_cache=True, context_length=2048)

    def generate(self, text: str, max_tokens: int) -> tuple[int, int, str]:
        """Tokens of the prompt, tokens generated, and the text."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        (output,) = self.llm.generate([text], params)
        return len(output.prompt_token_ids), len(output.token_ids), output.text


class Transformers:
    """`generate()` of transformers with its default attention."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)

    @torch.inference_mode()
    def generate(self, text: str, max_tokens: int) -> tuple[int, int, str]:
        """As `Ours.generate`."""
        inputs = self.tokenizer(text, return_tensors="pt")
        output = self.model.generate(
            **inputs, max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )[0]
        num_prompt = inputs["input_ids"].shape[1]
        return num_prompt, len(output) - num_prompt, str(self.tokenizer.decode(output[num_prompt:]))


def measure(generate: Callable[[str, int], tuple[int, int, str]], *, prefill: int, decode: int, repeats: int) -> Speed:
    """The best of `repeats` runs.

    Args:
        generate: text and a number of tokens to (tokens of the prompt, tokens generated, text).
        prefill: tokens of the long prompt, about.
        decode: tokens to generate after the short one.
        repeats: runs of each; other work on the machine only ever slows a run.
    """
    _, _, answer = generate("The capital of France is", 8)
    if EXPECTED not in answer:
        raise RuntimeError(f"this engine answers {answer!r}, so that its speed means nothing")
    words = PROMPT * (prefill // 24 + 1)
    long_prompt = words[: len(PROMPT) * prefill // 24]
    short_prompt = words[: len(PROMPT) * 64 // 24]
    best_prefill, best_decode = 0.0, 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        num_prompt, _, _ = generate(long_prompt, 1)
        best_prefill = max(best_prefill, num_prompt / (time.perf_counter() - start))
        start = time.perf_counter()
        generate(short_prompt, 1)
        first = time.perf_counter() - start
        start = time.perf_counter()
        _, num_output, _ = generate(short_prompt, decode)
        best_decode = max(best_decode, (num_output - 1) / (time.perf_counter() - start - first))
    return Speed(best_prefill, best_decode)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id or an alias")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the long prompt, about")
    parser.add_argument("--decode", type=int, default=128, help="tokens to generate after a prompt of 64")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the best counts")
    arguments = parser.parse_args()
    path = resolve_model(arguments.model)
    engines: dict[str, Callable[[], Ours | Transformers | LlamaCpp]] = {
        "eightfold mxfp8": lambda: Ours(path, "mxfp8"),
        "eightfold bf16": lambda: Ours(path, None),
        "transformers bf16": lambda: Transformers(path, torch.bfloat16),
        "transformers fp32": lambda: Transformers(path, torch.float32),
    }
    if is_installed() and arguments.model in ALIASES:
        engines["llama.cpp Q8_0"] = lambda: LlamaCpp(q8_0_file(arguments.model), torch.get_num_threads())
    speeds: dict[str, Speed] = {}
    for name, make in engines.items():
        engine = make()
        speeds[name] = measure(engine.generate, prefill=arguments.prefill, decode=arguments.decode, repeats=arguments.repeats)
        del engine
        gc.collect()
    baseline = speeds.get("llama.cpp Q8_0", speeds["transformers bf16"])
    rows = [
        [
            name,
            f"{speed.prefill:.0f}",
            f"{speed.decode:.1f}",
            f"{speed.prefill / baseline.prefill:.2f}",
            f"{speed.decode / baseline.decode:.2f}",
        ]
        for name, speed in speeds.items()
    ]
    against = "llama.cpp Q8_0" if "llama.cpp Q8_0" in speeds else "transformers bf16"
    header = ["engine and weights", "prefill tok/s", "decode tok/s", f"prefill / {against}", f"decode / {against}"]
    result = {name: {"prefill": speed.prefill, "decode": speed.decode} for name, speed in speeds.items()}
    print_report(f"generation {arguments.model}", header, rows, {"tokens_per_second": result})


if __name__ == "__main__":
    main()
