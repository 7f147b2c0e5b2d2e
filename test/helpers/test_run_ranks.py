"""run_ranks returns results in the order of ranks, and raises the error of the rank that failed first."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from helpers.run_ranks import of_all_ranks, on_ranks, run_ranks

pytestmark = pytest.mark.slow


def doubled(value):
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return value * 2, dist.get_rank(), total.item()


@on_ranks(2, 3)
@pytest.mark.parametrize("value", [5])
def test_a_body_runs_on_each_rank(value, tmp_path):
    assert of_all_ranks((value, dist.get_rank())) == [(5, rank) for rank in range(dist.get_world_size())]
    assert tmp_path.exists() and torch.initial_seed() == 0


def one_rank(fails):
    if dist.get_rank() == 1:
        if fails == "closes":  # the other rank raises first
            dist.destroy_process_group()
            time.sleep(0.3)
        if fails != "raises":
            os._exit(1)
        raise ValueError("the message of rank 1")
    dist.barrier()


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("raises", r"rank 1 raised(.|\n)*the message of rank 1"),
        ("dies", "a rank of one_rank died"),
        ("closes", "a rank of one_rank died"),
    ],
)
def test_a_rank_that_fails_fails_its_run_alone(fails, message):
    run_ranks(doubled, 2, 1)  # starts the ranks, which takes a loaded machine long
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        run_ranks(one_rank, 2, fails)
    assert time.monotonic() - start < 19  # less than the timeout of a collective
    assert run_ranks(doubled, 2, 1) == [(2, 0, 1.0), (2, 1, 1.0)]


def hangs():
    time.sleep(1000)


def test_a_run_that_does_not_end_fails():
    with pytest.raises(TimeoutError, match="hangs did not end on 2 ranks"):
        run_ranks(hangs, 2, seconds=1)
    assert run_ranks(doubled, 1, 1) == [(2, 0, 0.0)]
