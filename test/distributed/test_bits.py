"""Codes and random bits are independent of the number of ranks, for every recipe and every way to share a step."""

import re

import pytest
import torch
import torch.distributed as dist
from helpers.bits import relative_error
from helpers.product_operands import ProductOperands
from helpers.recipes import MORE
from helpers.run_ranks import here, mesh_of_all, on_ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _load_balancer
from torch.distributed.tensor.parallel import parallelize_module
from torchao.quantization import quantize_

from nvfp4_tensor import distributed
from nvfp4_tensor.training import RECIPES, NVFP4TrainingConfig

pytestmark = pytest.mark.slow

ALL = RECIPES | {name: MORE[name] for name in ("row scales", "dense forward", "w again", "stochastic forward")}


class Pair(nn.Module):
    """Two linears of one input, computed in the graph: eager mode on one rank shares its operands."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.q, self.k = (nn.Linear(inputs, outputs, bias=False) for _ in range(2))

    def forward(self, x):
        x = x * 1
        return self.q(x) + self.k(x)


def pair(recipe, sizes, seeded):
    torch.manual_seed(7)
    model = Pair(sizes["inputs"], sizes["outputs"]).bfloat16().to(here())
    quantize_(model, NVFP4TrainingConfig(recipe))
    if seeded:
        distributed.seed_rounding(model, seed=5, step=3)
    return model


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def step(model, x, dy, seed):
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    with ProductOperands() as products:
        y = model(x)
        y.backward(dy)
    return products.found, y.detach(), x.grad, *(local(p.grad) for p in model.parameters())


def head_and_tail(sequence, rank, world):
    """The tokens of a rank as torch's own load balancer has them, and their chunks."""
    balancer = _load_balancer._HeadTailLoadBalancer(sequence, world, "cpu")
    return balancer._generate_indices().view(world, -1)[rank].long(), (rank, 2 * world - 1 - rank)


FEATURES = ("inputs", "outputs")


