"""Sharded weights that are written between two forwards: what is multiplied is what the shards are now."""

import ctypes

import torch
import torch.distributed as dist
from helpers.run_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torchao.quantization import quantize_

from nvfp4_tensor import distributed
from nvfp4_tensor.training import NVFP4TrainingConfig


def by_optimizer(weight, new):
    weight.grad = weight.detach() - distribute_tensor(new, weight.device_mesh, weight.placements)
    torch.optim.SGD([weight], lr=1.0).step()


def local(weight, new):
    return weight.to_local().detach(), new.chunk(dist.get_world_size())[dist.get_rank()]


def raw_copy(weight, new):
    """As a kernel that torch knows nothing of: a gather of codes, which keeps amaxes, cannot notice it."""
    mine, piece = local(weight, new)
    ctypes.memmove(mine.data_ptr(), piece.contiguous().data_ptr(), mine.numel() * mine.element_size())


SEEN = {
    "copy_": torch.no_grad()(lambda w, new: w.copy_(distribute_tensor(new, w.device_mesh, w.placements))),
    "data.copy_": lambda w, new: w.data.copy_(distribute_tensor(new, w.device_mesh, w.placements)),
    "local": torch.no_grad()(lambda w, new: w.to_local().copy_(local(w, new)[1])),
    "local.data": lambda w, new: w.to_local().data.copy_(local(w, new)[1]),
    "SGD": by_optimizer,
}


def writes_between_forwards(codes):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64, bias=False)), torch.randn(16, 64)
    quantize_(model, NVFP4TrainingConfig())
    if codes:
        distributed.enable_nvfp4_all_gather(model)
    fully_shard(model, mesh=mesh)
    for name, write in (SEEN if codes else SEEN | {"raw": raw_copy}).items():
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                model(x)
                model.reshard()
                new = torch.randn(64, 64)
                write(model[0].weight, new)
                fresh = nn.Linear(64, 64, bias=False)
                fresh.weight = nn.Parameter(new)
                quantize_(fresh, NVFP4TrainingConfig())
                assert torch.allclose(model(x), fresh(x), rtol=0, atol=1e-5), (name, grad)
                model.reshard()


def test_dense_gather_of_changed_shards():
    run_ranks(writes_between_forwards, 2, False)


def test_codes_gather_of_changed_shards():
    run_ranks(writes_between_forwards, 2, True)
