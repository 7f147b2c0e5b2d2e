"""What shards are joined to by FSDP2's messages."""

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import mesh_of_all, of_all_ranks, on_ranks
from torch import nn

from nvfp4_tensor import QuantizeSpec, quantize, quantize_experts
from nvfp4_tensor.sharding import fsdp_transport

pytestmark = pytest.mark.slow


def same_bytes(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@on_ranks(1, 2)
def test_fsdps_messages_join_to_the_full_weight():
    """Scales in tiles and in rows; one scale, one of each row, and one of each expert; then once more, in place."""
    assert len(fsdp_transport.DIFFERENT_SCALES) < 255  # what torch._assert_async takes on CUDA
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
