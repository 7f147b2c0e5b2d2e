"""FSDP2 of weights that train, gathered as codes: each run has the bits of the dense gather, and fewer bytes."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from helpers.bits import stored_bits
from helpers.files import saved
from helpers.run_ranks import gathered_bytes, here, on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig, distributed, quantize
from nvfp4_tensor.distributed.fsdp import MasterShard
from nvfp4_tensor.training import RECIPES, NVFP4TrainingConfig, set_recipe

pytestmark = pytest.mark.slow

WIDTH, HIDDEN, ROWS = 192, 384, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def blocks(case, codes):
    """Two blocks, sharded one by one as the case has it."""
    torch.manual_seed(1)
    model = nn.Sequential(Block(), Block()).to(here(), torch.float32 if case == "float32" else torch.bfloat16)
    if case == "tied":
        model[0].down.weight = nn.Parameter(model[0].down.weight.detach())
        model[0].again = nn.Linear(HIDDEN, WIDTH, bias=False, device=here(), dtype=torch.bfloat16)
        model[0].again.weight = model[0].down.weight
        model[0].forward = lambda x, b=model[0]: Block.forward(b, x) + b.again(nn.functional.gelu(b.up(-x)))
    if case == "frozen NVFP4 beside":
        quantize_(model[0].down.requires_grad_(False), NVFP4WeightOnlyConfig())
    quantize_(model, NVFP4TrainingConfig(), filter_fn=lambda m, _: type(m) is nn.Linear)
    if case == "one frozen":
        model[1].up.weight.requires_grad_(False)
    distributed.seed_rounding(model, seed=7)
    if codes:
        distributed.enable_nvfp4_all_gather(model)
    if case in ("checkpoint", "reentrant"):
        kind = CheckpointImpl.REENTRANT if case == "reentrant" else CheckpointImpl.NO_REENTRANT
        model = nn.Sequential(*(checkpoint_wrapper(block, checkpoint_impl=kind) for block in model))
    how = {"reshard_after_forward": case != "kept"}
    if case == "offload":
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=here().type == "cuda")
    if case == "float32":
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        if case == "compiled" and (codes or here().type == "cuda"):  # on CPUs, its bits are those of an eager dense run
            block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block, **how)
    return fully_shard(model, **how)


def batch(generator=None):
    generator = generator or torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(ROWS, WIDTH, generator=generator).bfloat16().to(here())


OPTIMIZERS = {
    "one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
}


def trained(case, codes):
    """The parameters after some steps, whole."""
    model = blocks(case, codes)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS.get(case, OPTIMIZERS["foreach"])(parameters)
    average = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        distributed.set_step(model, step)
        x = batch(generator).requires_grad_()
        y = model(x)
        if case == "two forwards":
            y = y - model(x.flip(0))
        loss = y.float().square().mean()
        if case == "two backwards":
            loss.backward(retain_graph=True)
        if case == "accumulated":  # reduced with the next one
            model.set_requires_gradient_sync(False)
            model(x.flip(1)).float().square().mean().backward()
            model.set_requires_gradient_sync(True)
        loss.backward()
        if case == "clipped":
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor() > 0.01
        optimizer.step()
        optimizer.zero_grad()
        if codes and case != "not told":
            distributed.precompute_amaxes(model)
        changed(case, model, parameters, average)
    return [whole(p) for p in parameters]


def whole(p):
    """On the CPU; gathered from the mesh's devices, which CPU offload keeps no shards on."""
    here_too = DTensor.from_local(p.detach().to_local().to(here()), p.device_mesh, p.placements)
    return here_too.full_tensor().cpu()


