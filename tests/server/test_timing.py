"""Histograms, and what is recorded of a request."""

from __future__ import annotations

import pytest

from eightfold.server.timing import Histogram, Recorder, RequestTimes


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 8.0)


def test_two_histograms_do_not_share_their_counts() -> None:
    one, other = Recorder(), Recorder()
    one.queue.observe(1.0)
    assert sum(other.queue.counts) == 0
    assert sum(one.decode.counts) == 0


def test_inter_token_latency_has_buckets_below_ten_milliseconds() -> None:
    assert Recorder().inter_token.bounds[:4] == (0.001, 0.002, 0.005, 0.01)


def test_the_times_of_a_request() -> None:
    recorder, times = Recorder(), RequestTimes(submitted=10.0, num_prompt_tokens=5, max_tokens=9)
    recorder.start(times, 11.0)
    recorder.start(times, 50.0)  # a second time changes nothing
    for now in (13.0, 13.5, 14.5):
        recorder.token(times, now)
    recorder.finish(times, 15.0)
    totals = {name: getattr(recorder, name).total for name in Recorder.__slots__}
    assert totals == pytest.approx(
        {
            "queue": 1.0,
            "time_to_first_token": 3.0,
            "inter_token": 1.5,
            "per_output_token": 0.75,
            "end_to_end": 5.0,
            "inference": 3.5,
            "prefill": 2.0,
            "decode": 1.5,
            "prompt_tokens": 5,
            "generation_tokens": 3,
            "max_tokens": 9,
        }
    )
    assert sum(recorder.inter_token.counts) == 2


def test_a_request_that_never_began_has_no_times_of_work() -> None:
    recorder, times = Recorder(), RequestTimes(submitted=10.0, num_prompt_tokens=5, max_tokens=9)
    recorder.finish(times, 12.0)
    assert (sum(recorder.end_to_end.counts), sum(recorder.inference.counts), sum(recorder.per_output_token.counts)) == (1, 0, 0)
