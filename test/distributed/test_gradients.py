"""Reduction of gradients in NVFP4 with FSDP2 and DDP: values, bytes, and unbiasedness."""

import copy

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import here, of_all_ranks, on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nvfp4_tensor import QuantizeSpec, quantize
from nvfp4_tensor.distributed import NVFP4Reduction, reduce_gradients_in_nvfp4
from nvfp4_tensor.distributed.gradients import decode, decoded_sum, encode
from nvfp4_tensor.numerics.random_state import rng_state_of

pytestmark = pytest.mark.slow

UNCLIPPED = QuantizeSpec(round_mode="stochastic", scale_rounding="up")


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunks, columns, dtype",
    [(1, 1, torch.float32), (2, 8192, torch.bfloat16), (2, 8193, torch.float32), (3, 24_592, torch.bfloat16)],
)
def test_a_message_has_the_codes_of_the_contract(chunks, columns, dtype):
    x = torch.randn(chunks, columns).to(dtype) * 1e-3
    state = torch.tensor([7, 3])
    messages = encode(x, state)
    tiles = -(-columns // 8192)
    assert messages.shape == (chunks, tiles * (4096 + 512) + 16)
    padded = nn.functional.pad(x, (0, tiles * 8192 - columns)).view(-1, 64)
    whole = quantize(padded, UNCLIPPED, rng_state=state).dequantize(torch.float32).view(chunks, -1)[:, :columns]
    assert torch.equal(torch.stack([decode(message, columns) for message in messages]), whole)
    assert torch.equal(decoded_sum(messages, columns), sum(whole[1:], start=whole[0]))


def test_nan_and_infinity_are_kept():
    x = torch.ones(2, 100)
    x[0, 3], x[1, 50] = float("nan"), float("inf")
    total = decoded_sum(encode(x, torch.tensor([0, 0])), 100)
    assert total[:16].isnan().all() and total[48:64].isnan().all() and torch.equal(total[16:48], torch.full((32,), 2.0))


def mean_error(draws, damage=1.0):
    """Standard errors by which the mean of some elements lies off, at most; damage: what each draw is multiplied by."""
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 0, 512)
    exact = x.double().sum(0)
    sums, squares = torch.zeros(512, dtype=torch.float64), torch.zeros(512, dtype=torch.float64)
    for draw in range(draws):
        value = decoded_sum(encode(x, torch.tensor([1, draw])), 512).double() * damage
        sums += value
        squares += value**2
    mean = sums / draws
    error = ((squares / draws - mean**2).clamp(min=0) / draws).sqrt()
    moving = error > 0
    assert moving.float().mean() > 0.9
    torch.testing.assert_close(mean[~moving], exact[~moving] * damage, rtol=1e-6, atol=1e-9)
    return ((mean - exact).abs() / error)[moving].max().item()


def test_the_sum_is_unbiased():
    """512 elements, 2,000 draws, normal means: one beyond 6.5 standard errors has probability 4e-8."""
    assert mean_error(2000) < 6.5
    assert mean_error(2000, damage=0.98) > 6.5


# --- FSDP2 and DDP ---------------------------------------------------------------------------------------------------


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 200), nn.ReLU(), nn.Linear(200, 31)).to(here())


def inputs(rank):
    return torch.randn(16, 96, generator=torch.Generator().manual_seed(rank)).to(here())


def dense_gradients():
    """Of each rank's inputs, and their mean."""
    model, gradients = make(), []
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        model(inputs(rank)).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    return [sum(g) / len(g) for g in zip(*gradients, strict=True)]


@on_ranks(2, cuda=True)
@pytest.mark.parametrize("engine", ["FSDP2", "DDP"])
def test_both_ranks_have_the_same_mean(engine):
    model = make() if engine == "FSDP2" else DistributedDataParallel(make())
    if engine == "FSDP2":
        fully_shard(model)
    reduction = reduce_gradients_in_nvfp4(model, seed=5)
    messages = 1 if engine == "FSDP2" else 2  # DDP's mean is sent back

    def step():
        model.zero_grad()
        model(inputs(dist.get_rank())).square().mean().backward()
        return [p.grad.full_tensor() if engine == "FSDP2" else p.grad.clone() for p in model.parameters()]

    seen = []
    for call in range(2):
        seen.append(step())
        for g, mean in zip(seen[-1], dense_gradients(), strict=True):
            assert 0 < (g - mean).norm() < (0.2 if engine == "FSDP2" else 0.3) * mean.norm()
        assert reduction.calls == messages * (call + 1)
    assert not torch.equal(seen[0][0], seen[1][0])  # other bits in each step
    sizes = [-(-p.shape[0] // 2) * p[0].numel() if engine == "FSDP2" else p.numel() for p in make().parameters()]
    elements = sum(sizes) if engine == "FSDP2" else -(-sum(sizes) // 2)
    assert reduction.sent_bytes == 2 * messages * (-(-elements // 8192) * 8192 * 9 // 16 + 16)
    reduction.calls = messages
    assert torch.equal(step()[0], seen[1][0])  # resumed
    one, other = of_all_ranks([g.cpu() for g in seen[1]])
    assert all(map(torch.equal, one, other))


@on_ranks(2)
def test_unsupported_reductions_raise():
    model = make()
    with pytest.raises(ValueError, match="neither sharded by fully_shard nor a DistributedDataParallel"):
        reduce_gradients_in_nvfp4(model)
    reduction = reduce_gradients_in_nvfp4(fully_shard(copy.deepcopy(model)))
    assert reduction.seed == NVFP4Reduction().seed == 0
    flat = torch.ones(64)
    with pytest.raises(ValueError, match="set_force_sum_reduction_for_comms"):
        reduction(flat[:32], flat, dist.group.WORLD, dist.ReduceOp.MAX)


@on_ranks(1, 3)
@pytest.mark.parametrize(("dtype", "columns"), [(torch.bfloat16, 8192), (torch.float32, 8193)])
def test_a_chunk_is_summed_divided_and_cast(dtype, columns):
    """The reduction itself, of whole tiles and of others: its message, decoded, summed, divided and cast."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        everyone = [
            torch.randn(world, columns, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)
        ]
        messages = [
            encode(x, rng_state_of("gradients", 4, f"rank {r}", 0, x.device))[rank] for r, x in enumerate(everyone)
        ]
        total = decoded_sum(torch.stack(messages), columns)
        out = torch.empty(columns, dtype=dtype)
        NVFP4Reduction(seed=4)(out, everyone[rank].flatten(), dist.group.WORLD, op)
        divisor = world if op == dist.ReduceOp.AVG else 1
        assert torch.equal(out, (total / divisor).to(dtype))
        exact = sum(x[rank].float() for x in everyone) / divisor
        assert 0 < (out.float() - exact).norm() < 0.2 * exact.norm()
