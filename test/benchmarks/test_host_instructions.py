"""Instructions of small training steps, counted by valgrind where it is installed."""

import shutil
import subprocess
import sys

import pytest

from benchmarks.speed import host_instructions


def test_variants_run():
    runs = host_instructions.variants("nvidia", 16)
    assert list(runs) == host_instructions.COLUMNS
    y = runs["forward"]()
    for name in ("step", "step, computed"):
        assert [tuple(gradient.shape) for gradient in runs[name]()] == [(16, 16), (16, 16)]
    assert y.shape == (16, 16)


@pytest.mark.skipif(shutil.which("valgrind") is not None, reason="valgrind is installed")
def test_without_valgrind_it_says_so():
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.host_instructions"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2 and "valgrind is not installed" in run.stderr
