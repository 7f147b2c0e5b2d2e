"""What users do to sharded models whose weights are gathered as codes: each run has the bits of the dense gather."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import here, on_devices, run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig, distributed
from nvfp4_tensor.training import NVFP4TrainingConfig

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
    model = nn.Sequential(Block(), Block()).to(here()).bfloat16()
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
    for block in model:
        fully_shard(block, **how)
    return fully_shard(model, **how)


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
        x = torch.randn(ROWS, WIDTH, generator=generator).bfloat16().to(here()).requires_grad_()
        y = model(x)
        if case == "two forwards":
            y = y - model(x.flip(0))
        loss = y.float().square().mean()
        if case == "two backwards":
            loss.backward(retain_graph=True)
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
    "two forwards", "two backwards", "not told", "evaluated", ".data", "averaged", "loaded", "drawn anew",
]  # fmt: skip


def both(cases):
    """The cases in which the two ways differ."""
    wrong = {}
    for case in cases:
        try:
            dense, gathered = trained(case, False), trained(case, True)
            same = len(dense) == len(gathered) and all(map(torch.equal, dense, gathered))
            if not same or not all(p.isfinite().all() for p in dense):
                wrong[case] = "other bits"
        except Exception as error:
            wrong[case] = repr(error)[:300]
    return wrong


@on_devices
def test_runs_equal_those_with_a_dense_gather(device):
    for wrong in run_ranks(both, 2, CASES, device=device):
        assert not wrong, wrong


@pytest.mark.parametrize("world", [1, 3, 4])
def test_on_other_numbers_of_ranks(world):
    for wrong in run_ranks(both, world, ["foreach", "checkpoint", "tied"]):
        assert not wrong, wrong


def tied_to_others(case):
    model = nn.ModuleDict({"embed": nn.Embedding(96, 64), "a": nn.Linear(64, 96), "b": nn.Linear(64, 96)})
    model["a"].weight = model["embed" if case == "embedding" else "b"].weight
    quantize_(model["a"], NVFP4TrainingConfig("nvidia"))
    quantize_(model["b"], NVFP4TrainingConfig("accurate" if case == "recipes" else "nvidia"))
    before = dict(model.named_parameters())
    with pytest.raises(ValueError) as raised:
        distributed.enable_nvfp4_all_gather(model)
    assert all(p is before[name] for name, p in model.named_parameters())  # nothing is half-changed
    return str(raised.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("embedding", r"the weight of a is tied to embed \(Embedding\)"),
        ("recipes", "the weights of a and b are tied, but their recipes"),
    ],
)
def test_weights_tied_to_modules_without_codes_raise(case, message):
    assert re.search(message, tied_to_others(case))


def sixty_four_rows():
    model = nn.Sequential(nn.Linear(96, 64)).bfloat16()
    quantize_(model, NVFP4TrainingConfig())
    with pytest.raises(ValueError) as raised:
        fully_shard(distributed.enable_nvfp4_all_gather(model))(torch.randn(16, 96).bfloat16())
    return str(raised.value)


def test_the_suggested_padding_gives_complete_blocks_per_rank():
    for said in run_ranks(sixty_four_rows, 3):
        assert "has 64 rows, which 3 ranks cannot share evenly: pad them to 96" in said


def parameters_stay_dense():
    """After a forward without gradients, whose codes reshard_after_forward=False keeps, and between two halves."""
    dense, model = blocks("kept", False), blocks("kept", True)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16().to(here())
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


@on_devices
def test_parameters_are_dense_while_codes_are_kept(device):
    run_ranks(parameters_stay_dense, 2, device=device)
