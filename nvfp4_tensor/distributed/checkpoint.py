"""Sharded state dicts of plain tensors for torch.distributed.checkpoint, which can load them on any number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.plain_state_dict import part_names
from nvfp4_tensor.numerics.layout import BLOCK, ceil_to
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


def to_plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state dict as :func:`nvfp4_tensor.checkpoints.to_plain` does; sharded weights become sharded tensors.

    The codes and scales of a DTensor are DTensors with the same sharding, so that torch.distributed.checkpoint can
    reshard them. A full state dict of them is what ModelOpt writes. Codes share memory with the weights; block scales
    are copies.

    Raises:
        ValueError: if columns are sharded inside blocks of 16.

    Example::

        dcp.save(distributed.to_plain(model.state_dict()), checkpoint_id="step_100")

        plain = distributed.to_plain(model.state_dict())  # on any number of ranks
        dcp.load(plain, checkpoint_id="step_100")
        model.load_state_dict(distributed.from_plain(plain))
    """
    plain: dict[str, Any] = {}
    for name, value in state_dict.items():
        if isinstance(value, DTensor) and isinstance(value._local_tensor, NVFP4Tensor):
            plain.update(_plain(name, value))
        else:
            plain.update(checkpoints.to_plain({name: value}))
    return plain


def from_plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Invert :func:`to_plain`, bit for bit.

    Raises:
        ValueError: if the tensors of a weight are missing or do not fit together; the message names the weight.
    """
    sharded = {
        name: part_names(name)
        for name, value in state_dict.items()
        if isinstance(value, DTensor) and part_names(name)["scale"] in state_dict
    }
    parts = {key for name, keys in sharded.items() for key in (name, *keys.values())}
    state = checkpoints.from_plain({name: value for name, value in state_dict.items() if name not in parts})
    weights = {name: _weight(name, keys, state_dict) for name, keys in sharded.items()}
    return {name: weights.get(name, state.get(name)) for name in state_dict if name in weights or name in state}


def _plain(name: str, t: DTensor) -> dict[str, Any]:
    keys, local = part_names(name), t._local_tensor
    assert isinstance(local, NVFP4Tensor)
    _check_columns(name, t)
    parts = checkpoints.to_plain({name: local})
    for key, blocks in ((name, BLOCK // 2), (keys["scale"], 1)):
        columns = ceil_to(t.shape[-1], BLOCK) // BLOCK * blocks
        parts[key] = _sharded(parts[key], t, (*t.shape[:-1], columns))
    if dims := local.per_tensor_scale.dim():  # one for each row, or for each matrix
        shape = (t.shape[0], 1) if dims == 2 else (math.prod(t.shape[:-1]),)
        parts[keys["per_tensor_scale"]] = _sharded(parts[keys["per_tensor_scale"]], t, shape)
    parts[keys["settings"]] = _with_columns(parts[keys["settings"]], t.shape[-1])
    return parts


def _weight(name: str, keys: Mapping[str, str], state_dict: Mapping[str, Any]) -> DTensor:
    codes = state_dict[name]
    present = {key: state_dict[key] for key in (name, *keys.values()) if key in state_dict}
    local = {key: part._local_tensor if isinstance(part, DTensor) else part for key, part in present.items()}
    columns = codes.shape[-1] * 2
    if keys["settings"] in local:
        columns = json.loads(bytes(local[keys["settings"]].tolist()))["columns"]
        if local[name].shape[-1] != codes.shape[-1]:
            local[keys["settings"]] = _with_columns(local[keys["settings"]], local[name].shape[-1] * 2)
    weight = checkpoints.from_plain(local)[name]
    return _sharded(weight, codes, (*codes.shape[:-1], columns))


def _sharded(local: Tensor, like: DTensor, shape: Sequence[int]) -> DTensor:
    """Return a DTensor of that shape with the mesh and sharding of ``like``."""
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    # Scales per row or per matrix lack other dimensions that may be sharded.
    lacks = [isinstance(placement, Shard) and placement.dim >= len(shape) for placement in like.placements]
    placements = [Replicate() if lack else each for each, lack in zip(like.placements, lacks, strict=True)]
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def _with_columns(settings: Tensor, columns: int) -> Tensor:
    changed = {**json.loads(bytes(settings.tolist())), "columns": columns}
    return torch.frombuffer(bytearray(json.dumps(changed).encode()), dtype=torch.uint8)


def _check_columns(name: str, t: DTensor) -> None:
    last = t.dim() - 1
    for size, placement in zip(t.device_mesh.shape, t.placements, strict=True):
        if isinstance(placement, Shard) and placement.dim == last and t.shape[-1] % (BLOCK * size):
            raise ValueError(
                f"{name} has {t.shape[-1]} columns, which {size} ranks cannot share in complete blocks of {BLOCK}: "
                "shard its rows, Shard(0)"
            )
