"""NVFP4AdamW on FSDP2's shards: equal gradients give the codes of one rank on any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import here, on_devices, run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nvfp4_tensor.training import NVFP4AdamW

pytestmark = pytest.mark.slow

ROWS, COLUMNS, STEPS = 37, 48, 3


def make(sharded):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Tanh(), nn.Linear(ROWS, COLUMNS)).bfloat16().to(here())
    return fully_shard(model, mesh=init_device_mesh(here().type, (dist.get_world_size(),))) if sharded else model


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def set_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        grad = torch.randn(p.shape, generator=generator).bfloat16().to(here())
        p.grad = grad
        if isinstance(p, DTensor):
            local = grad.chunk(dist.get_world_size())
            mine = local[dist.get_rank()] if dist.get_rank() < len(local) else grad[:0]
            p.grad = DTensor.from_local(
                mine.contiguous(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )


def run(model, optimizer, first=0):
    for step in range(first, first + STEPS):
        set_gradients(model, step)
        optimizer.step()


def everything(model, optimizer):
    tensors = [whole(p.detach()) for p in model.parameters()]
    for p in model.parameters():
        tensors += [whole(optimizer.state[p][name]) for name in sorted(optimizer.state[p]) if name != "ratio_scale"]
    return tensors


def shards_have_the_codes_of_one_rank():
    alone, sharded = make(False), make(True)
    optimizers = [NVFP4AdamW(model.parameters(), lr=1e-2) for model in (alone, sharded)]
    for model, optimizer in zip((alone, sharded), optimizers, strict=True):
        run(model, optimizer)
    for mine, right in zip(everything(sharded, optimizers[1]), everything(alone, optimizers[0]), strict=True):
        assert torch.equal(mine, right)


@on_devices
def test_shards_have_the_codes_of_one_rank(device):
    run_ranks(shards_have_the_codes_of_one_rank, 2, device=device)


def test_three_shards_have_the_codes_of_one_rank():
    run_ranks(shards_have_the_codes_of_one_rank, 3)


def resumed_from_torchs_state_dict():
    model, again = make(True), make(True)
    optimizer, its = (NVFP4AdamW(m.parameters(), lr=1e-2) for m in (model, again))
    run(model, optimizer)
    again.load_state_dict(model.state_dict())
    set_optimizer_state_dict(again, its, get_optimizer_state_dict(model, optimizer))
    again.load_state_dict(model.state_dict())  # setting the state of a new optimizer makes a step of zeros
    run(model, optimizer, STEPS)
    run(again, its, STEPS)
    for mine, right in zip(everything(again, its), everything(model, optimizer), strict=True):
        assert torch.equal(mine, right)


def test_a_sharded_state_dict_resumes():
    run_ranks(resumed_from_torchs_state_dict, 2)


def steps_inside_the_backward():
    models = make(True), make(True)
    after, inside = (NVFP4AdamW(model.parameters(), lr=1e-2) for model in models)
    inside.step_in_backward()
    for step in range(STEPS):
        x = torch.randn(8, COLUMNS, generator=torch.Generator().manual_seed(step)).bfloat16().to(here())
        for model, optimizer in zip(models, (after, inside), strict=True):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, right in zip(everything(models[1], inside), everything(models[0], after), strict=True):
        assert torch.equal(mine, right)


def test_a_step_inside_fsdps_backward_is_one_after_it():
    run_ranks(steps_inside_the_backward, 2)
