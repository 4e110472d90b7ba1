"""`/metrics`: the numbers that the engine sent last and the times of requests, under the names that people's boards read.

Nothing is counted here. A scrape renders plain integers, and costs a step of the engine nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from eightfold.server.bridge import EngineClient
from eightfold.server.config import MetricsNames
from eightfold.server.timing import Histogram
from eightfold.server.wire import StepRow
from eightfold.types import FinishReason

__all__ = ["CONTENT_TYPE", "Metrics"]

Kind: TypeAlias = Literal["gauge", "counter"]
Sample: TypeAlias = tuple[Mapping[str, str], float]
_REASONS: Sequence[FinishReason] = ("stop", "length", "abort")
_OF_STEPS: Sequence[tuple[str, str, Callable[[StepRow], float]]] = (
    ("steps", "Steps, by what they computed: prefill, decode or mixed.", lambda row: row.steps),
    ("step_tokens", "Tokens that steps computed.", lambda row: row.tokens),
    ("step_seconds", "Time of steps, from a batch to its tokens on the host.", lambda row: row.seconds),
    ("host_gap_seconds", "Time before steps that the device waited for the host.", lambda row: row.gap_seconds),
)


@dataclass(frozen=True, slots=True)
class Number:
    """A gauge or a counter, with its samples; a counter's name gets `_total` as it is written."""

    kind: Kind
    name: str
    help: str
    samples: Sequence[Sample]


