"""FSDP2 of weights that train: it gathers codes, which equal those of the full weight on one rank."""

import copy
import io
import re

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import here, on_devices, run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Tensor, distributed
from nvfp4_tensor.distributed.fsdp import MasterShard
from nvfp4_tensor.training import RECIPES, NVFP4TrainingConfig, set_recipe
from nvfp4_tensor.training.linear import operands

pytestmark = pytest.mark.slow


def make(recipe="nvidia", columns=64, hidden=512, dtype=torch.bfloat16):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(columns, hidden), nn.ReLU(), nn.Linear(hidden, columns)).to(dtype)
    quantize_(model, NVFP4TrainingConfig(recipe))
    return model.to(here())


def shard(model, **options):
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def gathered_codes_are_those_of_the_whole(recipe):
    for hidden in (512, 192):
        model, alone = (
            shard(distributed.enable_nvfp4_all_gather(make(recipe, hidden=hidden))),
            make(recipe, hidden=hidden),
        )
        for i in (0, 2):
            model[i].unshard()
            weight, linear = model[i].weight, alone[i]
            assert isinstance(weight, NVFP4Tensor) and weight.requires_grad
            whole = operands.quantize_operand(linear.weight.detach(), linear.active_recipe.w)
            for mine, theirs in zip((weight.qdata, weight.scale, weight.per_tensor_scale), whole, strict=True):
                assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def every_recipe():
    for recipe in RECIPES:
        gathered_codes_are_those_of_the_whole(recipe)


@on_devices
def test_gathered_codes_equal_those_of_the_full_weight(device):
    run_ranks(every_recipe, 2, device=device)


def test_gathered_codes_on_four_ranks():
    run_ranks(every_recipe, 4)


