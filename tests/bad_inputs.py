"""One table of bad inputs. The tests of the API and of the command line run through all of it, each on its side."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eightfold.llm import LLM
from eightfold.types import SamplingParams

MODEL = "MODEL"
"""Stands for the folder of a whole checkpoint, in arguments and in options."""
CONTEXT_LENGTH = 32
LONG_PROMPT = "a" * 50


@dataclass(frozen=True, slots=True)
class BadInput:
    """One value that cannot be used.

    Attributes:
        name: for test ids.
        words: what the message must hold: the thing, the value, what would work.
        options: keywords of `LLM`, beside its model; where they are bad, loading fails.
        use: what a loaded LLM is asked to do; None where loading fails already.
        arguments: the command line, or None where the command line cannot say such a thing.
        damage: what to do to a copy of the checkpoint first.
    """

    name: str
    words: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    use: Callable[[Any], object] | None = None
    arguments: tuple[str, ...] | None = None
    damage: Callable[[Path], object] | None = None

    @property
    def in_api(self) -> bool:
        """Whether the API can be given this."""
        return bool(self.use or self.options or (self.damage and self.arguments))


def damaged(checkpoint: Path, bad: BadInput, scratch: Path) -> Path:
    """The checkpoint, or a damaged copy of it where the input wants one."""
    if bad.damage is None:
        return checkpoint
    folder = Path(shutil.copytree(checkpoint, scratch / "damaged"))
    bad.damage(folder)
    return folder


def _params(**values: Any) -> Callable[[LLM], object]:
    return lambda llm: llm.generate("a", SamplingParams(**values))


def _prompt(prompt: Any, params: Any = None) -> Callable[[LLM], object]:
    return lambda llm: llm.generate(prompt, params)


def _generate(*flags: str) -> tuple[str, ...]:
    return ("generate", MODEL, "a", *flags)


def _remove(pattern: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        for file in folder.glob(pattern):
            file.unlink()

    return damage


BAD_INPUTS: tuple[BadInput, ...] = (
    # Prompts.
    BadInput(
        "prompt-too-long",
        ("prompt", "51", str(CONTEXT_LENGTH)),
        use=_prompt(LONG_PROMPT),
        arguments=("generate", MODEL, LONG_PROMPT, "--context-length", str(CONTEXT_LENGTH)),
    ),
    BadInput("prompt-empty", ("prompt", "empty", "at least one"), use=_prompt(""), arguments=("generate", MODEL, "")),
    BadInput("prompt-no-tokens", ("prompt", "no tokens", "at least one"), use=_prompt([[]])),
    BadInput("prompts-none", ("prompts", "empty list", "at least one"), use=_prompt([])),
    BadInput("prompt-missing", ("prompt", "none", "--input"), arguments=("generate", MODEL)),
    BadInput("token-id-too-large", ("prompt token id", "999999", "from 0 to"), use=_prompt([5, 999999])),
    BadInput("token-id-negative", ("prompt token id", "-1", "from 0 to"), use=_prompt([5, -1])),
    BadInput("token-id-no-number", ("prompt", "'5'", "whole numbers"), use=_prompt([[5, "5"]])),
    BadInput("prompt-wrong-type", ("prompt", "3.5", "a text"), use=_prompt(3.5)),
    BadInput("prompt-one-of-many", ("prompt", "empty", "at least one"), use=_prompt(["good", ""])),
    BadInput(
        "prompt-no-unicode",
        ("prompt", r"'\udcff'", "character 1", "UTF-8"),
        use=_prompt("a\udcff"),
        arguments=("generate", MODEL, "a\udcff"),
    ),
    BadInput("chat-no-role", ("chat message 0", "hi", '"role"'), use=_prompt([{"content": "hi"}])),
    BadInput("chat-bad-role", ("chat messages", "no such role: wizard"), use=_prompt([{"role": "wizard", "content": "hi"}])),
    BadInput(
        "input-file-missing",
        ("--input", "no-such-file.txt", "one prompt a line"),
        arguments=("generate", MODEL, "--input", "no-such-file.txt"),
    ),
    # Sampling.
    BadInput(
        "max-tokens-zero",
        ("max_tokens", "0", "at least 1"),
        use=_params(max_tokens=0),
        arguments=_generate("--max-tokens", "0"),
    ),
    BadInput(
        "max-tokens-negative",
        ("max_tokens", "-5", "at least 1"),
        use=_params(max_tokens=-5),
        arguments=_generate("--max-tokens=-5"),
    ),
    BadInput("top-p-above-1", ("top_p", "1.5", "at most 1"), use=_params(top_p=1.5), arguments=_generate("--top-p", "1.5")),
    BadInput("top-p-zero", ("top_p", "0", "above 0"), use=_params(top_p=0.0), arguments=_generate("--top-p", "0")),
    BadInput(
        "temperature-nan",
        ("temperature", "nan", "finite"),
        use=_params(temperature=math.nan),
        arguments=_generate("--temperature", "nan"),
    ),
    BadInput(
        "temperature-negative",
        ("temperature", "-1", "at least 0"),
        use=_params(temperature=-1),
        arguments=_generate("--temperature=-1"),
    ),
    BadInput("temperature-text", ("temperature", "'hot'", "number"), use=_params(temperature="hot")),
    BadInput("temperature-word", ("--temperature", "got hot", "a number"), arguments=_generate("--temperature", "hot")),
    BadInput("max-tokens-word", ("--max-tokens", "got many", "a whole number"), arguments=_generate("--max-tokens", "many")),
    BadInput("n-zero", ("n:", "0", "from 1 to 128"), use=_params(n=0), arguments=_generate("--n", "0")),
    BadInput("stop-empty", ("stop", "not empty"), use=_params(stop=[""]), arguments=_generate("--stop", "")),
    BadInput("stop-no-text", ("stop", "5", "a list"), use=_params(stop=5)),
    BadInput(
        "stop-token-out-of-range",
        ("stop_token_ids", "999999", "from 0 to"),
        use=_params(stop_token_ids=[999999]),
        arguments=_generate("--stop-token-ids", "999999"),
    ),
    BadInput(
        "logit-bias-out-of-range",
        ("logit_bias", "500", "[-100, 100]"),
        use=_params(logit_bias={5: 500}),
        arguments=_generate("--logit-bias", "5=500"),
    ),
    BadInput("logit-bias-no-pair", ("--logit-bias", "five", "42=-100"), arguments=_generate("--logit-bias", "five")),
    BadInput("logit-bias-list", ("logit_bias", "mapping"), use=_params(logit_bias=[5])),
    BadInput("params-wrong-type", ("params", "SamplingParams"), use=_prompt("a", {"max_tokens": 5})),
    BadInput("params-wrong-count", ("params", "1 of them for 2", "each prompt"), use=_prompt(["a", "b"], [SamplingParams()])),
    # The model.
    BadInput(
        "path-missing",
        ("model", "/no/such/folder", "a folder"),
        options={"model": "/no/such/folder"},
        arguments=("generate", "/no/such/folder", "a"),
    ),
    BadInput("alias-misspelt", ("smolm2", "smollm2"), options={"model": "smolm2"}, arguments=("generate", "smolm2", "a")),
    BadInput("model-wrong-type", ("model", "3", "text"), options={"model": 3}),
    BadInput("model-not-given", ("MODEL", "nothing", "a folder"), arguments=("generate",)),
    BadInput("no-weights", ("no *.safetensors",), arguments=_generate(), damage=_remove("*.safetensors")),
    BadInput(
        "no-tokenizer", ("without a tokenizer", "tokenizer.json"), arguments=_generate(), damage=_remove("tokenizer*.json")
    ),
    BadInput("no-config", ("config.json", "no such file"), arguments=_generate(), damage=_remove("config.json")),
    BadInput(
        "no-chat-template",
        ("without a chat template", "plain text"),
        use=_prompt([{"role": "user", "content": "hi"}]),
        arguments=("chat", MODEL),
        damage=_remove("chat_template.jinja"),
    ),
    # Options.
    BadInput(
        "option-unknown",
        ("quantisation", "quantization"),
        options={"quantisation": "mxfp8"},
        arguments=_generate("--quantisation", "mxfp8"),
    ),
    BadInput(
        "quantization-unknown",
        ("quantization", "fp4", "mxfp8"),
        options={"quantization": "fp4"},
        arguments=_generate("--quantization", "fp4"),
    ),
    BadInput(
        "backend-unknown",
        ("warp", "no backend", "auto"),
        options={"quantization": "mxfp8", "fp8_gemm_backend": "warp"},
        arguments=_generate("--quantization", "mxfp8", "--fp8-gemm-backend", "warp"),
    ),
    BadInput(
        "backend-not-built",
        ("deep_gemm", "does not have"),
        options={"quantization": "mxfp8", "fp8_gemm_backend": "deep_gemm"},
        arguments=_generate("--quantization", "mxfp8", "--fp8-gemm-backend", "deep_gemm"),
    ),
    BadInput(
        "device-unknown",
        ("device", "tpu", "cpu"),
        options={"device": "tpu"},
        arguments=_generate("--device", "tpu"),
    ),
    BadInput(
        "context-too-long",
        ("context_length", "100000", "at most"),
        options={"context_length": 100000},
        arguments=_generate("--context-length", "100000"),
    ),
    BadInput(
        "ignored-layer-unknown",
        ("quantization_ignored_layers", "no_such_layer"),
        options={"quantization": "mxfp8", "quantization_ignored_layers": ["no_such_layer"]},
        arguments=_generate("--quantization", "mxfp8", "--quantization-ignored-layers", "no_such_layer"),
    ),
    BadInput("option-wrong-type", ("quantize_lm_head", "'yes'", "true or false"), options={"quantize_lm_head": "yes"}),
    BadInput(
        "layers-one-text",
        ("quantization_ignored_layers", "'lm_head'", "list"),
        options={"quantization_ignored_layers": "lm_head"},
    ),
    # The command line alone.
    BadInput("flag-unknown", ("--tempratur", "--temperature"), arguments=_generate("--tempratur", "0")),
    BadInput("flag-of-sglang", ("--tp-size", "One device"), arguments=_generate("--tp-size", "2")),
    BadInput("command-unknown", ("genrate", "Did you mean generate?"), arguments=("genrate", MODEL)),
    BadInput("command-like-none", ("command frobnicate", "generate, chat, inspect"), arguments=("frobnicate", MODEL)),
    BadInput("model-twice", ("MODEL", "one of the two"), arguments=("inspect", MODEL, "--model-path", MODEL)),
)
