"""From text to token ids and back: prompts, chats, and what a token stands for."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.models
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from eightfold.errors import CheckpointError, InputError

# Any of these is the beginning of a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
# What a byte without a sign of its own is shown as, in the vocabularies of byte-level tokenizers (GPT-2's table).
_BYTES_WITH_A_SIGN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES_WITHOUT = tuple(byte for byte in range(256) if byte not in _BYTES_WITH_A_SIGN)
_BYTE_OF: Mapping[str, int] = {chr(byte): byte for byte in _BYTES_WITH_A_SIGN} | {
    chr(0x100 + index): byte for index, byte in enumerate(_BYTES_WITHOUT)
}
_ANY_LENGTH = 1 << 30
_FALLBACK_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Tokenizer:
    """A checkpoint's tokenizer and its chat template.

    Args:
        tokenizer: as transformers loads it.
        source: where it came from, for errors.

    Attributes:
        special_ids: ids of the special tokens.
        longest_token: characters of the longest token, which bounds the text of a number of tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, source: str) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
        # A prompt that is too long is refused with its length, never cut.
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.longest_token = max(map(len, self._backend.get_vocab()), default=1)
        self._is_byte_level = "ByteLevel" in str(self._backend.decoder)

    @classmethod
    def load(cls, path: Path, *, chat_template: str | None = None, required: bool = True) -> Tokenizer:
        """The tokenizer of a checkpoint folder.

        Args:
            path: the folder.
            chat_template: a template in place of its own.
            required: False gives a `NoTokenizer` where there is none.

        Raises:
            CheckpointError: there is none, or it cannot be read.
        """
        remedy = "Copy tokenizer.json and tokenizer_config.json from where the model came from into the folder."
        if not any((path / name).is_file() for name in TOKENIZER_FILES):
            if not required:
                return NoTokenizer(path)
            raise CheckpointError(str(path), got="a folder without a tokenizer", expected="tokenizer.json in it", remedy=remedy)
        try:
            loaded = AutoTokenizer.from_pretrained(
                path, config=_bare_config(path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the readers of the various formats raise whatever they like, bare Exception included
            raise CheckpointError(
                f"tokenizer of {path}", got=str(error).strip() or repr(error), expected="one that can be read", remedy=remedy
            ) from error
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise CheckpointError(
                f"tokenizer of {path}", got=type(loaded).__name__, expected="one with a tokenizer.json", remedy=remedy
            )
        if chat_template is not None:
            loaded.chat_template = chat_template
        return cls(loaded, str(path))

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return self._tokenizer.chat_template is not None

    def template_mentions(self, word: str) -> bool:
        """Whether the chat template holds `word`, so that a value of that name can have an effect."""
        return re.search(rf"\b{re.escape(word)}\b", self.template) is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model wants around it, and never with two BOS.

        Args:
            text: the prompt.
            add_special_tokens: whether to add what the model wants; special tokens that the text spells are ids either way.

        Raises:
            InputError: the text holds half of a surrogate pair, which is no character.
        """
        _refuse_surrogates(text)
        bos = self._tokenizer.bos_token
        begun = bos is not None and text.startswith(str(bos))
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens and not begun).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation, ready for the model's answer. The template writes all special tokens itself.

        Args:
            messages: as for `render_chat`.
            options: those of `render_chat`.

        Raises:
            InputError: as `render_chat`, and as `encode`.
        """
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as the text that the model was trained on, up to where its answer begins.

        Args:
            messages: each with a "role" and a "content".
            tools: functions that the model may call, as OpenAI describes them.
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: leave the last message open, so that the answer goes on from it; in place of the former.
            variables: further names that the template reads, such as `enable_thinking`.

        Raises:
            InputError: the tokenizer has no chat template, or the messages, the tools or the variables do not fit it.
        """
        if not self.has_chat_template:
            raise InputError(
                "chat messages",
                got=f"a tokenizer without a chat template, {self._source}",
                expected="chat_template.jinja in the folder",
                remedy="A prompt of plain text works.",
            )
        if not messages:
            raise InputError("chat messages", got="an empty list", expected="at least one message")
        for index, message in enumerate(messages):
            if not (isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message):
                raise InputError(
                    f"chat message {index}", got=repr(message), expected='a mapping with "role", a text, and "content"'
                )
        if tools and not self.template_mentions("tools"):
            raise InputError("tools", got=f"{len(tools)} of them", expected="none: the model's chat template takes no tools")
        for name in variables or {}:
            self._check_variable(name)
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **(variables or {}),
            )
        except Exception as error:  # a template is code of the checkpoint: whatever it raises is about the messages
            raise InputError("chat messages", got=str(error), expected="what the model's chat template takes") from error
        return str(rendered)

    def _check_variable(self, name: str) -> None:
        """Refuse what a request may not set, and what would have no effect."""
        taken = {
            "messages",
            *self._tokenizer.special_tokens_map,
            *inspect.signature(self._tokenizer.apply_chat_template).parameters,
        }
        if name in taken or not self.template_mentions(name):
            raise InputError(
                f"chat_template_kwargs.{name}",
                got="a name that a request does not set" if name in taken else "a name that the chat template does not read",
                expected="a variable of the model's chat template",
            )

    @property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens with their ids."""
        return {self._added[token_id].decode(): token_id for token_id in self.special_ids}

    def special_ids_in(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of the special tokens that stand in any of the texts."""
        whole = "\0".join(texts).encode()
        return frozenset(token_id for token_id in self.special_ids if self._added[token_id] in whole)

    @property
    def template(self) -> str:
        """The source of the chat template; empty where there is none."""
        template = self._tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, Mapping) else template or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character; none for an id that stands for nothing."""
        name = self._backend.id_to_token(token_id)
        if name is None:
            return b""
        if token_id in self._added:
            return self._added[token_id]
        if self._is_byte_level:
            return bytes(_BYTE_OF[sign] for sign in name) if all(sign in _BYTE_OF for sign in name) else name.encode()
        fallback = _FALLBACK_BYTE.fullmatch(name)
        return bytes([int(fallback[1], 16)]) if fallback else name.replace("\u2581", " ").encode()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, exactly as the tokenizer has it: no spaces are cleaned up."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json, tokens that were added to it included."""
        return self._backend.to_str()

    @property
    def size(self) -> int:
        """Token ids that stand for something lie below it."""
        return max(self._backend.get_vocab().values(), default=-1) + 1

    def knows(self, token_id: int) -> bool:
        """Whether the id stands for anything: a model's vocabulary is often padded beyond its tokenizer's."""
        return self._backend.id_to_token(token_id) is not None


class NoTokenizer(Tokenizer):
    """In the place of a tokenizer, for dummy weights without one: prompts are token ids, and answers have no text.

    Args:
        path: the folder that has none.
    """

    def __init__(self, path: Path) -> None:
        nothing = tokenizers.Tokenizer(tokenizers.models.BPE())
        make: Any = PreTrainedTokenizerFast  # its constructor has no annotations
        super().__init__(make(tokenizer_object=nothing), str(path))
        self.longest_token = _ANY_LENGTH  # no text is refused for its length, but each for what it is

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Refuse a text.

        Raises:
            InputError: always.
        """
        del text, add_special_tokens
        raise self._refusal("prompt", "a text")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Refuse a conversation.

        Raises:
            InputError: always.
        """
        del messages, tools, add_generation_prompt, continue_final_message, variables
        raise self._refusal("chat messages", "a conversation")

    def to_json(self) -> str:
        """Refuse to serve a grammar.

        Raises:
            InputError: always.
        """
        raise self._refusal("grammar", "a grammar")

    def _refusal(self, what: str, got: str) -> InputError:
        return InputError(
            what,
            got=f"{got}, for a model without a tokenizer",
            expected="a prompt of token ids, and no grammar",
            remedy=f"With tokenizer.json and tokenizer_config.json in {self._source} text works too.",
        )


def _bare_config(path: Path) -> PreTrainedConfig:
    """Of config.json what a tokenizer depends on: the type of the model, and a class if it names one.

    The rest is the model's, which refuses by key what it cannot use; transformers would refuse here, and other things.
    """
    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = {}
    model_type, named = values.get("model_type"), values.get("tokenizer_class")
    config = AutoConfig.for_model(model_type) if model_type in CONFIG_MAPPING else PreTrainedConfig()
    if named is not None:
        config.tokenizer_class = named
    return config


def _refuse_surrogates(text: str) -> None:
    """Bytes that are no UTF-8 arrive like this from a command line or a pipe."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            "prompt",
            got=f"{text[error.start]!r}, half of a surrogate pair, at character {error.start}",
            expected="whole characters",
            remedy="Text that comes from a terminal or a file has to be UTF-8.",
        ) from error
