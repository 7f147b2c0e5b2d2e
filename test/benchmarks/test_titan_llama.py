"""The Llamas for torchtitan's command line: their text, and a run on CPU ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)  # 0.3 needs torch 2.13
titan = pytest.importorskip("benchmarks.speed.titan_llama", exc_type=ImportError)
from benchmarks.speed.titan_runs import steps_of  # noqa: E402
from nvfp4_tensor.integrations.torchtitan import NVFP4Linear  # noqa: E402

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_text_is_the_librarys(tmp_path):
    for name, text in (("a.py", "x = 1\n"), ("site-packages/b.py", "no"), ("c.py", "y = 2\n"), ("d.txt", "no")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert sorted(titan._library(str(tmp_path))["text"]) == ["x = 1\n", "y = 2\n"]


def test_configs_are_those_of_their_size():
    config = titan.llama_1b()
    assert len(config.model_spec.model.layers) == 16 and config.loss.global_vocab_size == 128256
    assert (config.training.local_batch_size, config.training.seq_len, config.bf16_forward_from) == (4, 4096, 0)


@pytest.mark.slow
def test_trains_on_cpu_ranks_and_goes_back_to_bf16(tmp_path):
    """Until the switch the losses are those of a run without it; at it they differ."""
    override = f'{NVFP4Linear.__module__}.nvfp4_linear={{"recipe":"nvidia"}}'
    runs = [_trained("--override.imports", override, "--bf16_forward_from", str(step)) for step in (0, 4)]
    never, late = ([row["loss"] for row in run] for run in runs)
    assert len(never) == 6 and never[0] > 7 and never[-1] < never[0] - 2
    assert late[:3] == never[:3] and late[3] != never[3]
    assert abs(late[-1] - never[-1]) < 0.1 * never[-1]


def _trained(*arguments: str) -> list[dict[str, float]]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(ROOT / "test/integrations/titan_on_cpu.py"), "--module", "benchmarks.speed.titan_llama"),
        *("--config", "llama_debug", *arguments),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "test"), str(ROOT), *sys.path])}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    return steps_of(said)
