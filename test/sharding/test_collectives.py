"""What shards are joined to by collectives: sequences, their codes and gradients, amaxes, and FSDP2's messages."""

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import mesh_of_all, of_all_ranks, on_ranks
from torch import nn

from nvfp4_tensor import QuantizeSpec, quantize, quantize_experts
from nvfp4_tensor.numerics.codes import Codes
from nvfp4_tensor.sharding import fsdp_transport
from nvfp4_tensor.sharding.layout import (
    UNSHARDED_DIM,
    LinearSharding,
    MatrixSharding,
    ShardedDim,
    TokenSharding,
    agree_on_amax,
    all_reduce_amax,
    compare_token_counts,
)
from nvfp4_tensor.sharding.sequence import (
    GatheredShape,
    gather_if_sharded,
    gather_operands,
    gather_shape_only,
    gather_tokens,
)

pytestmark = pytest.mark.slow


def axis():
    group = mesh_of_all().get_group()
    return ShardedDim(dist.get_rank(), dist.get_world_size(), (group.group_name,))


def same_bytes(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dim", [0, 1])
def test_sequences_are_gathered_and_their_gradients_summed(dim):
    rank, world, sharding = dist.get_rank(), dist.get_world_size(), TokenSharding(axis(), dim)
    whole = normal(6, 6, 5)
    x = whole.chunk(world, dim)[rank].clone().requires_grad_()
    y, shape_only = gather_tokens(x, sharding), gather_shape_only(x, sharding)
    assert torch.equal(y, whole) and shape_only.shape == whole.shape and shape_only.stride() == (0, 0, 0)
    linear = LinearSharding(sequence=sharding) if world > 1 else LinearSharding()
    assert torch.equal(gather_if_sharded(x, linear), whole if world > 1 else x)
    for gathered in (y, shape_only):
        (dx,) = torch.autograd.grad(gathered, x, (rank + 1) * whole)
        torch.testing.assert_close(dx, x.detach() * sum(range(1, world + 1)))


@on_ranks(2, 3)
@pytest.mark.parametrize("row_scaled", [False, True])
def test_codes_of_sequences_are_those_of_the_whole(row_scaled):
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = normal(2, 16 * world, 48)
    shard, spec, amax = whole.chunk(world, 1)[rank], QuantizeSpec(row_scaled=row_scaled), whole.abs().amax()
    gathered = GatheredShape.of(shard, TokenSharding(axis(), 1))

    def operands(x, with_t=True):
        x = x.reshape(-1, 48)
        x_t = quantize(x.t().contiguous(), amax=amax)
        pair = quantize(x, spec, amax=None if row_scaled else amax), x_t if with_t else None
        return [None if t is None else Codes(t.qdata, t.scale, t.per_tensor_scale) for t in pair]

    for with_t in (True, False):
        for got, expected in zip(
            gather_operands(*operands(shard, with_t), gathered), operands(whole, with_t), strict=True
        ):
            assert (got is None) == (expected is None)
            for part, wanted in zip(got or (), expected or (), strict=True):
                assert part.shape == wanted.shape and same_bytes(part, wanted)


@on_ranks(2, 3)
def test_amaxes_are_those_of_all_ranks_that_have_as_many_rows():
    rank, own = dist.get_rank(), axis()
    amax, most = torch.tensor([1.0 + rank, -float(rank)]), torch.tensor([float(dist.get_world_size()), 0.0])
    assert torch.equal(all_reduce_amax(amax, (own, UNSHARDED_DIM)), most)
    assert torch.equal(all_reduce_amax(amax, (UNSHARDED_DIM,)), amax)
    rows, columns = MatrixSharding(own, UNSHARDED_DIM), MatrixSharding(UNSHARDED_DIM, own)
    assert torch.equal(agree_on_amax(amax, torch.zeros(4, 2), rows), most)
    assert torch.equal(agree_on_amax(amax, torch.zeros(4 + rank, 2), columns), most)
    compare_token_counts(rows, torch.zeros(4, 2), QuantizeSpec(), None)
    with pytest.raises(RuntimeError, match="ranks have unequal numbers of tokens"):  # in one collective with amaxes
        if rank:
            compare_token_counts(rows, torch.zeros(5, 2), QuantizeSpec(), QuantizeSpec())
        else:
            agree_on_amax(amax, torch.zeros(4, 2), rows)
    for specs in ((QuantizeSpec(), None), (QuantizeSpec(row_scaled=True),)):
        with pytest.raises(RuntimeError, match="ranks have unequal numbers of tokens"):
            compare_token_counts(rows, torch.zeros(4 + (rank > 0), 2), *specs)


@on_ranks(1, 2)
def test_fsdps_messages_join_to_the_full_weight():
    """Scales in tiles and in rows; one scale, one of each row, and one of each expert; then once more, in place."""
    rank, world, mesh = dist.get_rank(), dist.get_world_size(), mesh_of_all()
    for make in (
        lambda x: quantize(x[:256]),
        lambda x: quantize(x[:96]),
        lambda x: quantize(x[:96], QuantizeSpec(row_scaled=True)),
        lambda x: quantize_experts(x.view(4, 64, 64)),
    ):
        out = None
        for factor in (1.0, 2.0):
            whole = make(normal(256, 64) * factor)
            shard = whole.split(len(whole) // world)[rank].clone()
            inputs, metadata = fsdp_transport.pre_all_gather(shard, mesh, whole.shape, nn.Linear(64, 96))
            assert metadata.has_one_scale == (whole.per_tensor_scale.dim() == 0)
            outputs = tuple(torch.cat(each) for each in zip(*of_all_ranks(inputs), strict=True))
            if out is None:
                out, storages = fsdp_transport.post_all_gather(shard, outputs, metadata, torch.bfloat16, None)
                assert len(storages) == (not metadata.is_swizzled) and out.dtype == torch.bfloat16
            else:
                out.qdata.copy_(outputs[0])  # as FSDP2 does with what it has gathered
                if metadata.is_swizzled and world > 1:
                    out.scale.view(torch.uint8).copy_(outputs[1].view_as(out.scale.view(torch.uint8)))
                assert fsdp_transport.post_all_gather(shard, outputs, metadata, torch.bfloat16, out) is None
            for part in ("qdata", "scale", "per_tensor_scale"):
                assert same_bytes(getattr(out, part), getattr(whole, part)), (part, factor, whole.shape)


@on_ranks(2)
def test_messages_of_shards_with_different_scales_raise():
    shard = quantize(normal(16, 64) * (1 + dist.get_rank()))
    inputs, metadata = fsdp_transport.all_gather_inputs(shard, 2)
    outputs = tuple(torch.cat(each) for each in zip(*of_all_ranks(inputs), strict=True))
    assert len(fsdp_transport.DIFFERENT_SCALES) < 255  # what torch._assert_async takes on CUDA
    with pytest.raises(RuntimeError, match="different per-tensor scales"):
        fsdp_transport.post_all_gather(shard, outputs, metadata, torch.bfloat16, None)
