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
    refuse_unknown,
    resolve,
)
from eightfold.errors import InputError

MODEL = ModelFacts(context_length=1000, weight_bytes=1_000_000, kv_bytes_per_token={"float32": 100, "bfloat16": 50})
CPU = HardwareFacts("cpu", "a CPU", 10_000_000)
CUDA = HardwareFacts("cuda", "a GPU", 10_000_000)


def decide(hardware: HardwareFacts = CPU, **values: Any) -> ResolvedConfig:
    return resolve(EngineConfig(model="m", **values), MODEL, hardware)


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
        *(("attention_backend", value) for value in ("", 3)),
        *(("context_length", value) for value in (0, -1, 1.5, True, "5")),
        *(("max_running_requests", value) for value in (0, "5")),
        *(("max_total_tokens", value) for value in (0, 1.0)),
        *(("mem_fraction_static", value) for value in (0, 1.1, math.nan, True, "half")),
        *(("chunked_prefill_size", value) for value in (0, -1)),
        *(("page_size", value) for value in (0, True)),
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
    assert undecided == {"revision", "quantization", "load_format", "fp8_gemm_backend", "attention_backend"}
    kinds = {origin.name: origin.kind for origin in config.origins}
    assert (kinds["seed"], kinds["context_length"], kinds["dtype"], kinds["page_size"]) == (
        "user",
        "model",
        "hardware",
        "default",
    )
    assert config.chunked_prefill_size == DEFAULT_CHUNKED_PREFILL_SIZE
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


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EIGHTFOLD_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("EIGHTFOLD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "eightfold"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "eightfold"
