"""The benchmark of training steps: small models launched in several ways."""

import json
import sys

import pytest

from benchmarks.speed import training_step

pytestmark = pytest.mark.slow


def test_ways_of_launching(monkeypatch, tmp_path):
    monkeypatch.setattr(training_step, "SMALL_MODELS", {256: 64})
    where = ["--device", "cpu", "--out", str(tmp_path)]
    what = ["--launching", "--widths", "256", "--ways", "eager", "--recipes", "nvidia"]
    monkeypatch.setattr(sys, "argv", ["training_step", *where, *what])
    training_step.main()
    (path,) = tmp_path.rglob("training_launching.json")
    result = json.loads(path.read_text())
    times = result["launching"]["256"]["eager"]
    assert set(times) == {"bf16", "nvidia"} and all(0 < seconds < 60 for seconds in times.values())
    text = path.with_suffix(".txt").read_text()
    assert f"{times['nvidia'] / times['bf16']:.2f}" in text and "host time of a linear, nvidia" in text
    assert set(result["host"]) == {"bf16", "nvidia"}
