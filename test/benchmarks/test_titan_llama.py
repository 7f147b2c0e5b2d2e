"""The Llamas for torchtitan's command line: their text, what is read from a log, and a run on CPU ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
titan = pytest.importorskip("benchmarks.speed.titan_llama")
from nvfp4_tensor.integrations.torchtitan import NVFP4Linear  # noqa: E402

LINE = (
    "\x1b[31mstep: {:2}  \x1b[32mloss: {:8.5f}  grad_norm:  1.5000  "
    "memory: {:5.2f}GiB(9.00%)  \x1b[34mtps: {:,}  mfu: N/A"
)
ROOT = Path(__file__).parents[2]


def test_steps_are_read_once_in_their_order():
    lines = [LINE.format(2, 4.5, 20.5, 16_000), LINE.format(1, 12.25, 20.25, 9), LINE.format(1, 12.25, 20.0, 8)]
    first, second = titan.steps_of("\n".join(lines))
    assert first == {"step": 1, "loss": 12.25, "grad_norm": 1.5, "memory_gib": 20.25, "tokens_a_second": 9}
    assert second == {"step": 2, "loss": 4.5, "grad_norm": 1.5, "memory_gib": 20.5, "tokens_a_second": 16_000}


def test_a_part_of_a_run_is_summed_up():
    lines = [LINE.format(step, 10.0 - step, 20.0 + step, 1000 * step) for step in range(1, 10)]
    part = titan.summary(titan.steps_of("\n".join(lines)), 6000, 3, 9)
    assert (part["tokens_a_second"], part["seconds"], part["memory_gib"]) == (6000, 1.0, 29.0)
    assert part["loss"] == 3.0  # of steps 5 to 9


@pytest.mark.parametrize(("log", "part"), [("nothing", (1, 2)), (LINE.format(1, 2.0, 3.0, 4), (5, 6))])
def test_a_log_without_its_steps_is_refused(log, part):
    with pytest.raises(ValueError, match=r"no (line of the log is torchtitan's|step from 5 to 6)"):
        titan.summary(titan.steps_of(log), 1, *part)


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
    return titan.steps_of(said)
