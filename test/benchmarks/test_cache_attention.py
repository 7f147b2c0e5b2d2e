"""The benchmark of attention to a cache in NVFP4, on a short context."""

import json
import sys

import torch
from helpers.instruction_sets import needs_library

from benchmarks.speed import cache_attention


@needs_library
def test_what_is_compared(monkeypatch, tmp_path):
    threads = torch.get_num_threads()
    command = ["", "--heads", "smollm2", "--tokens", "300", "--layers", "2", "--rounds", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--threads", "1"])
    try:
        cache_attention.main()
    finally:
        torch.set_num_threads(threads)
    (path,) = tmp_path.rglob("cache_attention.json")
    ours, gqa, rows = json.loads(path.read_text())["heads"]["smollm2"]
    assert ours["MB"] < rows["MB"] == gqa["MB"] == 2 * 3 * 300 * 64 * 2 / 1e6
    # The error of 4 bits in keys and values, averaged over the 172 tokens in codes, and none beyond.
    assert 0.01 < ours["difference"] < 0.3 and gqa["difference"] < 0.02 and rows["difference"] == 0