class Share:
    """What a rank has of x (2, S, K), dy (2, S, N) and w (N, K): rows, tokens of each, outputs and inputs."""

    def __init__(self, how, world):
        self.how, self.world, self.rank = how, world, dist.get_rank()
        # Whole rotations of 128 in each rank's range, and no two sizes equal.
        self.sizes = {"batch": 2, "tokens": 48, "inputs": 64, "outputs": 80}
        if how in ("tokens", "sequence"):
            self.sizes["tokens"] = 128 * world
        elif how == "chunks":
            self.sizes["tokens"] = 2 * 2 * 128
        if how in ("outputs", "sequence"):
            self.sizes["outputs"] = 128 * world
        elif how == "inputs":
            self.sizes["inputs"] = 128 * world
        self.whole = {name: torch.arange(size, device=here()) for name, size in self.sizes.items()}
        self.own = dict(self.whole)

    def split(self, name):
        self.own[name] = self.whole[name].chunk(self.world)[self.rank]

    def apply(self, model):
        mesh = mesh_of_all()
        if self.how == "tokens":
            self.split("batch") if self.world == 2 else self.split("tokens")
            distributed.set_token_sharding(model, mesh, dim=0 if self.world == 2 else 1)
        elif self.how == "chunks":
            self.apply_chunks(model)
        elif self.how == "inputs":
            self.split("inputs")
            parallelize_module(model, mesh, {"*": distributed.NVFP4RowwiseParallel()})
        else:
            self.split("outputs")
            sequence = {"input_layouts": Shard(1)} if self.how == "sequence" else {}
            parallelize_module(model, mesh, {"*": distributed.NVFP4ColwiseParallel(**sequence)})

    def apply_chunks(self, model):
        """Chunks of the sequence over two ranks, and with four ranks the batch over two."""
        # Of two ranks without a group of its own: torch 2.11's split_group dies in a process that had other groups.
        sizes, names = ((2,), ("cp",)) if self.world == 2 else ((self.world // 2, 2), ("dp", "cp"))
        mesh = init_device_mesh(here().type, sizes, mesh_dim_names=names)
        tokens, chunks = head_and_tail(self.sizes["tokens"], mesh["cp"].get_local_rank(), 2)
        self.own["tokens"] = tokens.to(here())
        distributed.set_token_sharding(model, mesh["cp"], dim=1, chunks=chunks)
        if self.world == 4:
            self.own["batch"] = self.whole["batch"].chunk(2)[mesh["dp"].get_local_rank()]
            distributed.set_token_sharding(model, mesh["dp"])

    def of(self, t, features, is_input=False):
        """This rank's part of x, y or their gradients."""
        tokens = self.own["tokens"]
        if self.how == "sequence" and is_input:
            tokens = tokens.chunk(self.world)[self.rank]
        return t[self.own["batch"]][:, tokens][..., self.own[features]].contiguous()

    def of_operand(self, t, shape):
        """The part of an operand's values or scales, in each dimension in which the rank's shape is another one."""
        tokens = (self.own["batch"][:, None] * self.sizes["tokens"] + self.own["tokens"]).flatten()
        for dim, (size, mine) in enumerate(zip(t.shape, shape, strict=True)):
            if size != mine:
                indices = {2 * self.sizes["tokens"]: tokens} | {self.sizes[of]: self.own[of] for of in FEATURES}
                index = indices[size]
                assert len(index) == mine
                t = t.index_select(dim, index)
        return t


def batch(sizes):
    generator = torch.Generator().manual_seed(8)
    x, dy = (torch.randn(2, sizes["tokens"], sizes[of], generator=generator).bfloat16() for of in FEATURES)
    x[0, 5, 7], dy[-1, -1, 3] = 30.0, -40.0  # amaxes that one rank alone has
    return x.to(here()), dy.to(here())


@on_ranks(2, cuda=True)
@pytest.mark.parametrize("how", ["tokens", "chunks", "outputs", "outputs, unseeded", "inputs", "sequence"])
def test_operands_equal_those_of_one_rank(how):
    """Every operand of every product, bit for bit; y, dx and dw up to the order of sums."""
    operands_of_every_recipe(how.removesuffix(", unseeded"), seeded=not how.endswith(", unseeded"))


@pytest.mark.parametrize(
    ("how", "world"), [("tokens", 4), ("chunks", 4), ("outputs", 8), ("inputs", 3), ("sequence", 4)]
)
def test_operands_on_more_ranks(how, world):
    run_ranks(operands_of_every_recipe, world, how)


def operands_of_every_recipe(how, seeded=True):
    for name, recipe in ALL.items():
        share = Share(how, dist.get_world_size())
        x, dy = batch(share.sizes)
        alone, model = (pair(recipe, share.sizes, seeded) for _ in range(2))
        seed = dist.get_rank() if seeded else 9  # of torch's generator, which then draws nothing
        expected, y, dx, *dw = step(alone, x, dy, seed)
        share.apply(model)
        found, y_, dx_, *dw_ = step(model, share.of(x, "inputs", True), share.of(dy, "outputs"), seed)
        assert len(found) == len(expected) >= (2 if name in ("forward_only", "weight_only") else 4), name
        for i, (mine, whole) in enumerate(zip(found, expected, strict=True)):
            for (values, scale), (of_whole, its_scale) in zip(mine, whole, strict=True):
                assert torch.equal(scale, share.of_operand(its_scale, scale.shape)), (name, i)
                assert torch.equal(values, share.of_operand(of_whole, values.shape)), (name, i)
        assert relative_error(y_, share.of(y, "outputs")) <= 0.005, name
        assert relative_error(dx_, share.of(dx, "inputs", True)) <= 0.005, name
        for mine, whole in zip(dw_, dw, strict=True):
            if how in ("tokens", "chunks"):
                dist.all_reduce(mine)
            assert relative_error(mine, whole[share.own["outputs"]][:, share.own["inputs"]]) <= 0.005, name


# --- errors -----------------------------------------------------------------------------------------


def raises(case):
    rank, mesh = dist.get_rank(), mesh_of_all()
    recipes = {"recipes": "unbiased" if rank else "nvidia", "tokens": "accurate_eden"}
    model = pair(recipes.get(case, "nvidia"), {"inputs": 64, "outputs": 64}, seeded=False)
    if case == "mesh":
        distributed.set_token_sharding(model, init_device_mesh("cpu", (1, 2)))
    elif case == "twice":
        both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        for _ in range(2):  # the same ranks again
            distributed.set_token_sharding(model, both["a"])
        distributed.set_token_sharding(model, both["b"], dim=1)
        distributed.set_token_sharding(model, both["b"])
    elif case == "plan":
        plan = {"0": distributed.NVFP4RowwiseParallel()}
        parallelize_module(nn.Sequential(nn.Linear(32, 32)), mesh, plan)
    elif case == "step":
        distributed.set_step(model, 1)
    elif case == "unequal chunks":
        distributed.set_token_sharding(model, mesh, dim=1, chunks=((0, 1), (2,))[rank])
    elif case in ("recipes", "tokens", "unequal", "negative"):
        distributed.set_token_sharding(model, mesh, dim=-1 if case == "negative" else 0)
        model(torch.randn(48 + 16 * rank if case == "unequal" else 40, 64).bfloat16()).sum().backward()
    else:
        distributed.set_token_sharding(model, mesh, dim=1, chunks=(0, 3))


ERRORS = {
    "recipes": "ValueError: the recipe of 'k' is nvidia.*on rank 0 and unbiased.*on rank 1",
    "mesh": "ValueError: a mesh of one dimension",
    "twice": r"ValueError: ranks \[0, 1\] share dimension 0 of q's tokens already: give one mesh of all",
    "tokens": r"ValueError: x\^T has 40 columns in a range of one of 2 ranks.* 128",
    "unequal": "RuntimeError: .*ranks have unequal numbers of tokens",
    "negative": "ValueError: dim counts from the first dimension of an input, 0 for its batch, got -1",
    "plan": "TypeError: NVFP4RowwiseParallel supports linears that train in NVFP4 or have .*, not Linear",
    "step": "RuntimeError: q has no seed: call distributed.seed_rounding",
    "unequal chunks": r"ValueError: the ranks have the chunks \[\(0, 1\), \(2,\)\], which do not",
    "chunks": r"ValueError: the ranks have the chunks \[\(0, 3\), \(0, 3\)\], which do not contain each of the 4",
}


@on_ranks(2)
@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_raised_on_every_rank(case):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        raises(case)
    assert re.match(ERRORS[case], f"{raised.typename}: {raised.value}")
