from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, GPT2Tokenizer

from eightfold.errors import CheckpointError
from eightfold.hub.gguf_folder import check_converter, convert
from eightfold.models.arch import DecoderArch
from eightfold.models.checkpoint import Checkpoint
from eightfold.models.loader import read_model
from tests.hub import gguf_files


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    convert(gguf_files.write(root / "tiny.gguf", gguf_files.tensors()), root / "model")
    return root / "model"


def test_tensors_are_those_of_the_transformers_loader(converted: Path) -> None:
    ours = AutoModelForCausalLM.from_pretrained(converted).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(
        converted.parent, gguf_file="tiny.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    ).state_dict()
    assert set(ours) == set(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_values_are_the_dequantized_ones_in_bf16(converted: Path) -> None:
    weight = gguf_files.tensors()["blk.1.ffn_down.weight"]
    stored = gguf.quantize(weight, gguf.GGMLQuantizationType.Q4_1)
    expected = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType.Q4_1)).bfloat16()
    actual = load_file(converted / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, expected)


def test_rows_of_q_go_from_pairs_to_halves(tmp_path: Path) -> None:
    weights = gguf_files.tensors()
    rows = np.arange(gguf_files.HEADS * gguf_files.HEAD_DIM, dtype=np.float32)
    weights["blk.0.attn_q.weight"] = np.repeat(rows[:, None], gguf_files.HIDDEN, axis=1)
    convert(gguf_files.write(tmp_path / "tiny.gguf", weights), tmp_path / "model")
    head = load_file(tmp_path / "model/model.safetensors")["model.layers.0.self_attn.q_proj.weight"][8:16, 0]
    assert head.tolist() == [8, 10, 12, 14, 9, 11, 13, 15]


def test_config_says_everything_that_the_model_needs(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": gguf_files.HIDDEN,
        "intermediate_size": gguf_files.WIDTH,
        "num_hidden_layers": gguf_files.LAYERS,
        "num_attention_heads": gguf_files.HEADS,
        "num_key_value_heads": gguf_files.KV_HEADS,
        "head_dim": gguf_files.HEAD_DIM,
        "vocab_size": len(gguf_files.tokens()),
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


def test_our_own_reader_takes_the_folder(converted: Path) -> None:
    arch = read_model(converted).arch
    assert isinstance(arch, DecoderArch)
    assert arch.num_heads == gguf_files.HEADS
    assert len(Checkpoint(converted).tensors) == len(gguf_files.tensors())


def test_an_output_head_unties_the_embedding(tmp_path: Path) -> None:
    convert(gguf_files.write(tmp_path / "tiny.gguf", gguf_files.tensors(tied=False)), tmp_path / "model")
    assert json.loads((tmp_path / "model/config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(tmp_path / "model/model.safetensors")


def test_tokenizer_merges_words_and_splits_digits(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    ids = tokenizer("hello hello 12<|im_end|><note>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["hello", "Ġhello", "Ġ", "1", "2", "<|im_end|>", "<note>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello hello 12<note>"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def test_tokenizer_round_trips_any_text(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    generator = random.Random(0)
    for _ in range(50):
        text = "".join(chr(generator.choice([*range(1, 0x300), *range(0x4E00, 0x4E40), 0x1F389])) for _ in range(40))
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_is_the_file_s(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|im_start|>hi<|im_end|>"


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    convert(
        gguf_files.write(tmp_path / "tiny.gguf", gguf_files.tensors()), tmp_path / "model", lambda *call: calls.append(call)
    )
    total = len(gguf_files.tensors())
    assert calls == [("convert", done + 1, total) for done in range(total)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"arch": "qwen2"}, "general.architecture"),
        ({"tokenizer__ggml__pre": "llama-bpe"}, "tokenizer.ggml.pre"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model"),
        ({"tokenizer__ggml__add_bos_token": True}, "tokenizer.ggml.add_bos_token"),
        ({"llama__rope__dimension_count": 4}, "llama.rope.dimension_count"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type"),
        ({"llama__context_length": None}, "llama.context_length"),
    ],
)
def test_what_is_not_converted_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.tensors(), **changes)
    with pytest.raises(CheckpointError, match=named):
        convert(file, tmp_path / "model")


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    weights = {"blk.0.ffn_gate_exps.weight": np.ones((32, 32), dtype=np.float32)}
    with pytest.raises(CheckpointError, match="ffn_gate_exps"):
        convert(gguf_files.write(tmp_path / "tiny.gguf", weights), tmp_path / "model")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"not a GGUF file at all")
    with pytest.raises(CheckpointError, match="a GGUF file"):
        convert(tmp_path / "tiny.gguf", tmp_path / "model")


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    check_converter()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"eightfold\[demo\]"):
        check_converter()


def test_smollm2_is_whole_and_speaks(smollm2_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path)
    assert len(Checkpoint(smollm2_path).tensors) == 272
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False), return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True) == "The capital of France is Paris."


def test_smollm2_tokenizes_like_byte_level_bpe_after_digits(smollm2_path: Path) -> None:
    """Against the GPT-2 tokenizer over the same tables: without digits, both are plain byte-level BPE."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    state = json.loads((smollm2_path / "tokenizer.json").read_text())["model"]
    merges: list[Any] = [tuple(merge) for merge in state["merges"]]
    plain = GPT2Tokenizer(vocab=state["vocab"], merges=merges)
    for text in ("naïve café — “quotes” 中文 🎉", "def f(x):\n\treturn x\r\n\n    y", "I'm  DON'T  "):
        assert tokenizer(text).input_ids == plain(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    digits = tokenizer.convert_ids_to_tokens(tokenizer("in 1984, 3.14").input_ids)
    assert digits == ["in", "Ġ", "1", "9", "8", "4", ",", "Ġ", "3", ".", "1", "4"]