@torch.no_grad()
def changed(case, model, parameters, average):
    """After an optimizer's step, and after the amaxes of its weights were found."""
    if case == "evaluated":
        model(torch.ones(ROWS, WIDTH, device=here(), dtype=torch.bfloat16))
    elif case == ".data":
        for p in parameters:
            p.data.mul_(1.5)
    elif case == "averaged":
        torch._foreach_lerp_(average, parameters, 0.5)
        for p, mean in zip(parameters, average, strict=True):
            p.copy_(mean)
    elif case == "loaded":
        state = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: value * 0.5 for name, value in state.items()})
    elif case == "drawn anew":
        for p in parameters:
            torch.manual_seed(3)
            nn.init.normal_(p._local_tensor, std=0.1)


CASES = [
    *OPTIMIZERS, "checkpoint", "reentrant", "kept", "tied", "frozen NVFP4 beside", "one frozen", "clipped", "offload",
    "two forwards", "two backwards", "accumulated", "not told", "evaluated", ".data", "averaged", "loaded",
    "drawn anew", "float32", "compiled",
]  # fmt: skip


@on_ranks(2, cuda=True)
@pytest.mark.parametrize("case", CASES)
def test_runs_equal_those_with_a_dense_gather(case):
    equal_runs(case)


@on_ranks(1, 3, 4)
@pytest.mark.parametrize("case", ["foreach", "accumulated", "tied"])
def test_runs_on_other_numbers_of_ranks(case):
    equal_runs(case)


def equal_runs(case):
    dense, gathered = trained(case, False), trained(case, True)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(dense, gathered, strict=True))


# --- codes -----------------------------------------------------------------------------------------------------------


def make(recipe="nvidia", hidden=512):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 64)).bfloat16()
    quantize_(model, NVFP4TrainingConfig(recipe))
    return model.to(here())


def shard(model, **options):
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@on_ranks(2, 4, cuda=True)
def test_gathered_codes_equal_those_of_the_full_weight():
    for recipe in RECIPES:
        for hidden in (512, 192):
            model, alone = (make(recipe, hidden) for _ in range(2))
            shard(distributed.enable_nvfp4_all_gather(model))
            for i in (0, 2):
                model[i].unshard()
                mine, theirs = model[i].weight, quantize(alone[i].weight.detach(), RECIPES[recipe].w)
                assert isinstance(mine, NVFP4Tensor) and mine.requires_grad
                assert torch.equal(stored_bits(mine), stored_bits(theirs)), (recipe, hidden, i)


@on_ranks(2, cuda=True)
def test_bytes_sent():
    """0.28 of bfloat16's for weights, which are gathered twice, and their per-tensor scales; biases are dense."""
    found = []
    for codes, precomputed in ((False, False), (True, False), (True, True)):
        model = shard(distributed.enable_nvfp4_all_gather(make()) if codes else make())
        if precomputed:
            distributed.precompute_amaxes(model)
        with gathered_bytes() as sent:
            model(torch.randn(32, 64).bfloat16().to(here())).sum().backward()
        found.append(sum(sent))
    biases, weights = (512 + 64) * 2, 2 * 64 * 512 * 2
    of_codes = 2 * ((weights * 0.28125 + biases) / 2 + 2 * 4)
    assert found == [weights + biases, of_codes, of_codes]


