"""torch.distributed.checkpoint of sharded NVFP4 weights: saved by some ranks, loaded by others, the same bits."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.bits import stored_bits
from helpers.run_ranks import mesh_of_all, on_ranks, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchao.quantization import quantize_

from nvfp4_tensor import (
    NVFP4Config,
    NVFP4WeightOnlyConfig,
    QuantizeSpec,
    checkpoints,
    distributed,
    quantize,
    quantize_experts,
)
from nvfp4_tensor.training import NVFP4TrainingConfig

pytestmark = pytest.mark.slow


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 48), nn.Linear(48, 64), nn.Linear(64, 512))
    quantize_(model.bfloat16()[:1], NVFP4WeightOnlyConfig(block_rows=16))
    model[4].weight = model[0].weight
    quantize_(model[2:3], NVFP4Config())
    experts = quantize_experts(torch.randn(4, 32, 80).bfloat16() * torch.arange(1, 5).view(4, 1, 1))
    model[1].weight = nn.Parameter(experts, requires_grad=False)
    return model.requires_grad_(False)


def assert_same(state, expected):
    for name, value in expected.items():
        found = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        if hasattr(value, "qdata"):
            assert found.spec == value.spec and found.activation_spec == value.activation_spec, name
            pair = [stored_bits(t.clone()) for t in (found, value)]  # unequal shards join to a part of a larger tensor
            assert torch.equal(*pair), name
        else:
            assert torch.equal(found, value), name


def saves(folder, plain):
    model = fully_shard(make(seed=1))
    dcp.save(distributed.to_plain(model.state_dict()) if plain else model.state_dict(), checkpoint_id=folder)


def loads_plain(folder):
    expected, model = make(seed=1), fully_shard(make(seed=2))
    plain = distributed.to_plain(model.state_dict())
    dcp.load(plain, checkpoint_id=folder)
    state = distributed.from_plain(plain)
    assert_same(state, expected.state_dict())
    model.load_state_dict(state)
    assert_same(model.state_dict(), expected.state_dict())
    assert model[4].weight is model[0].weight
    model.unshard()
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(model[0](x), expected[0](x)) and torch.equal(model[4](x), expected[4](x))


def loads_itself(folder):
    """Into a model with the same per-tensor scales, as that of a run that goes on."""
    model, expected = fully_shard(make(seed=1)), make(seed=1)
    with torch.no_grad():
        for name in ("0.weight", "2.weight"):
            model.get_parameter(name)._local_tensor.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    assert_same(model.state_dict(), expected.state_dict())


def loads_into_empty_weights(folder):
    """Into weights without scales: memory that is made of the meta device's, over what was freed before."""
    expected = make(seed=1).state_dict()
    if dist.get_world_size() == 3:  # shards that FSDP2 pads
        del expected["1.weight"]
    for seed in range(4):
        used = [quantize(torch.randn(512, 64) * 1e3**seed) for _ in range(8)]
        model = make(seed=2).to("meta")
        if "1.weight" not in expected:
            del model[1].weight
        model = fully_shard(model)
        del used
        model.to_empty(device="cpu")
        assert not any(p._local_tensor.dequantize().any() for p in model.parameters() if hasattr(p, "qdata"))
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
        assert_same(model.state_dict(), expected)


@pytest.mark.parametrize(
    ("loads", "ways"),
    [
        *((loads_plain, ways) for ways in ((2, 1), (2, 4), (1, 2))),
        *((loads_itself, ways) for ways in ((2, 2), (4, 1))),
        *((loads_into_empty_weights, ways) for ways in ((2, 4), (1, 3))),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else value.__name__,
)
def test_on_any_number_of_ranks(loads, ways, tmp_path):
    saving, loading = ways
    run_ranks(saves, saving, str(tmp_path), loads is loads_plain)
    run_ranks(loads, loading, str(tmp_path))


def test_one_process_reads_it_as_modelopt_names_it(tmp_path):
    """Without any distributed state: three plain tensors a weight, whole."""
    run_ranks(saves, 2, str(tmp_path), True)
    expected = checkpoints.to_plain(make(seed=1).state_dict())
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(state, checkpoint_id=str(tmp_path))
    assert state["0.weight"].dtype == torch.uint8 and "0.weight_scale" in state
    for name, value in expected.items():
        assert torch.equal(state[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def reshards(folder, save):
    """Columns, and rows with a scale each."""
    mesh = mesh_of_all()
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(7)).bfloat16()
    whole = {"columns": quantize(x), "rows": quantize(x, QuantizeSpec(row_scaled=True))}
    state = {
        name: distribute_tensor(t if save else quantize(torch.randn_like(x), t.spec), mesh, [Shard(name == "columns")])
        for name, t in whole.items()
    }
    plain = distributed.to_plain(state)
    if save:
        return dcp.save(plain, checkpoint_id=folder)
    dcp.load(plain, checkpoint_id=folder)
    loaded = distributed.from_plain(plain)
    assert all(t.shape == x.shape and t.placements == state[name].placements for name, t in loaded.items())
    assert_same(loaded, whole)


def test_columns_and_scaled_rows_on_other_numbers_of_ranks(tmp_path):
    run_ranks(reshards, 2, str(tmp_path), True)
    run_ranks(reshards, 4, str(tmp_path), False)


@on_ranks(2)
def test_columns_inside_blocks_raise():
    w = distribute_tensor(quantize(torch.randn(8, 48)), mesh_of_all(), [Shard(0)])
    w = DTensor.from_local(w._local_tensor, w.device_mesh, [Shard(1)], run_check=False, shape=w.shape, stride=(48, 1))
    with pytest.raises(ValueError, match="w has 48 columns, which 2 ranks cannot share in complete blocks of 16"):
        distributed.to_plain({"w": w})


@on_ranks(2)
@pytest.mark.parametrize("kind", ["plain", "itself", "trained"])
def test_asynchronously(kind, tmp_path):
    """What the model had when the save began, whatever is written to it meanwhile."""
    folder = str(tmp_path)
    if kind == "trained":
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).bfloat16()
        quantize_(model, NVFP4TrainingConfig())
        distributed.enable_nvfp4_all_gather(model)
    else:
        model = make(seed=1)
    fully_shard(model)
    before = {name: t.full_tensor().clone() for name, t in model.state_dict().items()}

    def state():
        return distributed.to_plain(model.state_dict()) if kind == "plain" else model.state_dict()

    saving = dcp.async_save(state(), checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    saving.result()
    assert not any(p.full_tensor().any() for p in model.parameters())
    loaded = state()
    dcp.load(loaded, checkpoint_id=folder)
    model.load_state_dict(distributed.from_plain(loaded) if kind == "plain" else loaded)
    assert_same(model.state_dict(), before)
