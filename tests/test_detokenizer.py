"""Answers as text: whole characters, and stop texts that never show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from eightfold.detokenizer import REPLACEMENT, Detokenizer, StopMatcher, TextEvent, TokenText
from eightfold.text import Tokenizer
from eightfold.types import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs
from tests import tiny_tokenizer
from tests.tiny_tokenizer import BOS, BOS_ID, EOS, EOS_ID

BYTES = tiny_tokenizer.make()
FALLBACK = tiny_tokenizer.make(tiny_tokenizer.byte_fallback())
REAL_TEXT = "Crème brûlée costs 4 €, 日本語 and हिन्दी too 👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 — hello world\r\n\ttabs \ufffd kept"

byte_ids = st.lists(st.integers(0, BYTES._backend.get_vocab_size() + 3), max_size=30)
# Long runs of bytes that make no character, with some that do.
_PARTS = [BYTES._backend.token_to_id(word) or 0 for word in ("ð", "Ł", "ĺ", "â", "Ĥ", "¬", "âĤ", "a", "Ġw", EOS)]
bad_byte_ids = st.lists(st.sampled_from(_PARTS[:7]) | st.sampled_from(_PARTS), max_size=80)
fallback_ids = st.lists(st.integers(0, FALLBACK._backend.get_vocab_size() - 1), max_size=30)


def ids_of(text: str, tokenizer: Tokenizer = BYTES) -> list[int]:
    return list(tokenizer._backend.encode(text, add_special_tokens=False).ids)


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], context: Sequence[int] = (), **options: Any) -> list[str]:
    stream = TokenText(tokenizer, context, **options)
    return [*(stream.push(token) for token in ids), stream.finish()]


@given(ids=byte_ids | bad_byte_ids, skip=st.booleans())
@example(ids=ids_of(REAL_TEXT), skip=True)
def test_the_pieces_are_the_whole_text(ids: list[int], skip: bool) -> None:
    whole = BYTES.decode(ids, skip_special_tokens=skip)
    pieces = pieces_of(BYTES, ids, skip_special_tokens=skip)
    assert "".join(pieces) == whole
    # No piece ends inside a character: what was shown never changes.
    assert all(whole.startswith("".join(pieces[:count])) for count in range(len(pieces)))


@given(context=byte_ids | bad_byte_ids, ids=byte_ids | bad_byte_ids)
def test_the_prompt_and_the_pieces_are_the_text_of_both(context: list[int], ids: list[int]) -> None:
    prompt = BYTES.decode(context)
    pieces = "".join(pieces_of(BYTES, ids, context))
    # A character that the prompt began belongs to the answer, which completes it.
    assert BYTES.decode([*context, *ids]) in (prompt + pieces, prompt.removesuffix(REPLACEMENT) + pieces)


@given(text=st.text(max_size=20))
@example(text=REAL_TEXT)
def test_real_characters_come_whole_and_at_once(text: str) -> None:
    stream = TokenText(BYTES)
    data = b""
    shown = ""
    for token in ids_of(text):
        shown += stream.push(token)
        data += "".join(BYTES._backend.id_to_token(token) or "").translate(UNICODE_TO_BYTES).encode("latin-1")
        complete = data.decode(errors="ignore")
        assert shown == complete or complete.endswith(REPLACEMENT)
    assert shown + stream.finish() == text


def _unicode_to_bytes() -> dict[int, int]:
    """The table of byte-level BPE: printable bytes stand for themselves, the others for 256 and up."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {256 + index: byte for index, byte in enumerate(others)}


UNICODE_TO_BYTES = _unicode_to_bytes()


def test_a_missing_byte_becomes_a_replacement_character_at_the_end() -> None:
    cut = ids_of("4 €")[:-1]
    assert pieces_of(BYTES, cut)[-1] == REPLACEMENT
    assert "".join(pieces_of(BYTES, cut)) == f"4 {REPLACEMENT}"


@given(ids=fallback_ids)
def test_byte_fallback_gives_the_whole_text_of_good_bytes(ids: list[int]) -> None:
    pieces = "".join(pieces_of(FALLBACK, ids))
    if REPLACEMENT not in FALLBACK.decode(ids):
        assert pieces == FALLBACK.decode(ids)


