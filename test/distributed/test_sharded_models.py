"""Models that are sharded before they are quantized are refused by the name of a weight, and stay as they were."""

import pytest
import torch
from helpers.model_states import state_of
from helpers.run_ranks import mesh_of_all, on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, calibrate, quantize_model
from nvfp4_tensor.quantization import gptq, sensitivity
from nvfp4_tensor.quantization.experts import expert_weights

pytestmark = pytest.mark.slow

IDS = torch.arange(32).view(2, 16)
CALLS = {
    "quantize_": lambda model: quantize_(model, NVFP4WeightOnlyConfig(experts=True)),
    "quantize_model": quantize_model,
    "calibrate": lambda model: calibrate(model, [IDS], NVFP4Config(experts=True), progress=False),
    "gptq": lambda model: gptq(model, [IDS], progress=False),
    "sensitivity": lambda model: sensitivity(model, [IDS], progress=False),
    "prepare": lambda model: quantize_(model, NVFP4Config(step="prepare", experts=True)),
}


def mixture():
    from helpers.tiny_models import tiny_model

    return tiny_model("Mixtral", quantized=False, hidden_size=64, num_hidden_layers=1)


def shard(model, how):
    mesh = mesh_of_all()
    experts = model.model.layers[0].mlp.experts
    if how.startswith("FSDP2"):
        fully_shard(model, mesh=mesh, reshard_after_forward=how == "FSDP2")
        with torch.no_grad():
            model(IDS)
        assert (type(model.lm_head.weight.data) is torch.Tensor) == (how != "FSDP2")
    elif how == "tensor parallelism":
        parallelize_module(model, mesh, {"model.layers.*.self_attn.v_proj": ColwiseParallel()})
    else:
        for name in expert_weights(experts):
            sharded = distribute_tensor(getattr(experts, name).data, mesh, [Shard(0)])
            setattr(experts, name, nn.Parameter(sharded))


NAMED = {
    "FSDP2": "model.layers.0.self_attn.q_proj.weight",
    "FSDP2, gathered": "model.layers.0.self_attn.q_proj.weight",
    "tensor parallelism": "model.layers.0.self_attn.v_proj.weight",
    "expert parallelism": "model.layers.0.mlp.experts.gate_up_proj",
}
"""The weight that is refused, of each way to shard."""


def refused(model, call):
    """What a call says, which leaves the model as it was."""
    before = state_of(model)
    with pytest.raises(TypeError, match="is sharded, and only whole weights can be quantized") as raised:
        call(model)
    assert state_of(model) == before
    return str(raised.value).split(" is sharded")[0]


@on_ranks(2)
def test_sharded_models_are_refused_by_name():
    pytest.importorskip("transformers")
    for how, named in NAMED.items():
        model, prepared = mixture(), mixture()
        quantize_(prepared, NVFP4Config(step="prepare", experts=True))
        prepared(IDS)
        for each in (model, prepared):
            shard(each, how)
        for name, call in CALLS.items():
            said = refused(model, call)
            assert said == named or name in ("quantize_", "prepare"), (how, name, said)  # which see single modules
        refused(prepared, lambda model: quantize_(model, NVFP4Config(step="convert", experts=True)))
        if not how.startswith("FSDP2"):  # which gathers whole weights for a call
            refused(prepared, lambda model: model(IDS))
