"""What `/metrics` says, under the names of two other engines."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eightfold.server.config import MetricsNames
from eightfold.server.metrics import Metrics
from eightfold.server.timing import Recorder, RequestTimes
from eightfold.server.wire import BackendRow, ServedModel, Snapshot, StepRow

# The queries of vLLM's and SGLang's own boards name these (each with _bucket, _sum and _count where it is a histogram).
VLLM_BOARD = (
    "e2e_request_latency_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_success_total",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_max_num_generation_tokens",
)
SGLANG_BOARD = (
    "e2e_request_latency_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "num_running_reqs",
    "num_queue_reqs",
    "gen_throughput",
    "cache_hit_rate",
    "token_usage",
)


def client(**changes: Any) -> Any:
    """What a client of an engine knows after two requests."""
    recorder, times = Recorder(), RequestTimes(1.0, 5, 9)
    recorder.start(times, 1.5)
    for now in (2.0, 2.004):
        recorder.token(times, now)
    recorder.finish(times, 2.1)
    known: dict[str, Any] = {
        "snapshot": Snapshot(
            running=2, waiting=3, num_blocks=10, free_blocks=4, prompt_tokens=50, generated_tokens=60,
            prefix_queries=40, prefix_hits=10, prefix_lost=6, preemptions=1,
            steps={"decode": StepRow(7, 14, 0.5, 0.25), "mixed": StepRow(1, 9, 0.125, 0.0)},
        ),
        "finished": Counter({"stop": 4, "abort": 1}),
        "rate": 12.5,
        "recorder": recorder,
        "model": ServedModel(
            "folder", 64, 300, (2,), {}, 8, 10, 16, load_seconds=1.5,
            backends=(BackendRow("linear mxfp8", "cpu", 2, ("fold: there is no GPU",)),),
        ),
    }  # fmt: skip
    return SimpleNamespace(**(known | {"num_waiting": 4} | changes))


def samples(names: MetricsNames, **changes: Any) -> dict[tuple[str, str], float]:
    """Every sample by its name and the last of its own labels, after a check that the text is Prometheus' format."""
    text = Metrics(client(**changes), "tiny", names).render().decode()
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            own = [
                value
                for label, value in sample.labels.items()
                if label in ("le", "finished_reason", "block_size", "backend", "kind")
            ]
            found[sample.name, own[-1] if own else ""] = sample.value
    return found


@pytest.mark.parametrize(("prefix", "names", "board"), [("vllm", "vllm", VLLM_BOARD), ("sglang", "sglang", SGLANG_BOARD)])
def test_what_boards_ask_for_is_there(prefix: str, names: MetricsNames, board: tuple[str, ...]) -> None:
    known = {name for name, _ in samples(names)}
    known |= {name.removesuffix("_bucket") for name in known}
    assert {f"{prefix}:{name}" for name in board} <= known


def test_numbers_under_vllms_names() -> None:
    found = samples("vllm")
    expected = {
        ("vllm:num_requests_running", ""): 2,
        ("vllm:num_requests_waiting", ""): 4,
        ("vllm:kv_cache_usage_perc", ""): 0.6,
        ("vllm:prompt_tokens_total", ""): 50,
        ("vllm:generation_tokens_total", ""): 60,
        ("vllm:prefix_cache_queries_total", ""): 40,
        ("vllm:prefix_cache_hits_total", ""): 10,
        ("vllm:num_preemptions_total", ""): 1,
        ("vllm:request_success_total", "stop"): 4,
        ("vllm:request_success_total", "length"): 0,
        ("vllm:request_success_total", "abort"): 1,
        ("vllm:cache_config_info", "16"): 1,
        ("vllm:inter_token_latency_seconds_bucket", "0.002"): 0,
        ("vllm:inter_token_latency_seconds_bucket", "0.005"): 1,
        ("vllm:inter_token_latency_seconds_bucket", "+Inf"): 1,
        ("vllm:time_to_first_token_seconds_sum", ""): 1.0,
        ("vllm:time_to_first_token_seconds_count", ""): 1,
        ("vllm:request_queue_time_seconds_sum", ""): 0.5,
        ("eightfold:backend_info", "cpu"): 1,
        ("eightfold:load_seconds", ""): 1.5,
        ("eightfold:prefix_tokens_lost_total", ""): 6,
        ("eightfold:steps_total", "decode"): 7,
        ("eightfold:step_tokens_total", "mixed"): 9,
        ("eightfold:step_seconds_total", "decode"): 0.5,
        ("eightfold:host_gap_seconds_total", "decode"): 0.25,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert not [name for name, _ in found if name.startswith("sglang:")]


def test_numbers_under_sglangs_names() -> None:
    found = samples("sglang")
    expected = {
        ("sglang:num_running_reqs", ""): 2,
        ("sglang:num_used_tokens", ""): 96,
        ("sglang:token_usage", ""): 0.6,
        ("sglang:max_total_num_tokens", ""): 160,
        ("sglang:cache_hit_rate", ""): 0.25,
        ("sglang:gen_throughput", ""): 12.5,
        ("sglang:num_requests_total", ""): 5,
        ("sglang:num_aborted_requests_total", ""): 1,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert not [name for name, _ in found if name.startswith("vllm:")]


def test_the_page_lists_our_own_names() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(eightfold:\w+)` \|", page, re.MULTILINE)) == {
        name for name, _ in samples("vllm") if name.startswith("eightfold:")
    }


def test_both_and_the_time_of_loading() -> None:
    assert len(samples("both")) > max(len(samples(names)) for names in get_args(MetricsNames) if names != "both")
    loading = samples("both", model=None, snapshot=Snapshot())
    assert loading["vllm:kv_cache_usage_perc", ""] == 0
    assert not [name for name, _ in loading if name.startswith("eightfold:")]
