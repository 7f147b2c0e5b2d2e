"""Experts over ranks: each rank multiplies for some of them, or has a piece of each, as one process does for all."""

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import here, mesh_of_all, on_ranks
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import Shard, distribute_tensor

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize_experts
from nvfp4_tensor.distributed import share_amax
from nvfp4_tensor.training import RECIPES, grouped_linear

pytestmark = pytest.mark.slow

E, N, K = 6, 48, 64


def tokens(count):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, K, generator=generator).bfloat16()
    return x.to(here()), torch.randint(E - 1, (count,), generator=generator).to(here())  # the last expert gets none


def ends(counts):
    return counts.cumsum(0).to(torch.int32)


def by_expert(x, chosen, product):
    """The products of tokens with the experts that are chosen, all of them here: product(rows, ends of the groups)."""
    order = chosen.argsort(stable=True)
    y = product(x[order], ends(torch.bincount(chosen, minlength=E)))
    return torch.empty_like(y).index_copy(0, order, y)


def over_ranks(x, chosen, product, group):
    """The same, with the tokens of each rank and E / ranks of the experts there: to them, and back, by all-to-alls."""
    world = group.size()
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=E)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)  # (ranks, experts here)
    sent, received = counts.view(world, -1).sum(1).tolist(), theirs.view(world, -1).sum(1).tolist()
    rows = all_to_all_single_autograd(x[order], received, sent, group)
    expert = torch.arange(E // world, device=x.device).repeat(world).repeat_interleave(theirs)
    here_order = expert.argsort(stable=True)
    y = product(rows[here_order], ends(theirs.view(world, -1).sum(0)))
    back = torch.empty_like(y).index_copy(0, here_order, y)
    back = all_to_all_single_autograd(back, sent, received, group)
    return torch.empty_like(back).index_copy(0, order, back)


ACTIVATIONS = {"W4A16": None, "W4A4, row-scaled": QuantizeSpec(row_scaled=True), "W4A4": QuantizeSpec()}


@on_ranks(2, 3, cuda=True)
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_each_rank_has_some_experts(activation):
    rank, world, mesh = dist.get_rank(), dist.get_world_size(), mesh_of_all()
    torch.manual_seed(1)
    weights = torch.randn(E, N, K).bfloat16() * torch.arange(1, E + 1).view(E, 1, 1)
    whole = quantize_experts(weights.to(here()), activation_spec=activation)
    mine = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None).to_local()
    assert isinstance(mine, NVFP4Tensor) and mine.per_tensor_scale.shape == (E // world, 1)
    x, chosen = tokens(60)
    expected = by_expert(x, chosen, lambda rows, offs: torch._grouped_mm(rows, whole.mT, offs=offs))
    x, chosen = x.chunk(world)[rank], chosen.chunk(world)[rank]

    def product(rows, offs):
        dynamic = activation is not None and not activation.row_scaled
        experts = share_amax(mine, rows, offs, mesh) if dynamic else mine
        return torch._grouped_mm(rows, experts.mT, offs=offs)

    y = over_ranks(x, chosen, product, mesh.get_group())
    assert torch.equal(y, expected.chunk(world)[rank])


@on_ranks(2)
def test_the_amax_covers_the_rows_of_all_ranks():
    """Rows behind the last group, of another magnitude, decide nothing."""
    experts = quantize_experts(torch.randn(2, N, K), activation_spec=QuantizeSpec())
    rows = torch.full((6, K), 1.0 + dist.get_rank())
    rows[4:] = 100.0
    shared = share_amax(experts, rows, ends(torch.tensor([2, 2])), mesh_of_all())
    assert shared.activation_amax.item() == 2.0
    for other, message in (
        (experts._replace(activation_spec=None), "are dense"),
        (experts._replace(activation_spec=QuantizeSpec(row_scaled=True)), "have one amax per row"),
        (shared, "have a calibrated amax"),
    ):
        with pytest.raises(ValueError, match=message):
            share_amax(other, rows, ends(torch.tensor([2, 2])), mesh_of_all())


@on_ranks(2, cuda=True)
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_that_train(recipe):
    """y, dx and dw in all bits, random ones included."""
    rank, world, mesh = dist.get_rank(), dist.get_world_size(), mesh_of_all()
    state = torch.tensor([7, 3], device=here())
    torch.manual_seed(1)
    weights = torch.randn(E, N, K).bfloat16().to(here())
    first = rank * E // world
    whole, mine = (w.clone().requires_grad_() for w in (weights, weights.chunk(world)[rank]))
    x, chosen = tokens(256)
    dy = torch.randn(256, N, generator=torch.Generator().manual_seed(5)).bfloat16().to(here())
    x.requires_grad_()
    expected = by_expert(x, chosen, lambda rows, offs: grouped_linear(rows, whole, offs, recipe, rng_state=state))
    expected.backward(dy)
    x_, chosen, dy = (t.detach().chunk(world)[rank] for t in (x, chosen, dy))
    x_.requires_grad_()

    def product(rows, offs):
        return grouped_linear(rows, mine, offs, recipe, rng_state=state, first_expert=first)

    y = over_ranks(x_, chosen, product, mesh.get_group())
    y.backward(dy)
    assert torch.equal(y, expected.chunk(world)[rank])
    assert torch.equal(x_.grad, x.grad.chunk(world)[rank])
    assert torch.equal(mine.grad, whole.grad.chunk(world)[rank])
    assert not torch.equal(whole.grad[0], whole.grad[1]) and bool((whole.grad[-1] == 0).all())


@on_ranks(2, cuda=True)
def test_every_expert_is_sharded_over_the_ranks():
    """Tensor parallelism: outputs of the first matrix, inputs of the second."""
    rank, world, mesh = dist.get_rank(), dist.get_world_size(), mesh_of_all()
    torch.manual_seed(1)
    up, down = (quantize_experts(torch.randn(E, *shape).to(here())) for shape in ((128, K), (K, 128)))
    x, chosen = tokens(60)
    offs, rows = ends(torch.bincount(chosen, minlength=E)), x[chosen.argsort()].float()
    hidden = torch._grouped_mm(rows, up.mT, offs=offs)
    expected = torch._grouped_mm(hidden.relu(), down.mT, offs=offs)
    mine = [distribute_tensor(w, mesh, [Shard(dim)]).to_local() for w, dim in ((up, 1), (down, 2))]
    assert [w.shape for w in mine] == [(E, 128 // world, K), (E, K, 128 // world)]
    part = torch._grouped_mm(rows, mine[0].mT, offs=offs)
    assert torch.equal(part, hidden.chunk(world, 1)[rank])
    y = torch._grouped_mm(part.relu(), mine[1].mT, offs=offs)
    dist.all_reduce(y)
    assert (y - expected).norm() < 1e-6 * expected.norm()
