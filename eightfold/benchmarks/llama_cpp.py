"""llama.cpp as a peer, where `llama-cpp-python` is installed: the packaged model in Q8_0, its format nearest to MXFP8."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

try:
    import llama_cpp
except ImportError:
    llama_cpp = None

from eightfold.config import cache_dir
from eightfold.errors import InputError
from eightfold.hub.aliases import ALIASES
from eightfold.hub.packaged import packaged_file

# LLAMA_FTYPE_MOSTLY_Q8_0 of llama.h.
_Q8_0 = 7


def is_installed() -> bool:
    """Whether the peer can run here."""
    return llama_cpp is not None


def q8_0_file(alias: str) -> Path:
    """The packaged model of an alias, requantized to Q8_0 by llama.cpp itself and kept in the user's cache.

    Raises:
        InputError: no such alias, or llama.cpp fails.
    """
    if alias not in ALIASES:
        raise InputError("model", got=alias, expected=f"an alias, which has a GGUF file: {', '.join(ALIASES)}")
    kept = cache_dir() / f"{alias}-{ALIASES[alias].version}-q8_0.gguf"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(".partial")
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype, parameters.allow_requantize = _Q8_0, True
        with packaged_file(ALIASES[alias]) as file:
            status = llama_cpp.llama_model_quantize(os.fsencode(file), os.fsencode(partial), ctypes.byref(parameters))
        if status != 0:
            raise InputError("llama.cpp", got=f"status {status} from quantizing", expected="0")
        partial.replace(kept)
    return kept


class LlamaCpp:
    """Greedy generation by llama.cpp."""

    def __init__(self, file: Path, num_threads: int) -> None:
        self.model: Any = llama_cpp.Llama(
            str(file), n_ctx=2048, n_batch=512, n_threads=num_threads, n_threads_batch=num_threads, verbose=False
        )

    def generate(self, text: str, max_tokens: int) -> tuple[int, int, str]:
        """Tokens of the prompt, tokens generated, and the text; nothing is kept from the call before."""
        self.model.reset()
        prompt = self.model.tokenize(text.encode(), add_bos=False, special=False)
        tokens: list[int] = []
        for token in self.model.generate(prompt, temp=0.0, reset=True):
            tokens.append(token)
            if len(tokens) == max_tokens:
                break
        return len(prompt), len(tokens), self.model.detokenize(tokens).decode(errors="replace")
