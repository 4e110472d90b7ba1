"""Figures of answers whose times are known."""

from __future__ import annotations

import json

import pytest

from eightfold.benchmarks.measures import Answer, details, is_good, parse_goodput, render, summarize
from eightfold.errors import InputError


def answer(sent: float, *frames: float, tokens: int | None = None, ended: float | None = None, **further: object) -> Answer:
    """An answer whose frames come at these times and whose end comes with the last."""
    times = list(frames)
    end = ended if ended is not None else (times[-1] if times else sent)
    made = Answer(sent, sent, end, times, 10, 4, len(times) if tokens is None else tokens, "length")
    for name, value in further.items():
        setattr(made, name, value)
    return made


# One token a frame each 10 ms after 100 ms; the second has two tokens a frame; the third failed.
EVEN = answer(5.0, 5.1, 5.11, 5.12, 5.13)
PAIRED = answer(5.05, 5.25, 5.27, 5.29, tokens=6, ended=5.3)
FAILED = answer(5.2, error="http 429", detail="the queue is full", ended=5.21, completion_tokens=0)


def test_every_figure_follows_from_the_times() -> None:
    found = summarize([EVEN, PAIRED, FAILED], start=5.0, duration=0.5, limits={"ttft": 150, "itl": 30})
    expected = {
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 20,
        "total_cached_tokens": 8,
        "total_output_tokens": 10,
        "request_throughput": 4.0,
        "request_goodput": 2.0,
        "output_throughput": 20.0,
        "total_token_throughput": 60.0,
        "max_output_tokens_per_s": 10,
        "max_concurrent_requests": 2,
        "tokens_per_frame": 10 / 7,
        "p99_late_ms": 0.0,
        "mean_ttft_ms": 150.0,
        "std_ttft_ms": 50.0,
        "median_ttft_ms": 150.0,
        "p99_ttft_ms": 199.0,
        "mean_tpot_ms": (10.0 + 8.0) / 2,
        "mean_itl_ms": (3 * 10.0 + 2 * 20.0) / 5,
        "median_itl_ms": 10.0,
        "p90_itl_ms": 20.0,
        "mean_e2el_ms": (130.0 + 250.0) / 2,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert found["errors"] == {"http 429": 1}
    json.dumps(found, allow_nan=False)


def test_nothing_measured_is_none_and_not_zero() -> None:
    found = summarize([FAILED], start=5.0, duration=1.0, limits={})
    assert found["completed"] == 0
    assert [found[key] for key in ("mean_ttft_ms", "p99_itl_ms", "tokens_per_frame", "request_goodput")] == [None] * 4
    json.dumps(summarize([], start=0.0, duration=0.0, limits={}), allow_nan=False)
    one = summarize([answer(0.0, 0.1)], start=0.0, duration=1.0, limits={})
    assert (one["mean_tpot_ms"], one["mean_itl_ms"]) == (None, None)
    assert one["mean_ttft_ms"] == pytest.approx(100.0)


def test_goodput_words_and_limits() -> None:
    assert parse_goodput(["ttft:500", "itl:50,e2e:2e4"]) == {"ttft": 500.0, "itl": 50.0, "e2el": 20000.0}
    assert parse_goodput(["ttft:500 tpot:9"]) == {"ttft": 500.0, "tpot": 9.0}
    assert parse_goodput([]) == {}
    for limits, good in (({"ttft": 101}, True), ({"ttft": 99}, False), ({"itl": 9}, False), ({"e2el": 131, "tpot": 11}, True)):
        assert is_good(EVEN, limits) is good, limits


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tftt:5"], "goodput metric tftt: got an unknown name; expected one of: ttft, tpot, itl, e2el. Did you mean ttft?"),
        (["ttft"], "--goodput: got ttft; expected a metric and its limit in milliseconds, such as ttft:500"),
        (["ttft:fast"], "--goodput: got ttft:fast; expected a metric and its limit"),
        (["ttft:0"], "--goodput: got ttft:0; expected"),
        (["ttft:nan"], "--goodput: got ttft:nan; expected"),
        (["e2e:1", "e2el:2"], "--goodput: got two limits for e2el; expected one"),
    ],
)
def test_goodput_words_that_mean_nothing_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_goodput(words)
    assert str(error.value).startswith(message)


def test_the_table_shows_percentiles_and_an_example_of_each_failure() -> None:
    answers = [EVEN, PAIRED, FAILED]
    text = render(summarize(answers, start=5.0, duration=0.5, limits={"ttft": 150}), answers)
    lines = [line.split() for line in text.splitlines()]
    assert ["requests", "completed", "2"] in lines
    assert ["time", "to", "first", "token", "150.00", "150.00", "190.00", "195.00", "199.00"] in lines
    assert "goodput, requests/s (ttft 150 ms)" in text
    assert text.endswith("1 failed: http 429, such as: the queue is full")
    assert "-" in render(summarize([], start=0.0, duration=1.0, limits={}), [])


def test_details_are_in_the_order_of_sending() -> None:
    found = details([PAIRED, FAILED, EVEN], 5.0)
    assert found["start_times"] == pytest.approx([0.0, 0.05, 0.2])
    assert found["output_lens"] == [4, 6, 0]
    assert found["ttfts"][2] is None
    assert found["itls"][1] == pytest.approx([0.02, 0.02])
    assert found["error_details"] == ["", "", "http 429: the queue is full"]