@given(text=st.text(alphabet="ab€😀é", max_size=12))
def test_byte_fallback_gives_real_text(text: str) -> None:
    ids = [token for byte in text.encode() for token in ids_of_byte(byte)]
    assert "".join(pieces_of(FALLBACK, ids)) == text


def ids_of_byte(byte: int) -> list[int]:
    token = FALLBACK._backend.token_to_id(f"<0x{byte:02X}>")
    return [] if token is None else [token]


def test_bad_bytes_do_not_take_back_a_good_character() -> None:
    ids = [token for byte in "€".encode() for token in ids_of_byte(byte)]
    ids += [*ids_of_byte(0xE2), *(FALLBACK._backend.token_to_id(word) or 0 for word in ("▁a", "b"))]
    assert "".join(pieces_of(FALLBACK, ids)) == f"€{REPLACEMENT} ab"
    # The library's own stream raises here, which is why TokenText exists.
    stream = DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        [stream.step(FALLBACK._backend, token) for token in ids]


@given(prompt=st.text(alphabet="ab€😀é", max_size=6), text=st.text(alphabet="ab€😀é", max_size=6))
@example(prompt="日本語", text="あ")
def test_byte_fallback_goes_on_from_any_prompt(prompt: str, text: str) -> None:
    context, ids = ([token for byte in part.encode() for token in ids_of_byte(byte)] for part in (prompt, text))
    assert "".join(pieces_of(FALLBACK, ids, context)) == text


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte-level", "byte-fallback"])
def test_a_token_costs_the_same_however_long_the_answer_is(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    decode = tokenizer.decode

    def measured(ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", measured)
    size = tokenizer._backend.get_vocab_size()
    for token in range(size + 3):  # the last ones are unknown
        pieces_of(tokenizer, [token] * 200)
    assert max(lengths) < 32


def test_bad_bytes_are_shown_before_the_answer_ends() -> None:
    stream = TokenText(BYTES)
    (lead, *_) = ids_of("€")
    assert len("".join(stream.push(lead) for _ in range(100))) > 80
    assert stream.push(ids_of("a")[0]).endswith("a")


def test_byte_fallback_finds_good_characters_long_after_a_bad_byte() -> None:
    ids = [token for byte in b"\xff" + "日本語".encode() * 10 for token in ids_of_byte(byte)]
    assert "".join(pieces_of(FALLBACK, ids)).endswith("日本語")


def test_the_first_word_keeps_its_space_behind_a_prompt() -> None:
    the, a = (FALLBACK._backend.token_to_id(word) or 0 for word in ("▁the", "▁a"))
    assert "".join(pieces_of(FALLBACK, [the, a])) == "the a"
    assert "".join(pieces_of(FALLBACK, [the, a], context=[a])) == " the a"


# Stop texts.


def first_stop(text: str, stops: Sequence[str], *, keep: bool) -> tuple[str, str | None]:
    """Character by character: the first stop text to be complete, the longest of those that are at once."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if keep else end - len(stop)], stop
    return text, None


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    keep=st.booleans(),
)
def test_the_stop_text_is_found_wherever_the_pieces_are_cut(pieces: list[str], stops: list[str], keep: bool) -> None:
    matcher = StopMatcher(stops, keep=keep)
    shown: list[str] = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.found is not None:
            break
    text = "".join([*shown, matcher.finish()])
    assert (text, matcher.found) == first_stop("".join(pieces), stops, keep=keep)


def test_only_what_may_begin_a_stop_text_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("a", "bE", "N", "x", "E")] == ["a", "b", "", "ENx", ""]
    assert matcher.finish() == "E"


# Token events to text events.


def run(text: str | Sequence[int], *, end: FinishReason = "length", **params: Any) -> list[TextEvent]:
    """Text events of an answer that is one token a byte."""
    ids = [token for character in text for token in ids_of(character)] if isinstance(text, str) else list(text)
    request = Request("r", tuple(ids_of("hello")), SamplingParams(**params), seed=0)
    detokenizer = Detokenizer(BYTES, request, index=3)
    events: list[TextEvent] = []
    for position, token in enumerate(ids):
        last = position == len(ids) - 1
        event = TokenEvent(
            "r", token, finish_reason=end if last else None, stop_token_id=token if last and end == "stop" else None
        )
        events.append(detokenizer.take(event))
        if events[-1].finish_reason is not None:
            break
    return events


def text_of(events: Sequence[TextEvent]) -> str:
    return "".join(event.text for event in events)


def test_an_answer_ends_at_its_stop_text() -> None:
    events = run("one two three", stop=("two", "three"))
    assert text_of(events) == "one "
    assert (events[-1].finish_reason, events[-1].stop_reason, events[-1].index) == ("stop", "two", 3)
    assert sum(len(event.token_ids) for event in events) == len("one two")


def test_a_stop_text_can_be_kept() -> None:
    assert text_of(run("one two three", stop=("two",), include_stop_str_in_output=True)) == "one two"


def test_a_stop_text_does_not_count_before_min_tokens() -> None:
    assert text_of(run("ab ab ab", stop=("ab",), min_tokens=2)) == "ab "
    assert text_of(run("ab ab ab", stop=("ab",), min_tokens=1)) == ""
    assert text_of(run("ab ab", stop=("ab",), min_tokens=5)) == "ab ab"


def test_what_was_held_back_comes_at_the_end() -> None:
    events = run("so it EN", stop=("END",))
    assert text_of(events) == "so it EN"
    assert events[-1].finish_reason == "length"


def test_a_stop_text_is_found_in_what_comes_at_the_end() -> None:
    half = [*ids_of("a"), ids_of("€")[0]]
    events = run(half, stop=(REPLACEMENT,))
    assert (text_of(events), events[-1].finish_reason, events[-1].stop_reason) == ("a", "stop", REPLACEMENT)


def test_the_token_that_ends_an_answer_gives_no_text() -> None:
    events = run([*ids_of("hi"), *ids_of("!")], end="stop", stop_token_ids=tuple(ids_of("!")))
    assert (text_of(events), events[-1].stop_reason) == ("hi", ids_of("!")[0])
    assert events[-1].token_ids == tuple(ids_of("!"))
    kept = run([*ids_of("hi"), *ids_of("!")], end="stop", include_stop_str_in_output=True)
    assert text_of(kept) == "hi!"


def test_special_tokens_show_where_asked_for() -> None:
    ids = [*ids_of("a"), EOS_ID, *ids_of("b")]
    assert text_of(run(ids)) == "ab"
    assert text_of(run(ids, skip_special_tokens=False)) == f"a{EOS}b"


def test_an_abort_flushes_and_the_rest_of_the_news_passes_through() -> None:
    request = Request("r", (5,), SamplingParams(stop=("END",)), seed=0)
    detokenizer = Detokenizer(BYTES, request)
    logprobs = TokenLogprobs(ids_of("E")[0], -1.0, 1, ())
    first = detokenizer.take(
        TokenEvent("r", ids_of("E")[0], logprobs=logprobs, prompt_logprobs=(logprobs,), num_cached_tokens=4)
    )
    assert (first.text, first.logprobs, first.prompt_logprobs, first.num_cached_tokens) == ("", (logprobs,), (logprobs,), 4)
    last = detokenizer.take(TokenEvent("r", None, finish_reason="abort"))
    assert (last.text, last.token_ids, last.finish_reason) == ("E", (), "abort")


def test_some_special_tokens_can_be_shown_among_hidden_ones() -> None:
    ids = [BOS_ID, *ids_of("a"), EOS_ID]
    assert "".join(pieces_of(BYTES, ids, shown=frozenset([EOS_ID]))) == f"a{EOS}"
    request = Request("a", (5,), SamplingParams(), 0)
    stream = Detokenizer(BYTES, request, shown=frozenset([BOS_ID]))
    assert "".join(stream.take(TokenEvent("a", token)).text for token in ids) == f"{BOS}a"


def test_characters_are_counted_whatever_becomes_of_them() -> None:
    stream = Detokenizer(BYTES, Request("a", (5,), SamplingParams(stop=("lo",)), 0))
    counts = []
    for token in ids_of("hel€lo"):
        counts.append(stream.num_characters)
        stream.take(TokenEvent("a", token))
    assert counts == [0, 2, 3, 3, 4, 5]
    assert stream.num_characters == 6
