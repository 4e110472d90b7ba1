"""What a user may say, and what becomes of what the user did not say."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from eightfold.config import (
    DEFAULT_CHUNKED_PREFILL_SIZE,
    EngineConfig,
    HardwareFacts,
    ModelFacts,
    ResolvedConfig,
    cache_dir,
    default_dtype,
    default_state_dtype,
    refuse_unknown,
    resolve,
)
from eightfold.errors import InputError

MODEL = ModelFacts(context_length=1000, weight_bytes=1_000_000, kv_bytes_per_token={"float32": 100, "bfloat16": 50})
CPU = HardwareFacts("cpu", "a CPU", 10_000_000)
CUDA = HardwareFacts("cuda", "a GPU", 10_000_000)


HYBRID = dataclasses.replace(
    MODEL,
    state_bytes={
        ("float32", "float32"): 10_000,
        ("float32", "bfloat16"): 6_000,
        ("bfloat16", "float32"): 9_000,
        ("bfloat16", "bfloat16"): 5_000,
    },
)


def decide(hardware: HardwareFacts = CPU, *, model: ModelFacts = MODEL, **values: Any) -> ResolvedConfig:
    return resolve(EngineConfig(model="m", **values), model, hardware)


def origin(config: ResolvedConfig, name: str) -> tuple[object, str, str]:
    """Value, kind and reason of a setting."""
    (found,) = [item for item in config.origins if item.name == name]
    assert getattr(config, name) == found.value
    return found.value, found.kind, found.why


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("model", value) for value in ("", 3, None)),
        *(("revision", value) for value in ("", 3)),
        *(("quantization", value) for value in ("fp8", 8, True)),
        *(("quantization_ignored_layers", value) for value in ("lm_head", 5, [5])),
        *(("quantize_lm_head", value) for value in ("yes", 1, None)),
        *(("scale_rule", value) for value in ("round", None)),
        *(("dtype", value) for value in ("float8", None)),
        *(("device", value) for value in ("tpu", 0)),
        *(("load_format", value) for value in ("gguf",)),
        *(("fp8_gemm_backend", value) for value in ("", 3, None)),
        *(("moe_runner_backend", value) for value in ("", 3, None)),
        *(("attention_backend", value) for value in ("", 3)),
        *(("context_length", value) for value in (0, -1, 1.5, True, "5")),
        *(("max_running_requests", value) for value in (0, "5")),
        *(("max_total_tokens", value) for value in (0, 1.0)),
        *(("mem_fraction_static", value) for value in (0, 1.1, math.nan, True, "half")),
        *(("chunked_prefill_size", value) for value in (0, -1)),
        *(("page_size", value) for value in (0, True)),
        *(("mamba_ssm_dtype", value) for value in ("float16", "", None, 4)),
        *(("max_mamba_cache_size", value) for value in (-1, True, 1.5, "5")),
        *(("mamba_full_memory_ratio", value) for value in (0, -1, math.inf, math.nan, True, "half")),
        *(("mamba_track_interval", value) for value in (0, -16, True, 1.5, "16")),
        *(("disable_prefix_cache", value) for value in ("no", 0)),
        *(("sampling_defaults", value) for value in ("vllm", None)),
        *(("seed", value) for value in (-1, 2**64, True, 0.5)),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    values = {"model": "m", name: value}
    with pytest.raises(InputError, match=name):
        EngineConfig(**values)


def test_quantizing_the_head_alone_is_refused() -> None:
    with pytest.raises(InputError, match=r"quantize_lm_head.*quantization='mxfp8'"):
        EngineConfig(model="m", quantize_lm_head=True)


def test_an_unknown_keyword_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"quantisation.*Did you mean quantization\?"):
        EngineConfig.from_kwargs("m", quantisation="mxfp8")
    with pytest.raises(InputError, match=r"kind zzz: got an unknown name; expected one of: a, b$"):
        refuse_unknown("kind", ["zzz"], ["a", "b"])


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="m").seed = 3  # type: ignore[misc]


def test_every_field_has_help_for_the_command_line() -> None:
    assert all(item.metadata["help"].endswith(".") for item in fields(EngineConfig))


def test_everything_is_decided_and_says_where_it_came_from() -> None:
    config = decide(seed=5)
    names = [item.name for item in fields(EngineConfig)]
    assert [origin.name for origin in config.origins] == names
    assert all(getattr(config, origin.name) == origin.value for origin in config.origins)
    undecided = {name for name in names if getattr(config, name) in (None, "auto")}
    assert undecided == {
        "revision",
        "quantization",
        "load_format",
        "fp8_gemm_backend",
        "moe_runner_backend",
        "attention_backend",
    }
    kinds = {origin.name: origin.kind for origin in config.origins}
    assert (kinds["seed"], kinds["context_length"], kinds["dtype"], kinds["page_size"]) == (
        "user",
        "model",
        "hardware",
        "default",
    )
    assert config.chunked_prefill_size == DEFAULT_CHUNKED_PREFILL_SIZE[config.device]
    table = config.table().splitlines()
    assert len(table) == len(names)
    assert any(line.startswith("seed") and line.endswith("user") for line in table)


def test_the_device_decides_the_dtype() -> None:
    assert (decide().dtype, decide(CUDA).dtype) == ("float32", "bfloat16")
    assert decide(dtype="bfloat16").dtype == "bfloat16"
    assert default_dtype("cuda")[0] == "bfloat16"


def test_the_cache_takes_what_memory_leaves_in_whole_pages() -> None:
    # 60 % of 10 MB less 1 MB of weights is 50,000 tokens of 100 bytes.
    assert decide().max_total_tokens == 50_000
    assert decide(page_size=7).max_total_tokens == 50_000 // 7 * 7
    assert decide(max_running_requests=2).max_total_tokens == 2 * 1000 // 16 * 16
    assert decide(mem_fraction_static=0.2).max_total_tokens == 10_000
    assert decide(CUDA).max_total_tokens == int(10_000_000 * 0.88 - 1_000_000) // 50 // 16 * 16


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"context_length": 1001}, "context_length: got 1001; expected at most 1000"),
        ({"max_total_tokens": 60_000}, "max_total_tokens: got 60000; expected at most 50000"),
        ({"mem_fraction_static": 0.1}, "mem_fraction_static of 0.10 would hold"),
        ({"max_total_tokens": 8}, "one page of 16"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        decide(**values)


def test_a_hybrid_divides_its_memory_between_states_and_keys_and_values() -> None:
    # 5,000,000 bytes beside the weights; 0.9 / 1.9 of them are 236 states of 10,000 bytes, and the rest 26,400 tokens.
    config = decide(model=HYBRID)
    assert origin(config, "mamba_ssm_dtype") == ("float32", "default", "")
    assert origin(config, "mamba_full_memory_ratio") == (0.9, "default", "")
    assert origin(config, "mamba_track_interval") == (256, "default", "")
    assert origin(config, "max_running_requests") == (157, "hardware", "two thirds of the recurrent states that fit")
    assert origin(config, "max_mamba_cache_size") == (236, "hardware", "10000 bytes each")
    assert origin(config, "max_total_tokens") == (26_400, "hardware", "what fits into 60% of memory")


@pytest.mark.parametrize(
    ("values", "running", "slots", "tokens"),
    [
        ({"mamba_ssm_dtype": "bfloat16"}, 256, 394, 26_352),  # 5,000,000 - 394 * 6,000 = 26,360 tokens
        ({"dtype": "bfloat16"}, 175, 263, 52_656),  # states of 9,000 bytes, tokens of 50
        ({"mamba_full_memory_ratio": 0.1}, 30, 45, 30 * 1_000),
        ({"mamba_full_memory_ratio": 1e-9}, 1, 1, 1_000 // 16 * 16),
        ({"mamba_full_memory_ratio": 1e9}, 256, 499, 96),
        ({"max_total_tokens": 20_000}, 200, 300, 20_000),
        ({"max_total_tokens": 20_000, "mamba_full_memory_ratio": 0.5}, 66, 100, 20_000),
        ({"max_total_tokens": 20_000, "mamba_full_memory_ratio": 99.0}, 200, 300, 20_000),
        ({"max_mamba_cache_size": 1}, 1, 1, 1_000 // 16 * 16),
        ({"max_mamba_cache_size": 12}, 8, 12, 8 * 1_000),
        ({"max_mamba_cache_size": 499}, 256, 499, 96),
        ({"max_mamba_cache_size": 499, "max_running_requests": 2}, 2, 499, 96),
        ({"max_running_requests": 300}, 300, 300, 20_000),
        ({"max_running_requests": 499}, 499, 499, 96),
        ({"max_running_requests": 3}, 3, 3 * (2 + 2), 3 * 1_000 // 16 * 16),
        ({"max_running_requests": 3, "chunked_prefill_size": 300}, 3, 3 * (2 + 4), 3 * 1_000 // 16 * 16),
        ({"max_running_requests": 45, "mamba_full_memory_ratio": 0.1}, 45, 45, 45_000 // 16 * 16),
        ({"disable_prefix_cache": True}, 236, 236, 26_400),
        ({"disable_prefix_cache": True, "max_running_requests": 5}, 5, 5, 5 * 1_000 // 16 * 16),
        ({"disable_prefix_cache": True, "max_mamba_cache_size": 12}, 12, 12, 12 * 1_000),
    ],
)
def test_what_a_user_says_of_states_decides_the_rest(values: dict[str, Any], running: int, slots: int, tokens: int) -> None:
    config = decide(model=HYBRID, **values)
    assert (config.max_running_requests, config.max_mamba_cache_size, config.max_total_tokens) == (running, slots, tokens)
    assert all(origin(config, name) == (value, "user", "") for name, value in values.items() if name != "disable_prefix_cache")
    state = HYBRID.state_bytes[config.dtype, config.mamba_ssm_dtype]
    assert slots * state + tokens * HYBRID.kv_bytes_per_token[config.dtype] <= 5_000_000


def test_a_hybrid_takes_no_more_states_than_requests_can_use() -> None:
    config = decide(HardwareFacts("cpu", "a CPU", 1_000_000_000), model=HYBRID, chunked_prefill_size=100)
    assert origin(config, "max_running_requests") == (256, "default", "")
    assert origin(config, "max_mamba_cache_size") == (256 * (2 + 10), "hardware", "all that running requests can use")
    assert origin(config, "max_total_tokens") == (256_000, "hardware", "every running request at full length")


def test_without_a_prefix_cache_every_state_is_of_a_request() -> None:
    config = decide(model=HYBRID, disable_prefix_cache=True)
    assert origin(config, "max_running_requests") == (236, "hardware", "the recurrent states that fit")
    assert origin(config, "max_mamba_cache_size") == (236, "hardware", "all that running requests can use")


def test_the_checkpoint_says_the_dtype_of_states_unless_the_user_does() -> None:
    model = dataclasses.replace(HYBRID, state_dtype="bfloat16")
    assert origin(decide(model=model), "mamba_ssm_dtype") == ("bfloat16", "model", "its mamba_ssm_cache_dtype")
    assert decide(model=model).max_mamba_cache_size == 394
    assert origin(decide(model=model, mamba_ssm_dtype="float32"), "mamba_ssm_dtype") == ("float32", "user", "")
    assert default_state_dtype(None)[0] == "float32"


@pytest.mark.parametrize(("page", "interval"), [(1, 256), (16, 256), (7, 259), (300, 300)])
def test_states_on_the_way_of_an_answer_are_whole_pages_apart(page: int, interval: int) -> None:
    assert origin(decide(model=HYBRID, page_size=page), "mamba_track_interval") == (interval, "default", "")
    assert decide(model=HYBRID, page_size=page, mamba_track_interval=2 * page).mamba_track_interval == 2 * page


def test_a_model_without_attention_gives_all_memory_to_states() -> None:
    model = dataclasses.replace(HYBRID, kv_bytes_per_token={"float32": 0, "bfloat16": 0})
    config = decide(model=model)
    assert origin(config, "max_mamba_cache_size") == (500, "hardware", "10000 bytes each")
    assert origin(config, "max_running_requests") == (256, "default", "")
    assert origin(config, "max_total_tokens") == (256_000, "hardware", "every running request at full length")
    assert decide(model=model, max_total_tokens=10**9).max_total_tokens == 10**9
    with pytest.raises(
        InputError, match=r"mamba_full_memory_ratio: got 0.5; expected no value, since no layer .* keys and values"
    ):
        decide(model=model, mamba_full_memory_ratio=0.5)
    with pytest.raises(InputError, match="max_mamba_cache_size: got 501; expected at least 1 and at most 500"):
        decide(model=model, max_mamba_cache_size=501)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"max_mamba_cache_size": 9, "mamba_full_memory_ratio": 0.5},
            r"^mamba_full_memory_ratio: got 0.5; expected none beside max_mamba_cache_size, which decides already$",
        ),
        (
            {"max_mamba_cache_size": 500},
            r"^max_mamba_cache_size: got 500; expected at least 1 and at most 499, which fit beside the weights and 16 tokens$",
        ),
        ({"max_mamba_cache_size": 0}, "max_mamba_cache_size: got 0; expected at least 1 and at most 499"),
        (
            {"max_mamba_cache_size": 301, "max_total_tokens": 20_000},
            r"max_mamba_cache_size: got 301; expected at least 1 and at most 300, .* the weights and 20000 tokens$",
        ),
        (
            {"max_running_requests": 13, "max_mamba_cache_size": 12},
            r"^max_running_requests: got 13; expected at most 12, .*\. max_mamba_cache_size of up to 499 would fit\.$",
        ),
        (
            {"max_running_requests": 46, "mamba_full_memory_ratio": 0.1},
            r"^max_running_requests: got 46; expected at most 45, .*max_mamba_cache_size of up to 499 would fit\.$",
        ),
        ({"max_running_requests": 500}, r"^max_running_requests: got 500; expected at most 499, each with a recurrent state$"),
        (
            {"mem_fraction_static": 0.1},
            r"^mem_fraction_static: got 0 bytes beside the weights; expected at least 11600, for 16 tokens and the recurrent "
            r"states of one request\. A larger fraction would hold them\.$",
        ),
        (
            {"max_total_tokens": 49_901},
            r"^mem_fraction_static: got 5000000 bytes beside the weights; expected at least 5000100, for 49901 tokens .*"
            r"So would fewer max_total_tokens\.$",
        ),
        (
            {"mamba_track_interval": 24},
            r"^mamba_track_interval: got 24; expected a multiple of the page size 16\. 32 is one\.$",
        ),
    ],
)
def test_states_that_do_not_fit_are_refused_with_what_would(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        decide(model=HYBRID, **values)


def test_the_last_state_that_fits_is_taken() -> None:
    assert decide(model=HYBRID, max_total_tokens=49_900).max_mamba_cache_size == 1
    with pytest.raises(InputError):
        decide(model=HYBRID, max_total_tokens=49_901)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mamba_ssm_dtype", "float32"),
        ("max_mamba_cache_size", 0),
        ("max_mamba_cache_size", 5),
        ("mamba_full_memory_ratio", 0.9),
        ("mamba_track_interval", 256),
    ],
)
@pytest.mark.parametrize("state_bytes", [{}, {("float32", "float32"): 0, ("float32", "bfloat16"): 0}])
def test_a_model_without_states_refuses_what_is_said_of_them(
    name: str, value: Any, state_bytes: dict[tuple[str, str], int]
) -> None:
    words = f"^{name}: got {value}; expected no value, since no layer of this model has a recurrent state$"
    with pytest.raises(InputError, match=words):
        decide(model=dataclasses.replace(MODEL, state_bytes=state_bytes), **{name: value})


def test_a_model_without_states_has_no_slots_for_them() -> None:
    config = decide()
    assert origin(config, "max_mamba_cache_size") == (0, "model", "no layer has a recurrent state")
    assert origin(config, "max_running_requests") == (256, "default", "")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EIGHTFOLD_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("EIGHTFOLD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "eightfold"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "eightfold"
