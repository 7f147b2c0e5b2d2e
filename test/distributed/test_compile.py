"""torch.compile of sharded blocks: frozen codes, gathered codes and shared tokens as graphs take them."""

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import here, on_devices, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4WeightOnlyConfig, distributed
from nvfp4_tensor.training import NVFP4TrainingConfig

pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def steps(kind, compiled):
    torch.manual_seed(1)
    mesh = init_device_mesh(here().type, (dist.get_world_size(),))
    model = nn.Sequential(Block(), Block()).bfloat16().to(here())
    if kind == "frozen":
        quantize_(model.requires_grad_(False), NVFP4WeightOnlyConfig())
    else:
        quantize_(model, NVFP4TrainingConfig())
    if kind == "codes, bits":
        distributed.enable_nvfp4_all_gather(model)
    for block in model:
        if compiled:
            block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if kind != "frozen":
        distributed.set_token_sharding(model, mesh)
        distributed.seed_rounding(model, seed=3)
    found = []
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16().to(here()).requires_grad_()
        if kind != "frozen":
            distributed.set_step(model, step)
        y = model(x)
        y.float().square().mean().backward()
        grads = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        found.append([t.detach().cpu() for t in (y, x.grad, *grads)])
    return found


@on_devices
@pytest.mark.parametrize("kind", ["frozen", pytest.param("bits", marks=pytest.mark.exhaustive), "codes, bits"])
def test_compiled_blocks_are_eager_ones(kind, device):
    eager, compiled = (run_ranks(steps, 2, kind, how, device=device)[1] for how in (False, True))
    for step, other in zip(eager, compiled, strict=True):
        assert len(step) == len(other) == (2 if kind == "frozen" else 6)
        for a, b in zip(step, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=1e-5)
    if kind != "frozen":
        assert not torch.equal(compiled[0][2], compiled[1][2])  # another step, other draws: no constant of the trace
