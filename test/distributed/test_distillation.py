"""distill of models that FSDP2 shards: the codes of one rank with all batches."""

import copy

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import mesh_of_all, on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, quantize_model
from nvfp4_tensor.training import DistillConfig, distill

pytestmark = pytest.mark.slow


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.RMSNorm(48), nn.Linear(48, 48), nn.RMSNorm(48), nn.Linear(48, 40))
    with torch.no_grad():
        for linear in model[::2]:
            linear.weight[1] *= 3  # what outgrows the scale is of the first rank
    return model


def whole(parameter):
    parameter = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return parameter.dequantize() if isinstance(parameter, NVFP4Tensor) else parameter


@on_ranks(2)
@pytest.mark.parametrize("nvfp4_masters", [False, True])
def test_shards_train_the_codes_of_one_rank(nvfp4_masters, tmp_path):
    """Rate 0.02 makes elements outgrow their scales, on which ranks agree. A run that stops goes on."""
    batches = list(torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)))
    every = {"filter_fn": lambda module, name: isinstance(module, nn.Linear)}
    dense, alone, sharded = make(), make(), make()
    for model in (alone, sharded):
        quantize_model(model, NVFP4Config(row_scaled=True), **every)
    before = {name: whole(each.detach()).clone() for name, each in alone.named_parameters()}
    shared = {"learning_rate": 0.02, "nvfp4_masters": nvfp4_masters}
    teacher = copy.deepcopy(dense)
    distill(alone, batches, DistillConfig(batches_per_step=2, **shared), teacher=teacher, steps=6, progress=False)
    for model in (sharded, teacher):
        fully_shard(model, mesh=mesh_of_all())
    own, config = [batches[dist.get_rank()]], DistillConfig(**shared)

    def stop(progress):
        if progress.step == 3:
            raise KeyboardInterrupt

    given = {"teacher": teacher, "steps": 6, "folder": tmp_path, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        distill(sharded, own, config, on_step=stop, **given)
    distill(sharded, own, config, **given)
    for (name, one), other in zip(alone.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(whole(other.detach()), whole(one.detach()), rtol=0, atol=0, msg=name)
        assert not torch.equal(whole(one.detach()), before[name]), name
    for refused, more, why in [
        (config, {"minutes": 1}, "give steps"),
        (DistillConfig(compile=True), {}, "one process"),
    ]:
        with pytest.raises(ValueError, match=why):
            distill(sharded, own, refused, teacher=teacher, progress=False, **more)
