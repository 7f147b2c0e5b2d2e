"""Pre-training over ranks: the same losses on one and on two, and after a resumption on another number of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.run_ranks import TWO_GPUS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = ["--length", "64", "--limit", "2000000", "--print-every", "1", "--timeout", "60"]


def losses(folder, *arguments, device="cpu"):
    """By step, as a run of the tutorial prints them."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = ROOT / "tutorials" / "pretrain_fsdp.py"
    command = [sys.executable, script, *SMALL, "--output", folder, *arguments, *(["--cpu"] if device == "cpu" else [])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+) on", result.stdout)}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def test_two_ranks_and_one_have_the_same_losses_before_and_after_a_resumption(device, tmp_path):
    begun = losses(tmp_path / "a", "--steps", "4", "--ranks", "2", device=device)
    resumed = losses(tmp_path / "a", "--steps", "7", "--ranks", "1", "--resume", device=device)
    whole = losses(tmp_path / "b", "--steps", "7", "--ranks", "1", device=device)
    assert list(begun) == [1, 2, 3, 4] and list(resumed) == [5, 6, 7]
    assert begun[1] == pytest.approx(whole[1], abs=1e-4)
    # Sums come in another order, and AdamW's first steps are as large for gradients near zero as for others.
    assert {**begun, **resumed} == pytest.approx(whole, rel=2e-3)
    assert whole[7] < whole[1] - 0.3


def test_what_the_command_line_refuses(tmp_path):
    with pytest.raises(AssertionError, match="does not divide over 3 ranks"):
        losses(tmp_path, "--ranks", "3")
    with pytest.raises(AssertionError, match="holds no checkpoint: leave out --resume"):
        losses(tmp_path, "--resume")
