"""Gradients reduced over the ranks as NVFP4: 0.56 bytes an element on the wire, unbiased.

A rank quantizes its gradient stochastically, with block scales rounded up so that nothing clips, and sends each other
rank its piece. The receiver decodes the pieces and adds them in float32, in the order of the ranks. So each summand is
rounded once, never on the way, and the expectation is the exact sum.
"""

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
"""One tile of swizzled scales: pieces that are whole tiles lie one behind the other in codes and in scales."""
TRAILER = 16
"""Bytes behind a piece's codes and scales: its per-tensor scale, and room that keeps the next piece aligned."""


def reduce_gradients_in_nvfp4(model: nn.Module, seed: int = 0) -> "NVFP4Reduction":
    """Let a sharded or replicated model reduce its gradients as NVFP4, from now on.

    Args:
        model: a module after ``fully_shard``, all of whose FSDP modules are meant; or a DistributedDataParallel, which
            sends the sum on as NVFP4, too. All ranks call this with the same seed.
        seed: of the stochastic rounding. Its bits follow from the seed, the rank and the number of the reduction; to go
            on as an interrupted run would have, set the ``calls`` of what is returned.

    Returns:
        what does it, which counts ``calls`` and ``sent_bytes``.

    Raises:
        ValueError: the model is neither.

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
            f"{type(model).__name__} is neither sharded by fully_shard nor a DistributedDataParallel: "
            "make it one of them first"
        )
    for module in sharded:
        module.set_custom_reduce_scatter(reduction)
    return reduction


class NVFP4Reduction(ReduceScatter):
    """A reduce-scatter by an all-to-all of quantized pieces: what ``set_custom_reduce_scatter`` of FSDP2 takes."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.calls = 0
        self.sent_bytes = 0
        """Bytes that this rank has sent to others."""
        self.group: dist.ProcessGroup | None = None  # of DDP's replicas; FSDP names it in each call
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream in which DDP's buckets are reduced."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer as any other."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """output (n,) = this rank's piece of the sum, or mean, of all ranks' inputs (ranks * n,). In stream order."""
        world = group.size()
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"gradients in NVFP4 are summed or averaged, and FSDP asks for {op}: call "
                "set_force_sum_reduction_for_comms(True) on the FSDP modules, which divides apart"
            )
        sent = self.encode(input_tensor.view(world, -1), group)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self.sent_bytes += sent.numel() // world * (world - 1)
        total = decoded_sum(received, output_tensor.numel())
        if op == dist.ReduceOp.AVG:
            torch.div(total, world, out=output_tensor)  # and cast, in one pass
        else:
            output_tensor.copy_(total)

    def encode(self, pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Pieces (P, n) as messages (P, bytes), with fresh random bits."""
        state = rng_state_of(self.seed, f"gradients of rank {group.rank()}", self.calls, pieces.device)
        self.calls += 1
        return encode(pieces, state)


def encode(pieces: Tensor, rng_state: Tensor) -> Tensor:
    """Pieces (P, n) as messages (P, bytes); one amax for all, and random bits by the flat index in whole tiles."""
    count, columns = pieces.shape
    missing = -columns % (ROWS * COLUMNS)
    tiles = (pad(pieces, (0, missing)) if missing else pieces).reshape(-1, COLUMNS)  # pad copies where none is missing
    qdata, scale, per_tensor_scale = torch.ops.nvfp4.quantize(tiles, None, rng_state, SPEC.pack())
    trailer = pad(per_tensor_scale.reshape(1).view(torch.uint8), (0, TRAILER - 4)).expand(count, TRAILER)
    return torch.cat((qdata.view(count, -1), scale.view(torch.uint8).view(count, -1), trailer), dim=1)


def decode(message: Tensor, columns: int) -> Tensor:
    """The piece (n,) of one message (bytes,), float32."""
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
    """The sum (n,) of the pieces in messages (ranks, bytes): float32, in the order of the ranks."""
    total = decode(messages[0], columns)
    for message in messages[1:]:
        total += decode(message, columns)
    return total


def _reduce_bucket(reduction: NVFP4Reduction, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's hook. On CUDA it runs in a stream of its own, so that the backward goes on meanwhile."""
    flat = bucket.buffer()
    if not flat.is_cuda:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(_mean(reduction, flat))
        return done
    stream = reduction.stream(flat.device)
    stream.wait_stream(torch.cuda.current_stream(flat.device))
    flat.record_stream(stream)
    done = torch.futures.Future(devices=[flat.device])
    with torch.cuda.stream(stream):
        done.set_result(_mean(reduction, flat))
    return done


def _mean(reduction: NVFP4Reduction, flat: Tensor) -> Tensor:
    """The mean over all ranks, in place: pieces to their ranks, whose means go to all; every rank decodes the same."""
    group = reduction.group
    assert group is not None
    world = group.size()
    columns = -(-flat.numel() // world)
    sent = reduction.encode(pad(flat, (0, columns * world - flat.numel())).view(world, -1), group)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    one = reduction.encode(decoded_sum(received, columns).view(1, -1) / world, group)
    everyone = torch.empty_like(sent)
    dist.all_gather_into_tensor(everyone, one, group=group)
    reduction.sent_bytes += 2 * (world - 1) * one.numel()
    means = torch.cat([decode(message, columns) for message in everyone])
    return flat.copy_(means[: flat.numel()])
