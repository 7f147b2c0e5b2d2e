"""Training with codes and random bits that are independent of the number of ranks."""

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
    """Let a model's NVFP4 training linears quantize the tokens of all ranks of a mesh as one batch.

    Rank i of n has the i-th of n equal shards of the step's tokens: with ``fully_shard`` and
    DistributedDataParallel, these are the ranks' batches in the order of the ranks. The amaxes of x, of dy, and of
    their transposes are then reduced over all ranks (one all-reduce of two numbers for x and one for dy, per linear and
    step), and random bits depend on global offsets. The codes equal those of one rank with the full batch, provided
    that dy does: divide the loss by the tokens of all ranks and sum the gradients. If n is a power of 2, dividing the
    loss by the tokens of one rank gives the same codes.

    With context parallelism, ranks share the sequence: call this again with that mesh and ``dim=1``, after the call for
    the batch, if there is one. With load balancing, a rank can have several ``chunks`` of a sequence.

    Without this call, each rank quantizes its batch with its own amax, without an all-reduce.

    Args:
        model: a model with NVFP4 training linears, before or after ``fully_shard``.
        mesh: a one-dimensional mesh; all its ranks call this. For HSDP, the mesh of all ranks, ``mesh._flatten()``.
        dim: the sharded dimension of the linears' inputs (batch, sequence, features) or (tokens, features).
        chunks: this rank's chunks, in local order, of ``len(chunks) * n`` equal chunks of dimension dim; (i, 2n-1-i) is
            torch's head-tail balance. By default, rank i has chunk i of n.

    Raises:
        ValueError: if the mesh has several dimensions, the ranks' chunks do not contain each chunk once, the ranks'
            recipes differ, or another mesh shards that dimension already; the message names the linear.
        ValueError: during a step, if the tokens of a rank or of one of its chunks are not a multiple of 16 (128 for
            EDEN).

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
        axis = axis._replace(groups=(_new_group(group, torch.device(mesh.device_type)),))
    for linear in linears.values():
        linear.sharding = linear.sharding.with_tokens(TokenSharding(axis, dim, tuple(chunks)))


def _check_shared(name: str, sharding: LinearSharding, dim: int, group: dist.ProcessGroup) -> None:
    """Raise a ValueError if another mesh shards the dimension, because the new sharding replaces the old one."""
    for tokens in sharding.token_shardings:
        is_shared = tokens.dim == dim and tokens.axis.ranks > 1
        group_names: Any = tokens.axis.groups if is_shared else ()  # GroupNames, which torch 2.11 does not have
        for group_name in group_names:
            ranks = dist.get_process_group_ranks(_resolve_process_group(group_name))
            if ranks != dist.get_process_group_ranks(group):
                raise ValueError(
                    f"ranks {ranks} share dimension {dim} of {name}'s tokens already: give one mesh of all ranks that "
                    "share it, mesh['replicate', 'shard']._flatten() for instance"
                )


def _check_chunks(local: tuple[int, ...], group: dist.ProcessGroup) -> None:
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, local, group)
    chunks = sorted(chunk for of_rank in by_rank for chunk in of_rank)
    if len({len(of_rank) for of_rank in by_rank}) > 1 or chunks != list(range(len(chunks))):
        raise ValueError(
            f"the ranks have the chunks {by_rank}, which do not contain each of the {len(chunks)} chunks once: give "
            "each rank equally many, and each chunk to one rank"
        )


def axis_of(mesh: DeviceMesh) -> ShardedDim:
    """Return this rank's shard of a dimension that a one-dimensional mesh shards; raise a ValueError otherwise."""
    if mesh.ndim != 1:
        raise ValueError(
            f"a mesh of one dimension is needed, and {mesh} has {mesh.ndim}: select one, mesh['dp'] for instance, or "
            "flatten them, mesh._flatten()"
        )
    return ShardedDim(mesh.get_local_rank(), mesh.size(), (mesh.get_group().group_name,))


def _new_group(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of a new group of the same ranks, whose collectives do not wait for FSDP2's all-gathers."""
    new_group = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=group._get_backend(device).options._timeout,
        use_local_synchronization=True,
        group_desc="NVFP4 amaxes",
    )
    return new_group.group_name


def seed_rounding(model: nn.Module, seed: int, step: int = 0) -> None:
    """Let a model's NVFP4 training linears derive random bits from a seed, their names and the step.

    torch's generator is no longer used. The rounding state of a run is this seed and the step: it is equal on all
    ranks, and a run can resume on another number of ranks. Call :func:`set_step` before each step; with gradient
    accumulation, each micro-batch is a step. A layer that a step calls several times has other bits at each call, and
    cannot be in an activation checkpoint.

    Raises:
        ValueError: if no linear of the model trains in NVFP4.
    """
    for name, linear in training_linears(model).items():
        linear.rounding_state = rng_state_of("layer", seed, name, step, linear.weight.device)
        linear.calls = 0


def set_step(model: nn.Module, step: int) -> None:
    """Set the step from which :func:`seed_rounding` derives random bits.

    Raises:
        RuntimeError: if :func:`seed_rounding` was not called.
    """
    for name, linear in training_linears(model).items():
        if linear.rounding_state is None:
            raise RuntimeError(f"{name} has no seed: call distributed.seed_rounding(model, seed) once, before set_step")
        linear.rounding_state[1].fill_(step)
        linear.calls = 0