def trains(codes, precompute, dtype, reshard=True):
    """The losses, gradients and weights of a few steps."""
    torch.manual_seed(3)
    model = make(dtype=dtype)
    if codes:
        distributed.enable_nvfp4_all_gather(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sent = count_all_gathers()
    torch.manual_seed(4)
    for _ in range(3):
        x = torch.randn(2, 32, 64).bfloat16()[dist.get_rank() % 2].to(here())
        model(x).float().square().mean().backward()
        optimizer.step()
        if precompute:
            distributed.precompute_amaxes(model)
        grads = [p.grad.full_tensor() for p in model.parameters()]
        optimizer.zero_grad()
    return [p.full_tensor().detach().cpu() for p in model.parameters()], [g.cpu() for g in grads], sum(sent)


def count_all_gathers():
    sent = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    real = getattr(dist, name)

    def counted(output_tensor, input_tensor, **how):
        sent.append(input_tensor.numel() * input_tensor.element_size())
        return real(output_tensor, input_tensor, **how)

    setattr(dist, name, counted)
    return sent


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_run_equals_one_with_a_dense_gather(dtype, device):
    """Weights and gradients are equal bit for bit, with 0.28 of the bytes (biases are gathered dense)."""
    dense, by_weight, batched = (
        run_ranks(trains, 2, codes, precompute, dtype, device=device)[0]
        for codes, precompute in ((False, False), (True, False), (True, True))
    )
    for run in (by_weight, batched):
        assert all(torch.equal(a, b) for part in (0, 1) for a, b in zip(run[part], dense[part], strict=True))
    biases = (512 + 64) * 2
    gathers, weights = 6, 2 * 64 * 512 * 2
    assert dense[2] == gathers * (weights + biases) / 2
    assert batched[2] == by_weight[2] == gathers * ((weights * 0.28125 + biases) / 2 + 2 * 4)


def quantizes_once_a_step():
    """How often shards are quantized in each of some steps, and what stays of their codes after the optimizer's."""
    model = shard(distributed.enable_nvfp4_all_gather(make()))
    shards = [model[i].weight._local_tensor for i in (0, 2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    real, calls, kept = MasterShard._quantize, [], []
    MasterShard._quantize = lambda self, *args: calls.append(1) or real(self, *args)
    for accumulates in (False, True):
        start = len(calls)
        for _ in range(1 + accumulates):
            model(torch.randn(32, 64).bfloat16().to(here())).sum().backward()
        kept.append(len(calls) - start)
        optimizer.step()
        kept.append(sum(shard._codes is not None for shard in shards))
    return kept


def test_shards_are_quantized_once_for_forward_and_backward():
    """Twice two weights a step, and two each for a second micro-batch; nothing is held beyond the optimizer's step."""
    assert run_ranks(quantizes_once_a_step, 2) == [[2, 0, 4, 0]] * 2


def behaves_as_a_parameter():
    model = distributed.enable_nvfp4_all_gather(make())
    before = make().state_dict()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["0.weight"]) is torch.Tensor and torch.equal(loaded["0.weight"], before["0.weight"])
    copied = copy.deepcopy(model)
    assert isinstance(copied[0].weight, MasterShard) and isinstance(copied[0].weight, nn.Parameter)
    x = torch.randn(32, 64).bfloat16()
    assert torch.equal(model(x), make()(x))  # no FSDP2 yet
    shard(model)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(type(full[name]) is torch.Tensor and torch.equal(full[name], before[name]) for name in before)


def test_it_behaves_as_a_parameter():
    run_ranks(behaves_as_a_parameter, 2)


def a_changed_weight_is_seen():
    model = shard(distributed.enable_nvfp4_all_gather(make()))
    x = torch.randn(32, 64).bfloat16()
    distributed.precompute_amaxes(model)
    model(x)
    model.reshard()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    y = model(x)
    alone = make()
    with torch.no_grad():
        for p in alone.parameters():
            p.mul_(3)
    assert torch.equal(y, alone(x))


def test_an_outdated_amax_is_not_used():
    run_ranks(a_changed_weight_is_seen, 2)


def a_copy_has_the_amax():
    """Of the shard that it is one of, as long as this does not change: CPU offload makes one for each gather."""
    model = shard(distributed.enable_nvfp4_all_gather(make()))
    distributed.precompute_amaxes(model)
    for i in (0, 2):
        mine = model[i].weight._local_tensor
        copied = mine.to("cpu", copy=True)
        assert copied._amax[0] == copied._state() and copied._amax[1] is mine._amax[1]
        assert mine.float()._amax is None  # rounded otherwise
        mine.mul_(2)
        assert mine.to("cpu", copy=True)._amax is None


def test_a_copy_has_the_amax_of_its_shard():
    run_ranks(a_copy_has_the_amax, 2)


def error_of(case):
    other = case == "ranks" and dist.get_rank() == 1
    model = make("unbiased" if other else "nvidia", hidden=72 if case == "blocks" else 64)
    if case == "recipe":
        set_recipe(model, forward="bf16")
    try:
        distributed.enable_nvfp4_all_gather(model)
        shard(model)
        if case == "twice":
            distributed.enable_nvfp4_all_gather(model)
        if case == "later":
            set_recipe(model, forward="bf16")
        model(torch.randn(32, 64).bfloat16())
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("twice", "enable_nvfp4_all_gather was called after fully_shard"),
        ("recipe", "^the recipe of 0 does not quantize its weight"),
        ("later", r"the recipe of .*NVFP4TrainingLinear\(.* does not quantize its weight"),
        ("ranks", r"the recipe of 'a linear of 64 inputs and 64 outputs' is .*nvidia.* on rank 0 and .*unbiased"),
        ("blocks", r"the weight of \w*NVFP4TrainingLinear\(.*\) has 36 rows .* 2 ranks, .* not a multiple of the 16"),
    ],
)
def test_errors_are_raised_on_every_rank(case, message):
    for error in run_ranks(error_of, 2, case):
        assert re.search(message, error), error
