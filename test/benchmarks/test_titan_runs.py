"""Runs of torchtitan by their logs."""

import pytest

from benchmarks.speed import titan_runs

pytestmark = pytest.mark.slow

LINE = (
    "\x1b[31mstep: {:2}  \x1b[32mloss: {:8.5f}  grad_norm:  1.5000  "
    "memory: {:5.2f}GiB(9.00%)  \x1b[34mtps: {:,}  mfu: N/A"
)


def test_steps_are_read_once_in_their_order():
    lines = [LINE.format(2, 4.5, 20.5, 16_000), LINE.format(1, 12.25, 20.25, 9), LINE.format(1, 12.25, 20.0, 8)]
    first, second = titan_runs.steps_of("\n".join(lines))
    assert first == {"step": 1, "loss": 12.25, "grad_norm": 1.5, "memory_gib": 20.25, "tokens_a_second": 9}
    assert second == {"step": 2, "loss": 4.5, "grad_norm": 1.5, "memory_gib": 20.5, "tokens_a_second": 16_000}


def test_a_part_of_a_run_is_summed_up():
    lines = [LINE.format(step, 10.0 - step, 20.0 + step, 1000 * step) for step in range(1, 10)]
    part = titan_runs.summary(titan_runs.steps_of("\n".join(lines)), 6000, 3, 9)
    assert (part["tokens_a_second"], part["seconds"], part["memory_gib"]) == (6000, 1.0, 29.0)
    assert part["loss"] == 3.0  # of steps 5 to 9


@pytest.mark.parametrize(("log", "part"), [("nothing", (1, 2)), (LINE.format(1, 2.0, 3.0, 4), (5, 6))])
def test_a_log_without_its_steps_is_refused(log, part):
    with pytest.raises(ValueError, match=r"no (line of the log is torchtitan's|step from 5 to 6)"):
        titan_runs.summary(titan_runs.steps_of(log), 1, *part)
