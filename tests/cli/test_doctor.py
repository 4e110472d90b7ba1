"""`eightfold doctor` on this machine."""

from __future__ import annotations

import json

import pytest

from eightfold import __version__
from eightfold.cli import main


def test_doctor_shows_versions_and_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["eightfold"] == __version__
    assert facts["native"]
    (cpu,) = (device for device in facts["devices"] if device["device"] == "cpu")
    assert {"operation": "linear mxfp8", "backend": "reference", "declined": None} in cpu["backends"]
    shown = {item["operation"] for item in cpu["backends"]}
    assert shown >= {"experts mxfp8", "gated experts mxfp8", "low latency mxfp8", "attention", "mamba2", "fused"}
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "native library: " in out
    assert all(item["declined"] is None or item["declined"] in out for item in cpu["backends"])
