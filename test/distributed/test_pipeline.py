"""Pipeline parallelism: stages on ranks have the losses, gradients and random bits of one process."""

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import here, on_ranks
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torchao.quantization import quantize_

from nvfp4_tensor import distributed
from nvfp4_tensor.training import NVFP4TrainingConfig

pytestmark = pytest.mark.slow

WIDTH, MICROBATCHES, STEPS = 64, 4, 2


def make(recipe):
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH)) for _ in range(3)]
    model = nn.Sequential(*blocks).to(here()).bfloat16()
    quantize_(model, NVFP4TrainingConfig(recipe))
    distributed.seed_rounding(model, seed=5)
    return model


def loss_of(y, target):
    return (y.float() - target).square().mean()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32 * MICROBATCHES, WIDTH, generator=generator)
    return x.bfloat16().to(here()), torch.randn(len(x), WIDTH, generator=generator).to(here())


def alone(recipe, numbered=True):
    """Losses of the micro-batches, and parameters, of one process."""
    model, losses = make(recipe), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for i, (x, target) in enumerate(zip(*(t.chunk(MICROBATCHES) for t in batch(step)), strict=True)):
            distributed.set_step(model, step * MICROBATCHES + i * numbered)
            loss = loss_of(model(x), target)
            loss.backward()
            losses.append(loss.item())
        for p in model.parameters():
            p.grad /= MICROBATCHES  # as schedules do
        optimizer.step()
        optimizer.zero_grad()
    return losses, list(model.parameters())


def staged(schedule, recipe):
    rank, world = dist.get_rank(), dist.get_world_size()
    model, losses = make(recipe), []
    mine = model[rank : rank + 1] if world == 3 else (model[:1], model[1:])[rank]
    stage = distributed.NVFP4PipelineStage(mine, rank, world, here())
    runs = schedule(stage, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    for step in range(STEPS):
        stage.first_step = step * MICROBATCHES
        x, target = batch(step)
        of_step = []
        runs.step(*([x] if rank == 0 else []), **({"target": target, "losses": of_step} if rank == world - 1 else {}))
        losses += [loss.item() for loss in of_step]
        optimizer.step()
        optimizer.zero_grad()
    expected, parameters = alone(recipe)
    ours = {id(p) for p in mine.parameters()}
    theirs = [theirs for p, theirs in zip(model.parameters(), parameters, strict=True) if id(p) in ours]
    assert all(map(torch.equal, mine.parameters(), theirs)) and len(theirs) == len(ours)
    assert losses == (expected if rank == world - 1 else [])
    assert alone(recipe, numbered=False)[0] != expected


@on_ranks(2, cuda=True)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_stages_are_one_process(schedule):
    staged(schedule, "unbiased")


@on_ranks(3)
def test_three_stages():
    staged(Schedule1F1B, "nvidia")
