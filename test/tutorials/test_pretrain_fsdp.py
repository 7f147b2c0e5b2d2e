"""Pre-training over ranks: the same losses on one and on two, and after a resumption on another number of them."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.run_ranks import TWO_GPUS

pytestmark = pytest.mark.slow

TUTORIAL = Path(__file__).parents[2] / "tutorials/pretrain_fsdp.py"
SMALL = ["--length", "64", "--limit", "2000000", "--print-every", "1", "--timeout", "60"]


@pytest.fixture
def tutorial(monkeypatch):
    monkeypatch.syspath_prepend(TUTORIAL.parent)
    return runpy.run_path(str(TUTORIAL))


def losses_in(printed):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+) on", printed)}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def test_two_ranks_and_one_have_the_same_losses_before_and_after_a_resumption(
    device, tutorial, tmp_path, monkeypatch, capsys
):
    """Two ranks by the command line, one in this process."""
    small = [*SMALL, *(["--cpu"] if device == "cpu" else [])]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    path = os.pathsep.join([str(TUTORIAL.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, TUTORIAL, *small, "--output", tmp_path / "a", "--steps", "3", "--ranks", "2"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    begun = losses_in(done.stdout)

    def alone(folder, *more):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            where = {"MASTER_ADDR": "localhost", "MASTER_PORT": free.getsockname()[1]}
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, **where}.items():
            monkeypatch.setenv(name, str(value))
        tutorial["train"](tutorial["parse"]([*small, "--output", str(folder), "--steps", "5", *more]))
        return losses_in(capsys.readouterr().out)

    resumed, whole = alone(tmp_path / "a", "--resume"), alone(tmp_path / "b")
    assert list(begun) == [1, 2, 3] and list(resumed) == [4, 5]
    assert begun[1] == pytest.approx(whole[1], abs=1e-4)
    # Sums come in another order, and AdamW's first steps are as large for gradients near zero as for others.
    assert {**begun, **resumed} == pytest.approx(whole, rel=2e-3)
    assert whole[5] < whole[1] - 0.2
