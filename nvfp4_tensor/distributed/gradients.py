"""Unbiased reduction of gradients in NVFP4, which sends 0.56 bytes per element.

A rank quantizes its gradient stochastically, with block scales rounded up so that no value clips, and sends each other
rank its chunk. The receiver decodes the chunks and adds them in float32, in the order of the ranks. Each summand is
rounded once and sums are not rounded to NVFP4, so the expectation is the exact sum.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from nvfp4_tensor.numerics.choices import RoundingMode, ScaleRounding
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.numerics.spec import QuantizeSpec

SPEC = QuantizeSpec(round_mode=RoundingMode.STOCHASTIC, scale_rounding=ScaleRounding.UP)
ROWS, COLUMNS = 128, 64
"""One tile of swizzled scales. The codes and scales of chunks that consist of complete tiles are contiguous."""
TRAILER = 16
"""The bytes after a chunk's codes and scales: its per-tensor scale, and padding that aligns the next chunk."""


def reduce_gradients_in_nvfp4(model: nn.Module, seed: int = 0) -> "NVFP4Reduction":
    """Let a sharded or replicated model reduce its gradients in NVFP4.

    Args:
        model: a module after ``fully_shard``, which changes all its FSDP modules; or a DistributedDataParallel, which
            also sends the sums in NVFP4. All ranks call this with the same seed.
        seed: the seed of stochastic rounding. Random bits depend on the seed, the rank and the number of the reduction.
            To resume a run, set the returned object's ``calls`` to the value that it had.

    Returns:
        the reduction, which counts ``calls`` and ``sent_bytes``.

    Raises:
        ValueError: if the model is neither.

    >>> reduce_gradients_in_nvfp4(fully_shard(model))
    """
    reduction = NVFP4Reduction(seed)
    if isinstance(model, DistributedDataParallel):
        reduction.group = model.process_group
        model.register_comm_hook(reduction, _reduce_bucket)
        return reduction
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ValueError(
            f"{type(model).__name__} is neither sharded by fully_shard nor a DistributedDataParallel: call "
            "fully_shard(model), or wrap the model in DistributedDataParallel"
        )
    for module in sharded:
        module.set_custom_reduce_scatter(reduction)
    return reduction


class NVFP4Reduction(ReduceScatter):
    """A reduce-scatter as an all-to-all of quantized chunks, for FSDP2's ``set_custom_reduce_scatter``.

    Attributes:
        seed: the seed of stochastic rounding.
        calls: the number of quantizations so far.
        sent_bytes: the number of bytes that this rank has sent to other ranks.
        group: the process group of DDP's replicas; FSDP2 passes a group to each call.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.calls = 0
        self.sent_bytes = 0
        self.group: dist.ProcessGroup | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer; FSDP2 calls this."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's chunk (n,) of the sum, or mean, of all ranks' inputs (ranks * n,) to the output.

        It runs in stream order, also if async_op is set.
        """
        world = group.size()
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"gradients in NVFP4 support sums and averages, but FSDP uses {op}: call "
                "set_force_sum_reduction_for_comms(True) on the FSDP modules, which then divide separately"
            )
        sent = self.encode(input_tensor.view(world, -1), group)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self.sent_bytes += sent.numel() // world * (world - 1)
        total = decoded_sum(received, output_tensor.numel())
        if op == dist.ReduceOp.AVG:
            torch.div(total, world, out=output_tensor)  # divides and casts in one pass
        else:
            output_tensor.copy_(total)

    def encode(self, chunks: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Quantize chunks (P, n) to messages (P, bytes), with new random bits."""
        state = rng_state_of("gradients", self.seed, f"rank {group.rank()}", self.calls, chunks.device)
        self.calls += 1
        return encode(chunks, state)


def encode(chunks: Tensor, rng_state: Tensor) -> Tensor:
    """Quantize chunks (P, n), padded to complete tiles, to messages (P, bytes), with one amax for all chunks."""
    count, columns = chunks.shape
    missing = -columns % (ROWS * COLUMNS)
    tiles = (pad(chunks, (0, missing)) if missing else chunks).reshape(-1, COLUMNS)  # pad(x, (0, 0)) would copy
    qdata, scale, per_tensor_scale = torch.ops.nvfp4.quantize(tiles, None, rng_state, SPEC.pack())
    trailer = pad(per_tensor_scale.reshape(1).view(torch.uint8), (0, TRAILER - 4)).expand(count, TRAILER)
    return torch.cat((qdata.view(count, -1), scale.view(torch.uint8).view(count, -1), trailer), dim=1)


def decode(message: Tensor, columns: int) -> Tensor:
    """Decode one message (bytes,) to its chunk (n,), float32."""
    tiles = -(-columns // (ROWS * COLUMNS))
    qdata, scale, trailer = message.split((tiles * ROWS * COLUMNS // 2, tiles * ROWS * COLUMNS // 16, TRAILER))
    return torch.ops.nvfp4.dequantize(
        qdata.view(-1, COLUMNS // 2),
        scale.view(tiles, 1, 32, 16).view(torch.float8_e4m3fn),
        trailer[:4].view(torch.float32)[0],
        COLUMNS,
        torch.float32,
    ).view(-1)[:columns]


def decoded_sum(messages: Tensor, columns: int) -> Tensor:
    """Return the sum (n,) of the chunks in messages (ranks, bytes), float32, added in the order of the ranks."""
    total = decode(messages[0], columns)
    for message in messages[1:]:
        total += decode(message, columns)
    return total


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _reduce_bucket(reduction: NVFP4Reduction, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket (DDP's communication hook). On CUDA it runs in another stream, in parallel to the backward."""
    flat = bucket.buffer()
    if not flat.is_cuda:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(_mean(reduction, flat))
        return done
    stream = _stream(flat.device)
    stream.wait_stream(torch.cuda.current_stream(flat.device))
    flat.record_stream(stream)
    done = torch.futures.Future(devices=[flat.device])
    with torch.cuda.stream(stream):
        done.set_result(_mean(reduction, flat))
    return done


def _mean(reduction: NVFP4Reduction, flat: Tensor) -> Tensor:
    """Average flat over all ranks, in place.

    Each rank averages its chunk and sends the quantized mean to all ranks, so that all decode the same values.
    """
    group = reduction.group
    assert group is not None
    world = group.size()
    columns = -(-flat.numel() // world)
    sent = reduction.encode(pad(flat, (0, columns * world - flat.numel())).view(world, -1), group)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mean = reduction.encode(decoded_sum(received, columns).view(1, -1) / world, group)
    gathered = torch.empty_like(sent)
    dist.all_gather_into_tensor(gathered, mean, group=group)
    reduction.sent_bytes += 2 * (world - 1) * mean.numel()
    means = torch.cat([decode(message, columns) for message in gathered])
    return flat.copy_(means[: flat.numel()])
