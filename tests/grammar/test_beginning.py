from __future__ import annotations

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from eightfold.grammar.beginning import Beginning
from eightfold.text import Tokenizer
from tests.grammar.masks import permitted
from tests.tiny_tokenizer import in_transformers

WORDS = ["</s>", "<", "/", "e", ">", "</", "/e>", "/e>x", ">x", ">Ċ", "a", "a</e>", "a</e>b", "</e>ĊĊ", "Ċ", "ĊĊ", "<<", "<s>"]
IDS = {word: token_id for token_id, word in enumerate(WORDS)}


def tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=IDS, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(in_transformers(backend), "a test")


def beginning() -> Beginning:
    return Beginning("</e>", tokenizer(), len(WORDS) + 3, [0])


def banned(tail: str) -> set[str]:
    allowed = permitted(beginning().mask(tail.encode()))
    assert max(allowed) < len(WORDS)
    return {WORDS[token_id] for token_id in range(len(WORDS)) if token_id not in allowed}


def test_what_would_end_the_tag_and_go_on_is_banned_where_it_would() -> None:
    assert banned("") == {"</s>", "a</e>b"}
    assert banned("x<") == {"</s>", "a</e>b", "/e>x"}
    assert banned("</e") == {"</s>", "a</e>b", ">x"}
    assert banned("</") == {"</s>", "a</e>b"}


def test_the_tag_is_found_however_it_is_cut() -> None:
    found = beginning()
    for words in (["<", "/", "e", ">"], ["</", "e", ">Ċ"], ["<", "/e>"], ["a</e>"], ["<<", "/e>"], ["a", "</e>ĊĊ"]):
        tail, ended = b"", False
        for word in words:
            assert not ended
            tail, ended = found.advance(tail, IDS[word])
            assert len(tail) < len("</e>")
        assert ended, words
    tail = b""
    for word in ("<", "/", "a", "e", ">", "<", "e", ">"):
        tail, ended = found.advance(tail, IDS[word])
        assert not ended


def test_line_breaks_may_follow_the_tag() -> None:
    found = beginning()
    mask = np.packbits([WORDS[token_id] == "a" for token_id in range(len(WORDS))], bitorder="little").tobytes()
    assert {WORDS[token_id] for token_id in permitted(found.with_breaks(mask))} == {"a", "Ċ", "ĊĊ"}
    assert found.is_break(IDS["Ċ"])
    assert not found.is_break(IDS["a"])
