"""From text to token ids and back: BOS, chat templates, and what a token stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eightfold.errors import CheckpointError, InputError
from eightfold.text import Tokenizer
from tests import tiny_tokenizer
from tests.tiny_tokenizer import ASSISTANT, BOS, BOS_ID, EOS

BYTES = tiny_tokenizer.make()
FALLBACK = tiny_tokenizer.make(tiny_tokenizer.byte_fallback())
REAL_TEXT = "Crème brûlée costs 4 €, 日本語 and हिन्दी too 👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 — hello world\r\n\ttabs \ufffd kept"
MESSAGES = [{"role": "user", "content": "hello world"}]


def ids_of(text: str, tokenizer: Tokenizer = BYTES) -> list[int]:
    return list(tokenizer._backend.encode(text, add_special_tokens=False).ids)


def test_a_prompt_gets_the_bos_that_the_tokenizer_gives_it() -> None:
    assert BYTES.encode("hello") == [BOS_ID, *ids_of("hello")]
    without = tiny_tokenizer.make(tiny_tokenizer.byte_level(add_bos=False))
    assert without.encode("hello") == ids_of("hello")


def test_a_bos_in_the_text_is_not_doubled() -> None:
    assert BYTES.encode(f"{BOS}hello") == [BOS_ID, *ids_of("hello")]


def test_a_prompt_is_not_cut_where_the_file_says_so() -> None:
    backend = tiny_tokenizer.byte_level()
    backend.enable_truncation(max_length=3)
    assert len(tiny_tokenizer.make(backend).encode("abcdefgh")) == 9


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 6, "eos_token_id": "x"},
        {"model_type": "nemotron_h", "layers_block_type": "ME*-", "time_step_min": 5},
        {"model_type": "no-such-type"},
        {},
        None,
    ],
)
def test_what_is_wrong_with_a_configuration_is_not_the_tokenizers_affair(config: dict[str, Any] | None, tmp_path: Path) -> None:
    tiny_tokenizer.in_transformers(tiny_tokenizer.byte_level()).save_pretrained(tmp_path)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).encode("hello") == BYTES.encode("hello")


def test_a_chat_is_encoded_as_transformers_does_it_with_one_bos() -> None:
    expected = tiny_tokenizer.in_transformers(tiny_tokenizer.byte_level()).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert BYTES.encode_chat(MESSAGES) == expected
    assert BYTES.encode_chat(MESSAGES).count(BOS_ID) == 1
    assert BYTES.render_chat(MESSAGES) == f"{BOS}<|user|>hello world{EOS}{ASSISTANT}"


def test_a_tokenizer_without_a_chat_template_says_so() -> None:
    with pytest.raises(InputError, match=r"without a chat template.*plain text"):
        tiny_tokenizer.make(chat_template=None).encode_chat(MESSAGES)


def test_half_a_surrogate_pair_is_refused_by_its_place() -> None:
    with pytest.raises(InputError, match="surrogate pair, at character 2"):
        BYTES.encode("ab\udcff")
    with pytest.raises(InputError, match="surrogate pair, at character"):
        BYTES.encode_chat([{"role": "user", "content": "\ud800"}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ([{"role": "wizard", "content": "hi"}], "no such role: wizard"),
        ([{"content": "hi"}], '"role"'),
        ([{"role": "user"}], '"content"'),
        (["hi"], '"role"'),
    ],
)
def test_messages_that_do_not_fit_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        BYTES.encode_chat(messages)


def test_a_saved_tokenizer_loads(tmp_path: Path) -> None:
    loaded = Tokenizer.load(tiny_tokenizer.save(tmp_path))
    assert loaded.encode("hello world") == BYTES.encode("hello world")
    assert loaded.encode_chat(MESSAGES) == BYTES.encode_chat(MESSAGES)
    assert loaded.special_ids == BYTES.special_ids


def test_a_missing_tokenizer_names_the_folder_and_what_would_work(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*without a tokenizer.*Copy tokenizer.json"):
        Tokenizer.load(tmp_path)


def test_a_damaged_tokenizer_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


def test_special_tokens_around_a_prompt_can_be_left_out() -> None:
    assert BYTES.encode("hello", add_special_tokens=False) == ids_of("hello")
    assert BYTES.encode(f"{BOS}hello", add_special_tokens=False) == [BOS_ID, *ids_of("hello")]


def test_an_answer_can_go_on_from_the_last_message() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "well"}]
    opened = BYTES.render_chat(messages, continue_final_message=True)
    assert opened == f"{BOS}<|user|>hello world{EOS}{ASSISTANT}well"
    assert BYTES.render_chat(messages, add_generation_prompt=False) == f"{opened}{EOS}"


def test_tools_and_variables_reach_the_template() -> None:
    tokenizer = tiny_tokenizer.make(chat_template="{{ tools[0].function.name if tools else 'none' }} {{ mood }}")
    tool = {"type": "function", "function": {"name": "f"}}
    assert tokenizer.render_chat(MESSAGES, tools=[tool], variables={"mood": "good"}) == "f good"
    assert tokenizer.render_chat(MESSAGES) == "none "
    with pytest.raises(InputError, match="tools: got 1 of them; expected none"):
        BYTES.render_chat(MESSAGES, tools=[tool])
    for name, words in (("mod", "does not read"), ("messages", "does not set"), ("add_generation_prompt", "does not set")):
        with pytest.raises(InputError, match=f"chat_template_kwargs.{name}: got a name that .* {words}"):
            tokenizer.render_chat(MESSAGES, variables={name: 1})


def test_the_template_says_which_names_it_reads() -> None:
    assert BYTES.template_mentions("messages")
    assert not BYTES.template_mentions("message_")
    assert not tiny_tokenizer.make(chat_template=None).template_mentions("messages")
    assert tiny_tokenizer.make(chat_template=None).template == ""
    assert BYTES.template == tiny_tokenizer.CHAT_TEMPLATE


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK])
def test_the_bytes_of_tokens_are_the_text(tokenizer: Tokenizer) -> None:
    ids = ids_of(REAL_TEXT, tokenizer)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == tokenizer.decode(ids).strip()
    assert tokenizer.token_bytes(BOS_ID) == BOS.encode()
    assert tokenizer.token_bytes(10_000) == b""


def test_the_bytes_of_tokens_may_be_parts_of_characters() -> None:
    assert [BYTES.token_bytes(token) for token in ids_of("€ é")] == [b"\xe2\x82", b"\xac", b" ", b"\xc3", b"\xa9"]
    assert BYTES.longest_token >= len(ASSISTANT)


def test_special_tokens_are_found_by_their_text() -> None:
    assert BYTES.special_tokens[BOS] == BOS_ID
    assert BYTES.special_ids_in([f"a{BOS}", "x"]) == {BOS_ID}
    assert BYTES.special_ids_in([]) == frozenset()


def test_without_a_tokenizer_token_ids_are_all_there_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a folder without a tokenizer"):
        Tokenizer.load(tmp_path)
    nothing = Tokenizer.load(tmp_path, required=False)
    assert (nothing.size, nothing.special_ids, nothing.template, nothing.decode([5, 6])) == (0, frozenset(), "", "")
    assert nothing.token_bytes(5) == b""
    assert not nothing.has_chat_template
    remedy = "With tokenizer.json and tokenizer_config.json in .* text works too"
    with pytest.raises(
        InputError, match=f"prompt: got a text, for a model without a tokenizer; expected .*token ids.*{remedy}"
    ):
        nothing.encode("hello")
    with pytest.raises(InputError, match="chat messages: got a conversation"):
        nothing.encode_chat([{"role": "user", "content": "hello"}])
    with pytest.raises(InputError, match="grammar: got a grammar"):
        nothing.to_json()
