"""How formats store a weight in FP8 beside NVFP4 ones. ModelOpt and compressed-tensors use the same names.

=================  ===================================================================================================
``weight``         float8_e4m3fn (N, K), or experts (E, N, K)
``weight_scale``   a scale per tensor, () or (1,); per channel, (N,) or (N, 1); or per block, as a matrix or
                   (rows, 1, columns, 1). float32, or the dtype of the dense weight; a factor
``input_scale``    the static scale of activations, () or (1,); a factor. If activations are quantized at each call,
                   or are dense, there is none
=================  ===================================================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from nvfp4_tensor.checkpoints.checkpoint import Entry
from nvfp4_tensor.numerics.choices import FP8Activations
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.quantization.names import some
from nvfp4_tensor.tensor.fp8 import E4M3, FP8Spec, FP8Tensor

if TYPE_CHECKING:
    from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint

Shape: TypeAlias = tuple[int, ...]


def encode(name: str, w: FP8Tensor, number: Shape, scales: Shape) -> dict[str, Tensor]:
    """Return the tensors of the weight ``name``, with one scale in the first shape, and several in the second one."""
    keys = keys_of(name)
    is_one = w.scale.numel() == 1 and w.spec.block == (0, 0)
    tensors = {keys["qdata"]: w.qdata, keys["scale"]: w.scale.reshape(number if is_one else scales)}
    return tensors if w.input_scale is None else {**tensors, keys["input_scale"]: w.input_scale.reshape(number)}


def check(entries: Mapping[str, Entry], format: str, named: Callable[[Entry], object] | None = None) -> None:
    """Raise a ValueError with the names of FP8 weights that a format cannot store.

    named: whether it has a name for such a weight; None for a format without FP8.
    """
    found = {name: entry for name, entry in entries.items() if entry.fp8 is not None}
    if found and named is None:
        raise ValueError(
            f"{format} has no weights in FP8, and {some(list(found))} are FP8: choose modelopt or compressed-tensors"
        )
    if unnamed := [f"{name} {entry.fp8}" for name, entry in found.items() if named and not named(entry)]:
        raise ValueError(
            f"{format} has no name for FP8 weights as {some(unnamed)}: weight_only=True keeps their activations dense, "
            "and compressed-tensors has a name for all"
        )


def keys_of(name: str) -> dict[str, str]:
    """Return the names of the tensors of an FP8 weight by what they are."""
    stem = name.removesuffix("weight") if name.rpartition(".")[2] == "weight" else f"{name}_"
    return {"qdata": name, "scale": f"{stem}weight_scale", "input_scale": f"{stem}input_scale"}


def is_stored(checkpoint: FolderCheckpoint, name: str) -> bool:
    """Return whether a tensor is the codes of an FP8 weight."""
    info, scale = checkpoint.shards.info[name], checkpoint.shards.info.get(keys_of(name)["scale"])
    is_weight = name.rpartition(".")[2] == "weight" or (scale is not None and scale.dtype.itemsize > 1)
    return info.dtype == E4M3 and len(info.shape) in (2, 3) and is_weight


def entry_of(checkpoint: FolderCheckpoint, name: str, spec: FP8Spec, static: bool) -> Entry:
    """Return the description of an FP8 weight, from the headers.

    Raises:
        ValueError: a tensor is missing, or has another dtype or shape.
    """
    info, keys = checkpoint.shards.info, keys_of(name)
    codes = info[name]
    wanted = {keys["scale"]: spec.scale_shape(codes.shape)} | ({keys["input_scale"]: (1, 1)} if static else {})
    for key, shape in wanted.items():
        found = info.get(key)
        if found is None or found.dtype not in HIGH_PRECISION_DTYPES or _squeezed(found.shape) != _squeezed(shape):
            where = codes.file if found is None else found.file
            raise ValueError(
                f"{where}: tensor {key}: expected floats {list(shape)} for {name} {list(codes.shape)} in FP8, found "
                f"{found or 'none'}"
            )
    return Entry(shape=codes.shape, dtype=checkpoint.dtype(), fp8=spec, has_input_scale=static, shard=codes.file.name)


def _squeezed(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def decode(name: str, tensors: Mapping[str, Tensor], entry: Entry) -> FP8Tensor:
    """Return the weight of its tensors.

    Raises:
        ValueError: a scale is negative, infinite or NaN.
    """
    assert entry.fp8 is not None
    keys = keys_of(name)
    scale = tensors[keys["scale"]].float().reshape(entry.fp8.scale_shape(entry.shape))
    static = tensors[keys["input_scale"]].float().reshape(()) if entry.has_input_scale else None
    for key, numbers in (("scale", scale), ("input_scale", static)):
        if numbers is not None and not (numbers.isfinite() & (numbers >= 0)).all():
            raise ValueError(f"expected {keys[key]} that is finite and not negative")
    if static == 0:
        raise ValueError(f"expected {keys['input_scale']} above zero, found 0")
    return FP8Tensor(tensors[name], scale, entry.fp8, entry.dtype, input_scale=static)


_TENSOR, _TOKEN = FP8Activations.TENSOR, FP8Activations.TOKEN
ALGORITHMS = {
    "FP8": FP8Spec((0, 0), _TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": FP8Spec((1, 0), _TOKEN),
    "FP8_PB_WO": FP8Spec((128, 128)),
}
"""ModelOpt's algorithms. Without an input scale, "FP8" keeps activations dense."""


def algorithm_of(spec: FP8Spec, static: bool) -> str | None:
    """Return the name of ModelOpt's algorithm, or None."""
    if is_by_channel(spec):
        spec = ALGORITHMS["FP8_PER_CHANNEL_PER_TOKEN"]
    if spec.block == (0, 0) and (spec.activations == _TENSOR) == static:
        spec = dataclasses.replace(spec, activations=spec.activations or _TENSOR)
    elif spec.activations == _TENSOR:
        return None
    return next((name for name, each in ALGORITHMS.items() if each == spec), None)


def is_by_channel(spec: FP8Spec) -> bool:
    """Return whether ModelOpt stores one scale per tensor for each channel, because its algorithm has such a name."""
    return spec == FP8Spec((0, 0), _TOKEN)
