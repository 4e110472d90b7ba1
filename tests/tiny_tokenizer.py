"""Tokenizers small enough for tests: bytes, a few merges, and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast

from eightfold.text import Tokenizer
from tests.models.checkpoints import SIZES, Case, save_checkpoint

BOS, EOS, USER, ASSISTANT = "<s>", "</s>", "<|user|>", "<|assistant|>"
BOS_ID, EOS_ID = 1, 2
SPECIAL = ("<pad>", BOS, EOS, USER, ASSISTANT)
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("â", "Ĥ")]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role: ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level(*, add_bos: bool = True) -> tokenizers.Tokenizer:
    """Byte-level BPE: every byte is a token, and some tokens hold parts of characters."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """What SentencePiece models become: words with a mark for their space, and single bytes for the rest."""
    words = ["<unk>", BOS, EOS, "▁", "▁a", "a", "b", "▁the"]
    names = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: index for index, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in (BOS, EOS)])
    return backend


def in_transformers(backend: tokenizers.Tokenizer, *, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, chat_template=chat_template
    )


def make(backend: tokenizers.Tokenizer | None = None, *, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    return Tokenizer(in_transformers(backend or byte_level(), chat_template=chat_template), "a test")


def save(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write the byte-level tokenizer into a checkpoint folder."""
    in_transformers(byte_level(), chat_template=chat_template).save_pretrained(folder)
    return folder


def save_text_checkpoint(folder: Path) -> Path:
    """A tiny Llama with the byte-level tokenizer and a chat template."""
    sizes: dict[str, Any] = SIZES | {"vocab_size": 300}
    save_checkpoint(Case("text", lambda: LlamaConfig(**sizes)), folder)
    return save(folder)