@on_ranks(2)
def test_shards_are_quantized_once_for_forward_and_backward():
    """Twice two weights a step, and two each for a second micro-batch; nothing is held beyond the optimizer's step."""
    model = shard(distributed.enable_nvfp4_all_gather(make()))
    shards = [model[i].weight._local_tensor for i in (0, 2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    real, calls, kept = MasterShard._quantize, [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MasterShard, "_quantize", lambda self, *args: calls.append(1) or real(self, *args))
        for accumulates in (False, True):
            start = len(calls)
            for _ in range(1 + accumulates):
                model(torch.randn(32, 64).bfloat16().to(here())).sum().backward()
            kept.append(len(calls) - start)
            optimizer.step()
            kept.append(sum(shard._codes is not None for shard in shards))
    assert kept == [2, 0, 4, 0]


# --- shards as parameters --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_shards_behave_as_parameters():
    model = distributed.enable_nvfp4_all_gather(make())
    before = make().state_dict()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    loaded = saved(model.state_dict())
    assert type(loaded["0.weight"]) is torch.Tensor and torch.equal(loaded["0.weight"], before["0.weight"])
    copied = copy.deepcopy(model)
    assert isinstance(copied[0].weight, MasterShard) and isinstance(copied[0].weight, nn.Parameter)
    x = torch.randn(32, 64).bfloat16()
    assert torch.equal(model(x), make()(x))  # no FSDP2 yet
    shard(model)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(type(full[name]) is torch.Tensor and torch.equal(full[name], before[name]) for name in before)


@on_ranks(2, cuda=True)
def test_parameters_are_dense_while_codes_are_kept():
    """After a forward without gradients, whose codes reshard_after_forward=False keeps, and between two halves."""
    dense, model = blocks("kept", False), blocks("kept", True)
    x = batch()
    weights = [name for name, p in model.named_parameters() if "weight" in name]
    before = {name: whole(p) for name, p in model.named_parameters()}

    def check(factor):
        own = dict(model.named_parameters())
        for name in weights:
            assert isinstance(own[name], DTensor) and torch.equal(whole(own[name]), before[name] * factor)

    with torch.no_grad():
        model(x)
        assert isinstance(model[0].up.weight, NVFP4Tensor)
        check(1)
        copy.deepcopy(model[0].up)
        for p in (*model.parameters(), *dense.parameters()):
            if p.dim() == 2:
                p.mul_(2)
        check(2)
        for block in model:
            block.reshard()
        assert torch.equal(model(x), dense(x))
    loss = model(x).float().square().mean()
    check(2)
    loss.backward()
    check(2)
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        model(x)
        dict(model.named_parameters())[weights[0]].mul_(2)
        with pytest.raises(RuntimeError, match=r"written to after FSDP2 had gathered its codes.*reshard"):
            model(x)


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS = {
    "twice": "enable_nvfp4_all_gather was called after fully_shard",
    "recipe": "^the recipe of 0 does not quantize its weight",
    "later": r"the recipe of .*NVFP4TrainingLinear\(.* does not quantize its weight",
    "ranks": r"the recipe of 'a linear of 64 inputs and 64 outputs' is .*nvidia.* on rank 0 and .*unbiased",
    "blocks": r"the weight of \w*NVFP4TrainingLinear\(.*\) has 36 rows .* 2 ranks, .* not a multiple of the 16",
}


@on_ranks(2)
@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_raised_on_every_rank(case):
    model = make("unbiased" if case == "ranks" and dist.get_rank() else "nvidia", hidden=72 if case == "blocks" else 64)
    if case == "recipe":
        set_recipe(model, forward="bf16")
    with pytest.raises(ValueError, match=ERRORS[case]):
        distributed.enable_nvfp4_all_gather(model)
        shard(model)
        if case == "twice":
            distributed.enable_nvfp4_all_gather(model)
        if case == "later":
            set_recipe(model, forward="bf16")
        model(torch.randn(32, 64).bfloat16())


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("embedding", r"the weight of a is tied to embed \(Embedding\)"),
        ("recipes", "the weights of a and b are tied, but their recipes"),
    ],
)
def test_weights_tied_to_modules_without_codes_raise(case, message):
    model = nn.ModuleDict({"embed": nn.Embedding(96, 64), "a": nn.Linear(64, 96), "b": nn.Linear(64, 96)})
    model["a"].weight = model["embed" if case == "embedding" else "b"].weight
    quantize_(model["a"], NVFP4TrainingConfig("nvidia"))
    quantize_(model["b"], NVFP4TrainingConfig("accurate" if case == "recipes" else "nvidia"))
    before = dict(model.named_parameters())
    with pytest.raises(ValueError) as raised:
        distributed.enable_nvfp4_all_gather(model)
    assert re.search(message, str(raised.value))
    assert all(p is before[name] for name, p in model.named_parameters())  # nothing is half-changed
