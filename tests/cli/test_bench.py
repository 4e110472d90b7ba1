"""`eightfold bench serve` from the command line: table, JSON last, files, refusals, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eightfold.cli import main
from tests.openai_stub import Plan, Stub, stub_server


@pytest.fixture
def stub() -> Iterator[Stub]:
    with stub_server() as server:
        yield server


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text(" ".join(f"word{number}" for number in range(500)))
    return str(file)


def test_a_table_then_one_json_line_and_the_files(
    stub: Stub, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture, saved = tmp_path / "a.png", tmp_path / "a.json"
    words = ["--base-url", stub.url, "--text", text, "--num-prompts", "5", "--max-concurrency", "2", "--input-len", "30"]
    further = ["--output-len", "3", "--goodput", "ttft:5000", "itl:5000", "--plot", str(picture), "--save-result", str(saved)]
    assert main(["bench", "serve", *words, *further]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"openai-chat at {stub.url}, model stub"
    assert any(line.split() == ["requests", "completed", "5"] for line in lines)
    result = json.loads(lines[-1])
    assert (result["benchmark"], result["completed"], result["failed"]) == ("serve", 5, 0)
    assert result["goodput_limits_ms"] == {"ttft": 5000, "itl": 5000}
    assert result["request_goodput"] == result["request_throughput"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(saved.read_text())
    assert record["output_lens"] == [3] * 5
    assert record["mean_ttft_ms"] == result["mean_ttft_ms"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ttft:5"], "ttft:5: got a word without a flag; expected flags alone, or limits after --goodput"),
        (["--extra-body", "[1]"], '--extra-body: got [1]; expected a JSON object, such as {"top_k": 20}'),
        (["--text", "/gone/text"], "--text: got [Errno 2]"),
        (["--base-url", "nowhere"], "--base-url: got nowhere; expected a URL such as http://127.0.0.1:30000"),
        (
            ["--base-url", "http://a:1", "--port", "9"],
            "--base-url: got http://a:1, and --host or --port beside it; expected one",
        ),
        (["--goodput", "speed:5"], "goodput metric speed: got an unknown name"),
        (["--input-len", "0"], "--input-len: got 0; expected at least 1"),
    ],
)
def test_refusals(words: list[str], message: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = [] if "--text" in words else ["--text", text]
    assert main(["bench", "serve", *words, *source]) == 2
    assert capsys.readouterr().err.startswith(f"eightfold: {message}")


def test_the_address_may_come_as_host_and_port(stub: Stub, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    host, port = stub.url.removeprefix("http://").split(":")
    words = ["--host", host, "--port", port, "--text", text, "--num-prompts", "1", "--input-len", "9", "--output-len", "2"]
    assert main(["bench", "serve", *words]) == 0
    assert capsys.readouterr().out.startswith(f"openai-chat at {stub.url}, ")


def test_the_group_lists_its_commands_and_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main(["bench", "serv"]) == 2
    assert "Did you mean serve?" in capsys.readouterr().err


def test_an_interrupt_prints_what_was_measured(stub: Stub, text: str) -> None:
    gate = threading.Event()
    count = iter(range(100))
    stub.plan = lambda request: Plan(wait=gate if request.body.get("stream") and next(count) >= 2 else None)
    words = ["bench", "serve", "--base-url", stub.url, "--text", text, "--max-concurrency", "1", "--num-warmups", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "eightfold", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "error"},
    )
    try:
        deadline = time.monotonic() + 60
        while sum(bool(request.body.get("stream")) for request in stub.requests) < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    result = json.loads(out.splitlines()[-1])
    assert (result["completed"], result["unfinished"], result["interrupted"]) == (2, 1, True)
    assert "Interrupted: 1 requests were under way" in err
    assert process.returncode == 130
