"""What is measured, and beside what."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from eightfold.benchmarks.offline import bandwidth_of, check_profile, engines, random_prompts, trace_file, variants
from eightfold.config import EngineConfig
from eightfold.errors import InputError
from eightfold.layers.embedding import OutputHead
from tests.models.checkpoints import VOCAB_SIZE, case, save_checkpoint, save_config


def dummy(folder: Path, **options: object) -> EngineConfig:
    save_config(case("llama-gqa"), folder)
    values = {"model": str(folder), "load_format": "dummy", "max_total_tokens": 64} | options
    return EngineConfig(**values)  # type: ignore[arg-type]


def test_both_weights_and_what_is_said_of_quantizing_goes_to_one(tmp_path: Path) -> None:
    bf16, mxfp8 = variants(
        dummy(tmp_path, quantization="mxfp8", quantize_lm_head=True, fp8_gemm_backend="cpu", scale_rule="floor")
    )
    assert (bf16.name, bf16.config.quantization, bf16.config.fp8_gemm_backend) == ("bf16", None, "auto")
    assert (mxfp8.name, mxfp8.config.quantize_lm_head, mxfp8.config.fp8_gemm_backend) == ("mxfp8", True, "cpu")
    assert (bf16.config.scale_rule, mxfp8.config.scale_rule) == ("ceil", "floor")
    assert [item.name for item in variants(dummy(tmp_path), "mxfp8")] == ["mxfp8"]
    with pytest.raises(InputError, match="--only: got fp4; expected bf16 or mxfp8"):
        variants(dummy(tmp_path), "fp4")


def test_a_checkpoint_that_is_quantized_already_is_measured_as_it_is(tmp_path: Path) -> None:
    folder = save_checkpoint(case("llama-gqa"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    form = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form}))
    (only,) = variants(EngineConfig(model=str(folder)))
    assert (only.name, only.config.quantization) == ("mxfp8", None)


def test_one_engine_is_gone_before_the_next_is_there(tmp_path: Path) -> None:
    found = engines(variants(dummy(tmp_path)), None)
    name, engine = next(found)
    first = weakref.ref(engine)
    del engine
    assert (name, next(found)[0]) == ("bf16", "mxfp8")
    assert first() is None


def test_an_engine_that_answers_nonsense_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutputHead, "__call__", lambda self, hidden: torch.full((len(hidden), VOCAB_SIZE), torch.nan))
    with pytest.raises(RuntimeError, match="its speed means nothing"):
        next(engines(variants(dummy(tmp_path)), None))


def test_the_bandwidth_is_that_of_memory() -> None:
    assert 1e8 < bandwidth_of(torch.device("cpu")) < 1e12


def test_prompts_have_their_length_and_differ() -> None:
    one, other = random_prompts(2, 9, 97, np.random.default_rng(0))
    assert len(one) == len(other) == 9
    assert one != other
    assert all(0 <= token < 97 for token in one + other)


def test_traces_have_names_of_their_own(tmp_path: Path) -> None:
    assert trace_file(tmp_path / "a.json", ("mxfp8", "64"), is_only=False) == tmp_path / "a-mxfp8-64.json"
    assert trace_file(tmp_path / "a.json", ("mxfp8", "64"), is_only=True) == tmp_path / "a.json"
    check_profile(tmp_path / "a.json")
    with pytest.raises(InputError, match=r"--profile: got .*nowhere.*a\.json; expected a file in a folder that is there"):
        check_profile(tmp_path / "nowhere" / "a.json")
