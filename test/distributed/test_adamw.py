"""NVFP4AdamW on FSDP2's shards: equal gradients give the codes of one rank on any number of ranks."""

import pytest
import torch
from helpers.bits import stored_bits
from helpers.run_ranks import here, mesh_of_all, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from nvfp4_tensor.training import NVFP4AdamW, to_nvfp4_parameters

pytestmark = pytest.mark.slow

ROWS, COLUMNS, STEPS = 37, 48, 3


def make(sharded, codes=False):
    torch.manual_seed(1)
    rows = 36 if codes else ROWS  # FSDP2 gathers NVFP4 weights in equal shards
    model = nn.Sequential(nn.Linear(COLUMNS, rows), nn.Tanh(), nn.Linear(rows, COLUMNS)).bfloat16().to(here())
    if codes:
        with torch.no_grad():
            model[0].weight[-1] *= 20  # so that only the last rank has the largest scale
        to_nvfp4_parameters(model)
    return fully_shard(model, mesh=mesh_of_all()) if sharded else model


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def set_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(here())
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements)


def run(model, optimizer, first=0):
    for step in range(first, first + STEPS):
        set_gradients(model, step)
        optimizer.step()


def everything(model, optimizer):
    """The bits of all parameters and moments."""
    states = [state[name] for state in map(optimizer.state.get, model.parameters()) for name in sorted(state)]
    return [stored_bits(whole(torch.as_tensor(t).detach()).clone()) for t in (*model.parameters(), *states)]


def assert_equal(mine, right):
    """Of models and their optimizers."""
    assert all(map(torch.equal, everything(*mine), everything(*right)))


@on_ranks(2, 3, cuda=True)
@pytest.mark.parametrize("codes", [False, True], ids=["bfloat16", "NVFP4"])
def test_shards_have_the_codes_of_one_rank(codes):
    alone, sharded = make(False, codes), make(True, codes)
    optimizers = [NVFP4AdamW(model.parameters(), lr=1e-2) for model in (alone, sharded)]
    for model, optimizer in zip((alone, sharded), optimizers, strict=True):
        run(model, optimizer)
    assert_equal((sharded, optimizers[1]), (alone, optimizers[0]))
    x = torch.ones(2, COLUMNS, dtype=torch.bfloat16, device=here())
    assert torch.equal(sharded(x), alone(x))  # what FSDP2 gathers is what was written


def stepped_inside(codes, steps, **clip):
    """(model, optimizer) of one rank with the whole batch, and of shards, which have the same losses."""
    pairs = [(model, NVFP4AdamW(model.parameters(), lr=1e-2)) for model in (make(False, codes), make(True, codes))]
    for _, optimizer in pairs:
        optimizer.step_in_backward(**clip)
    for step in range(steps):
        x = torch.randn(8, COLUMNS, generator=torch.Generator().manual_seed(step)).bfloat16().to(here())
        losses = []
        for model, optimizer in pairs:
            losses.append(model(x).float().square().mean())
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(*losses)
    return pairs


@on_ranks(2)
@pytest.mark.parametrize("codes", [False, True], ids=["bfloat16", "NVFP4"])
def test_steps_inside_the_backward_of_shards_are_those_of_one_rank(codes):
    """Codes are, and norms are those of all shards."""
    alone, sharded = stepped_inside(codes, STEPS, clip_norm=1e9)
    assert_equal(sharded, alone)
    norms = [optimizer.state_dict()["param_groups"][0]["late_norm"] for _, optimizer in (alone, sharded)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    pairs = stepped_inside(codes, 1, clip_norm=1e-3, clip="parameter")
    one, other = (whole(optimizer.state[model[0].bias]["exp_avg"]) for model, optimizer in pairs)
    torch.testing.assert_close(other, one, rtol=1e-4, atol=0)
    assert one.norm() == pytest.approx(1e-4, rel=1e-2)  # the gradient's clipped norm times 1 - beta1


@on_ranks(2)
@pytest.mark.parametrize("codes", [False, True], ids=["bfloat16", "NVFP4"])
def test_a_sharded_state_dict_resumes(codes):
    model, again = make(True, codes), make(True, codes)
    optimizer, its = (NVFP4AdamW(m.parameters(), lr=1e-2) for m in (model, again))
    run(model, optimizer)
    again.load_state_dict(model.state_dict())
    set_optimizer_state_dict(again, its, get_optimizer_state_dict(model, optimizer))
    run(model, optimizer, STEPS)
    run(again, its, STEPS)
    assert_equal((again, its), (model, optimizer))


@on_ranks(3)
def test_uneven_shards_are_refused_on_every_rank():
    """Otherwise only the last one stops, and the others wait for it in the next forward."""
    layer = nn.Linear(COLUMNS, 64, bias=False).bfloat16()
    to_nvfp4_parameters(layer)
    with pytest.raises(ValueError, match="has 64 rows, which 3 ranks cannot share evenly: pad them to 66"):
        NVFP4AdamW(fully_shard(layer, mesh=mesh_of_all()).parameters(), lr=1e-2)


@on_ranks(2)
@pytest.mark.parametrize("unused", [False, True])
def test_a_step_inside_ddps_backward_is_refused(unused):
    """Also where DDP looks for unused parameters, and would leave nothing behind that shows what it averaged."""
    model = nn.Linear(COLUMNS, 8)
    before = model.weight.detach().clone()
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
    optimizer = NVFP4AdamW(wrapped.parameters(), lr=1e-2)
    optimizer.step_in_backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="before DistributedDataParallel averages them"):
            wrapped(torch.ones(2, COLUMNS)).sum().backward()
    assert torch.equal(model.weight, before)