class Metrics(Collector):
    """The metrics of one server.

    Args:
        client: has the numbers.
        model_name: a label of all of them.
        names: whose names to use.
    """

    def __init__(self, client: EngineClient, model_name: str, names: MetricsNames) -> None:
        self._client = client
        self._model_name = model_name
        self._names = names
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        if self._names in ("vllm", "both"):
            labels = {"model_name": self._model_name, "engine": "0"}
            yield from _families("vllm:", labels, self._vllm_numbers(), self._vllm_histograms())
        if self._names in ("sglang", "both"):
            ranks = {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0", "dp_rank": "0"}
            labels = {"model_name": self._model_name, "engine_type": "unified", **ranks}
            yield from _families("sglang:", labels, self._sglang_numbers(), self._sglang_histograms())
        yield from _families("eightfold:", {"model_name": self._model_name}, self._own_numbers(), ())

    def _used_share(self) -> float:
        snapshot = self._client.snapshot
        return 1 - snapshot.free_blocks / snapshot.num_blocks if snapshot.num_blocks else 0.0

    def _vllm_numbers(self) -> Iterator[Number]:
        now, finished, model = self._client.snapshot, self._client.finished, self._client.model
        yield Number("gauge", "num_requests_running", "Requests that hold a part of the cache.", _one(now.running))
        yield Number("gauge", "num_requests_waiting", "Requests in the queue.", _one(self._client.num_waiting))
        yield Number("gauge", "kv_cache_usage_perc", "Share of the KV cache in use, from 0 to 1.", _one(self._used_share()))
        yield Number("counter", "prompt_tokens", "Tokens of prompts.", _one(now.prompt_tokens))
        yield Number("counter", "generation_tokens", "Tokens generated.", _one(now.generated_tokens))
        yield Number("counter", "prefix_cache_queries", "Tokens looked up in the prefix cache.", _one(now.prefix_queries))
        yield Number("counter", "prefix_cache_hits", "Tokens found in the prefix cache.", _one(now.prefix_hits))
        yield Number("counter", "num_preemptions", "Times that a request gave its cache back.", _one(now.preemptions))
        by_reason = [({"finished_reason": reason}, float(finished[reason])) for reason in _REASONS]
        yield Number("counter", "request_success", "Requests that ended, by reason.", by_reason)
        if model is not None:
            sizes = {"block_size": str(model.block_size), "num_gpu_blocks": str(model.num_blocks)}
            yield Number("gauge", "cache_config_info", "The KV cache.", [(sizes, 1.0)])

    def _vllm_histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        times = self._client.recorder
        yield "time_to_first_token_seconds", "From a request's arrival to its first token.", times.time_to_first_token
        yield "inter_token_latency_seconds", "Between two tokens of a request.", times.inter_token
        yield "request_time_per_output_token_seconds", "A request's mean time for a token.", times.per_output_token
        yield "e2e_request_latency_seconds", "From a request's arrival to its end.", times.end_to_end
        yield "request_queue_time_seconds", "In the queue.", times.queue
        yield "request_inference_time_seconds", "From the queue to the last token.", times.inference
        yield "request_prefill_time_seconds", "From the queue to the first token.", times.prefill
        yield "request_decode_time_seconds", "From the first token to the last.", times.decode
        yield "request_prompt_tokens", "Tokens of a prompt.", times.prompt_tokens
        yield "request_generation_tokens", "Tokens of an answer.", times.generation_tokens
        yield "request_params_max_tokens", "The max_tokens of a request.", times.max_tokens
        yield "request_max_num_generation_tokens", "Most tokens of an answer of a request.", times.generation_tokens

    def _sglang_numbers(self) -> Iterator[Number]:
        now, finished, model = self._client.snapshot, self._client.finished, self._client.model
        block_size = model.block_size if model is not None else 0
        used = (now.num_blocks - now.free_blocks) * block_size
        hit_rate = now.prefix_hits / now.prefix_queries if now.prefix_queries else 0.0
        yield Number("gauge", "num_running_reqs", "Requests that hold a part of the cache.", _one(now.running))
        yield Number("gauge", "num_queue_reqs", "Requests in the queue.", _one(self._client.num_waiting))
        yield Number("gauge", "num_used_tokens", "Tokens in use of the KV cache.", _one(used))
        yield Number("gauge", "token_usage", "Share of the KV cache in use, from 0 to 1.", _one(self._used_share()))
        yield Number("gauge", "max_total_num_tokens", "Tokens that the KV cache holds.", _one(now.num_blocks * block_size))
        yield Number("gauge", "cache_hit_rate", "Share of tokens found in the prefix cache.", _one(hit_rate))
        yield Number("gauge", "gen_throughput", "Tokens generated a second, over the last snapshots.", _one(self._client.rate))
        yield Number("counter", "prompt_tokens", "Tokens of prompts.", _one(now.prompt_tokens))
        yield Number("counter", "generation_tokens", "Tokens generated.", _one(now.generated_tokens))
        yield Number("counter", "cached_tokens", "Tokens found in the prefix cache.", _one(now.prefix_hits))
        yield Number("counter", "num_requests", "Requests that ended.", _one(finished.total()))
        yield Number("counter", "num_aborted_requests", "Requests that were aborted.", _one(finished["abort"]))

    def _sglang_histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        times = self._client.recorder
        yield "time_to_first_token_seconds", "From a request's arrival to its first token.", times.time_to_first_token
        yield "inter_token_latency_seconds", "Between two tokens of a request.", times.inter_token
        yield "e2e_request_latency_seconds", "From a request's arrival to its end.", times.end_to_end
        yield "queue_time_seconds", "In the queue.", times.queue

    def _own_numbers(self) -> Iterator[Number]:
        model = self._client.model
        if model is None:
            return
        uses = [
            ({"op": item.operation, "backend": item.backend, "reason": "; ".join(item.declined)}, 1.0)
            for item in model.backends
        ]
        yield Number("gauge", "backend_info", "What computes, and why nothing better does.", uses)
        lost = self._client.snapshot.prefix_lost
        text = "Tokens whose keys and values were in the prefix cache, and no recurrent state with them."
        yield Number("counter", "prefix_tokens_lost", text, _one(lost))
        yield Number("gauge", "load_seconds", "Time that loading took.", [({"phase": "weights"}, model.load_seconds)])
        steps = self._client.snapshot.steps
        for name, text, value_of in _OF_STEPS:
            yield Number("counter", name, text, [({"kind": kind}, float(value_of(row))) for kind, row in steps.items()])


def _one(value: float) -> list[Sample]:
    return [({}, float(value))]


def _families(
    prefix: str, labels: Mapping[str, str], numbers: Iterable[Number], histograms: Iterable[tuple[str, str, Histogram]]
) -> Iterator[Metric]:
    """Metrics as the client library has them."""
    for number in numbers:
        names = [*labels, *(name for name in next(iter(number.samples), ({}, 0.0))[0])]
        make = GaugeMetricFamily if number.kind == "gauge" else CounterMetricFamily
        family = make(prefix + number.name, number.help, labels=names)
        for own, value in number.samples:
            family.add_metric([*labels.values(), *own.values()], value)
        yield family
    for name, text, histogram in histograms:
        bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
        of_all = HistogramMetricFamily(prefix + name, text, labels=list(labels))
        of_all.add_metric(list(labels.values()), buckets, histogram.total)
        yield of_all
