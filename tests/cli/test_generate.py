"""`eightfold generate` over a tiny checkpoint."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from eightfold.cli import BAD_INPUT, main
from eightfold.llm import LLM
from eightfold.types import SamplingParams
from tests.tiny_tokenizer import save_text_checkpoint

SMALL = ("--max-total-tokens", "1024", "--temperature", "0", "--max-tokens", "4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_generate_streams_one_prompt(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(checkpoint), "hello", *SMALL]) == 0
    (expected,) = LLM(checkpoint).generate("hello", SamplingParams(temperature=0.0, max_tokens=4))
    assert capsys.readouterr() == (expected.text + "\n", "")


def test_what_was_decided_is_shown_where_asked_for(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(checkpoint), "hello", "--verbose", *SMALL]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert ["max_total_tokens", "1024", "user"] in [line.split() for line in lines]
    assert any(line.startswith("dtype") and "hardware:" in line for line in lines)


def test_generate_reads_files_and_stdin(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n\nworld\n")
    assert main(["generate", str(checkpoint), "--input", str(file), "--json", *SMALL]) == 0
    from_file = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nworld\n"))
    assert main(["generate", str(checkpoint), "--input", "-", "--json", *SMALL]) == 0
    from_stdin = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["prompt"] for record in from_file] == ["hello", "world"]
    assert [record["completions"] for record in from_file] == [record["completions"] for record in from_stdin]
    assert all(len(record["completions"][0]["token_ids"]) <= 4 for record in from_file)


def test_generate_labels_several_answers(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(checkpoint), "hello", "world", "--n", "2", *SMALL]) == 0
    out = capsys.readouterr().out
    assert all(label in out for label in ("[1.1] hello", "[1.2] hello", "[2.1] world", "[2.2] world"))


def test_a_file_that_is_no_text_is_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(b"\xff\xfe")
    assert main(["generate", str(checkpoint), "--input", str(file)]) == BAD_INPUT
    assert "UTF-8" in capsys.readouterr().err


def request_line(custom_id: str, **body: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def test_generate_answers_a_batch(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "batch.jsonl"
    good = request_line("a", prompt="hel\u2028lo", max_tokens=4, temperature=0, model=str(checkpoint))
    file.write_text(f"{good}\n\n{request_line('b', prompt='hello', n=0)}\n", encoding="utf-8")
    assert main(["generate", str(checkpoint), "--input", str(file), "--max-total-tokens", "1024"]) == 0
    out, err = capsys.readouterr()
    first, second = (json.loads(line) for line in out.splitlines())
    (expected,) = LLM(checkpoint).generate("hel\u2028lo", SamplingParams(temperature=0.0, max_tokens=4))
    assert first["custom_id"] == "a"
    assert first["response"]["body"]["choices"][0]["text"] == expected.text
    assert second["response"]["body"]["error"]["param"] == "n"
    assert err == "1 of 2 requests were refused; their lines say why\n"


@pytest.mark.parametrize("others", [("--temperature", "0"), ("hello",), ("--json",)])
def test_a_batch_stands_alone(
    others: tuple[str, ...], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "batch.jsonl"
    file.write_text(request_line("a", prompt="hello"))
    assert main(["generate", str(checkpoint), *others, "--input", str(file)]) == BAD_INPUT
    assert "--input: got a batch, and" in capsys.readouterr().err
