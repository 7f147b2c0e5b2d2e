"""run_ranks returns results in the order of ranks, and raises the error of the rank that failed first."""

import time

import pytest
import torch
import torch.distributed as dist

from helpers.run_ranks import run_ranks

pytestmark = pytest.mark.slow


def doubled(value):
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return value * 2, dist.get_rank(), total.item()


def test_results_by_rank():
    assert run_ranks(doubled, 3, 4) == [(8, 0, 3.0), (8, 1, 3.0), (8, 2, 3.0)]


def one_rank_fails():
    if dist.get_rank() == 1:
        raise ValueError("the message of rank 1")
    dist.barrier()


def test_a_rank_that_fails_fails_the_run_with_its_own_message():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 raised(.|\n)*the message of rank 1"):
        run_ranks(one_rank_fails, 2)
    assert time.monotonic() - start < 19  # less than the timeout of a collective
