"""Training whose codes and random bits do not know over how many ranks its tokens are shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from nvfp4_tensor.distributed.agreement import check_agreement
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.sharding.layout import LinearSharding, ShardedDim, TokenSharding
from nvfp4_tensor.training.config import training_linears


def set_token_sharding(model: nn.Module, mesh: DeviceMesh, *, dim: int = 0, chunks: Sequence[int] = ()) -> None:
    """Let a model's NVFP4 training linears take their tokens for pieces of one step, shared by the ranks of a mesh.

    Rank i of n has the i-th of n equal pieces of the step's tokens: with ``fully_shard`` and with
    DistributedDataParallel each rank's batch, in the order of the ranks. The amax of x and of dy, and of their
    transposes, is then that of all ranks (one all-reduce of two numbers for x and one for dy, a linear and step), and
    blocks draw the bits of their place in the whole. The codes are those of one rank with the whole batch where dy is:
    divide the loss by the tokens of all ranks and let gradients be summed, or by those of one rank where n is a power
    of 2.

    With context parallelism ranks share the sequence: a second call with its mesh and ``dim=1``, after that for the
    batch if ranks share that too. A rank's part of a sequence can be several ``chunks``, as load balancing has it.

    Without this call each rank's batch is a tensor of its own, which costs no all-reduce.

    Args:
        model: with NVFP4 training linears, before or after ``fully_shard``.
        mesh: one dimension; all its ranks call this. With HSDP that of all ranks, ``mesh._flatten()``.
        dim: what they share of the linears' inputs (batch, sequence, features), or (tokens, features).
        chunks: of ``len(chunks) * n`` equal chunks of dimension dim those that this rank has, in its order; (i, 2n-1-i)
            is torch's head-tail balance. By default it has the i-th of n.

    Raises:
        ValueError: the mesh has more dimensions, the ranks' chunks are not each of them once, the ranks' recipes
            differ, or other ranks share that dimension already; the message names the linear.
        In a step, ValueError: a rank's tokens, or each of its chunks, do not fill whole blocks of 16 (of 128 for EDEN).

    >>> set_token_sharding(model, mesh["dp"])
    >>> set_token_sharding(model, mesh["cp"], dim=1, chunks=(i, 2 * n - 1 - i))
    >>> seed_rounding(model, seed=0)
    """
    axis, group = axis_of(mesh), mesh.get_group()
    linears = training_linears(model)
    check_agreement("the recipe", {name: m.active_recipe for name, m in linears.items()}, group)
    if dim < 0:
        raise ValueError(f"dim counts from the first dimension of an input, 0 for its batch, got {dim}")
    for name, linear in linears.items():
        _check_shared(name, linear.sharding, dim, group)
    _check_chunks(tuple(chunks), group)
    if axis.ranks > 1:
        axis = axis._replace(groups=(_apart(group, torch.device(mesh.device_type)),))
    for linear in linears.values():
        linear.sharding = linear.sharding.with_tokens(TokenSharding(axis, dim, tuple(chunks)))


def _check_shared(name: str, sharding: LinearSharding, dim: int, group: dist.ProcessGroup) -> None:
    """A second call for a dimension takes the place of the first, and of another mesh would forget its ranks."""
    for share in sharding.token_shardings:
        for before in share.axis.groups if share.dim == dim and share.axis.ranks > 1 else ():
            named: Any = before  # a GroupName, which torch 2.11 does not have
            ranks = dist.get_process_group_ranks(_resolve_process_group(named))
            if ranks != dist.get_process_group_ranks(group):
                raise ValueError(
                    f"ranks {ranks} share dimension {dim} of {name}'s tokens already: give one mesh of all ranks that "
                    "share it, mesh['replicate', 'shard']._flatten() for instance"
                )


def _check_chunks(mine: tuple[int, ...], group: dist.ProcessGroup) -> None:
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group)
    each = sorted(chunk for chunks in everyone for chunk in chunks)
    if len({len(chunks) for chunks in everyone}) > 1 or each != list(range(len(each))):
        raise ValueError(
            f"the ranks have the chunks {everyone}, which are not each of {len(each)} once, and equally many a rank"
        )


def axis_of(mesh: DeviceMesh) -> ShardedDim:
    """This rank's piece of what a mesh of one dimension shares; ValueError for another mesh."""
    if mesh.ndim != 1:
        raise ValueError(
            f"a mesh of one dimension is needed, and {mesh} has {mesh.ndim}: name one of them, mesh['dp'] for "
            "instance, or make them one, mesh._flatten()"
        )
    return ShardedDim(mesh.get_local_rank(), mesh.size(), (mesh.get_group().group_name,))


def _apart(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of a group of the same ranks with collectives of its own, that do not wait behind FSDP2's gathers."""
    apart = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=group._get_backend(device).options._timeout,
        use_local_synchronization=True,
        group_desc="NVFP4 amaxes",
    )
    return apart.group_name


def seed_rounding(model: nn.Module, seed: int, step: int = 0) -> None:
    """Let a model's NVFP4 training linears draw by a seed, their names and the step, and no more by torch's generator.

    The state of all rounding in a run is then this seed and the step: the same on every rank, and after a restart on
    another number of them. Call :func:`set_step` before each step; with gradient accumulation each micro-batch counts.

    Raises:
        ValueError: no linear of the model trains in NVFP4.
    """
    for name, linear in training_linears(model).items():
        linear.rounding_state = rng_state_of(seed, name, step, _device_of(linear))


def set_step(model: nn.Module, step: int) -> None:
    """The step that :func:`seed_rounding`'s draws are of, from now on.

    Raises:
        RuntimeError: the model has no seed yet.
    """
    for name, linear in training_linears(model).items():
        if linear.rounding_state is None:
            raise RuntimeError(f"{name} has no seed: call distributed.seed_rounding(model, seed) once, before set_step")
        linear.rounding_state[1].fill_(step)


def _device_of(linear: nn.Module) -> torch.device:
    return next(linear.parameters()).device
