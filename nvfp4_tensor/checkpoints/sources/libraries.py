"""Weights that compressed-tensors and torchao decode themselves.

compressed-tensors stores integers of 1 to 8 bits as ``weight`` int8 (N, K), or as ``weight_packed`` int32, bit after
bit along the rows, with ``weight_shape``; ``weight_scale`` (1,), (N, 1) or (N, K / group); ``weight_zero_point`` of the
same shape, packed along the columns if the weight is packed; and, from earlier releases, ``weight_g_idx`` (K,), the
group of each column. torchao describes its tensors in the metadata of the files (see ``formats/torchao.py``).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.formats.compressed_tensors import group_of
from nvfp4_tensor.checkpoints.formats.torchao import described
from nvfp4_tensor.checkpoints.io.files import naming
from nvfp4_tensor.checkpoints.sources.coded import RAISED, Coded, CodedFolder, Read, Rows, modules_with
from nvfp4_tensor.checkpoints.sources.layouts import Found, Settings, fp8_weight
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES, TILE_ROWS, unpack


def library(name: str) -> Any:
    """Import a module of a library that decodes weights."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        raise ImportError(f"weights of {package} need the package {package}: pip install {package}") from error


def compressed_tensors(folder: CodedFolder, settings: Settings) -> Found:
    """Find compressed-tensors' integers."""
    info = folder.shards.info
    packed = modules_with(folder, "weight_shape", "weight_packed")
    for module in (*packed, *modules_with(folder, "weight_scale", "weight", torch.int8)):
        arguments = _arguments(folder, module)
        bits = arguments.num_bits
        parts = {"codes": f"{module}.weight{'_packed' * (module in packed)}", "scale": f"{module}.weight_scale"}
        if module in packed:
            parts["shape"] = f"{module}.weight_shape"
            folder.expect(parts["shape"], (torch.int64, torch.int32), (2,))
            rows, columns = folder.shards[parts["shape"]].tolist()
            folder.expect(parts["codes"], torch.int32, (rows, math.ceil(columns * bits / 32)))
        else:
            rows, columns = folder.expect(parts["codes"], torch.int8, (-1, -1))
        group = arguments.group_size or columns
        scales = {"tensor": (1,), "channel": (rows, 1), "group": (rows, columns / group)}[arguments.strategy]
        folder.expect(parts["scale"], HIGH_PRECISION_DTYPES, scales)
        if not arguments.symmetric:
            parts["zero"] = f"{module}.weight_zero_point"
            is_packed = module in packed and len(scales) > 1
            shape = (math.ceil(rows * bits / 32), scales[1]) if is_packed else scales
            folder.expect(parts["zero"], torch.int32 if is_packed else torch.int8, shape)
        if f"{module}.weight_g_idx" in info:
            parts["g_idx"] = f"{module}.weight_g_idx"
            folder.expect(parts["g_idx"], torch.int32, (columns,))
        decoder = functools.partial(
            _compressed_rows, arguments=arguments, shape=(rows, columns), is_there=frozenset(parts)
        )
        unused = tuple(key for key in (f"{module}.input_scale", f"{module}.input_zero_point") if key in info)
        coded = Coded(
            kind=f"compressed-tensors int{bits}", shape=(rows, columns), parts=parts, decoder=decoder, unused=unused,
            groups=columns // group,
        )  # fmt: skip
        yield f"{module}.weight", coded


def _arguments(folder: CodedFolder, module: str) -> Any:
    """Return compressed-tensors' description of a weight."""
    group = group_of(folder, f"{module}.weight", lambda group: group.get("weights"))
    try:
        arguments = library("compressed_tensors.quantization").QuantizationArgs(**group["weights"])
    except ValueError as error:
        raise ValueError(f"{folder.path}: the config group of {module} is invalid: {error}") from None
    strategy = getattr(arguments.strategy, "value", arguments.strategy)
    if arguments.type != "int" or strategy not in ("tensor", "channel", "group"):
        raise ValueError(
            f"{folder.path}: {module}: expected integers by tensor, channel or group, found {arguments.num_bits}-bit "
            f"{arguments.type} by {strategy}"
        )
    return arguments.model_copy(update={"strategy": strategy})


def _compressed_rows(read: Read, arguments: Any, shape: tuple[int, int], is_there: frozenset[str]) -> Rows:
    unpacked = library("compressed_tensors.compressors.pack_quantized.helpers").unpack_from_int32
    dequantize = library("compressed_tensors.quantization.lifecycle.forward").dequantize
    scale, zero, order = read("scale"), None, None
    if "zero" in is_there:
        zero = read("zero")
        if zero.dtype == torch.int32:
            zero = unpacked(zero, arguments.num_bits, torch.Size((shape[0], scale.shape[1])), packed_dim=0)
    if "g_idx" in is_there:
        order = read("g_idx").argsort(stable=True)  # columns by group, each of group_size
    is_whole = len(scale) != shape[0]

    def rows(first: int, out: Tensor, codes: Tensor) -> None:
        if "shape" in is_there:
            codes = unpacked(codes, arguments.num_bits, out.shape)
        of_rows = [x if x is None or is_whole else x[first : first + len(out)] for x in (scale, zero)]
        if order is None:
            out.copy_(dequantize(codes, *of_rows, args=arguments))
        else:
            out[:, order] = dequantize(codes[:, order], *of_rows, args=arguments).to(out.dtype)

    return rows


_CODES = {
    "Int8Tensor": (torch.int8,),
    "IntxUnpackedToInt8Tensor": (torch.int8,),
    "Int4Tensor": (torch.int8,),
    "Float8Tensor": (torch.float8_e4m3fn,),
    "MXTensor": (torch.float8_e4m3fn, torch.uint8),
}
"""The classes of torchao that are read, and the dtypes of their codes."""


def torchao(folder: CodedFolder, settings: Settings) -> Found:
    """Find torchao's tensors."""
    for name, fields in described(folder.shards).items():
        if fields["_type"] == "Tensor":
            continue
        if fields["_type"] not in _CODES:
            wanted = " or ".join(_CODES)
            raise ValueError(f"{folder.path}: tensor {name}: expected torchao's {wanted}, found {fields['_type']}")
        with naming(folder.path, name, RAISED):
            coded = _of_torchao(folder, name, fields)
        yield name, coded


def _of_torchao(folder: CodedFolder, name: str, fields: Mapping[str, Any]) -> Coded:
    kind, info = fields["_type"], folder.shards.info
    module, _, attribute = name.rpartition(".")
    parts = {part: f"{module}._{attribute}_{part}" for part in fields["_tensor_data_names"]}
    if "act_pre_scale" in parts:
        raise ValueError(f"{folder.path}: tensor {parts['act_pre_scale']} rescales inputs, which is not supported")
    unused = tuple(parts.pop(part) for part in [*parts] if part.startswith("act_"))
    parts["codes"] = parts.pop("qdata")
    rows, columns = folder.expect(parts["codes"], _CODES[kind], (-1, -1))
    columns *= 2 if kind == "Int4Tensor" or info[parts["codes"]].dtype == torch.uint8 else 1
    for key in parts.values():
        if key not in info:
            raise ValueError(f"{folder.path}: tensor {key} is missing: {name} needs it")
    if kind == "Float8Tensor":
        return fp8_weight(folder, parts["codes"], parts["scale"], unused=unused)
    decoder = functools.partial(_torchao_rows, fields=fields, names=tuple(parts), shape=(rows, columns))
    unit = TILE_ROWS
    if kind == "Int4Tensor":
        group = fields["_data"]["block_size"][-1]
        for part in ("scale", "zero_point"):
            folder.expect(parts[part], HIGH_PRECISION_DTYPES, (columns / group, rows))
        decoder = functools.partial(_int4_rows, group=group)
    elif (info[parts["scale"]].shape or (1,))[0] not in (1, rows) or fields["_data"].get("is_swizzled_scales"):
        unit = rows  # its scales cannot be cut
    return Coded(kind=f"torchao {kind}", shape=(rows, columns), parts=parts, decoder=decoder, unit=unit, unused=unused)


def _torchao_rows(read: Read, fields: Mapping[str, Any], names: tuple[str, ...], shape: tuple[int, int]) -> Rows:
    from_dict = library("torchao.prototype.safetensors.safetensors_utils").object_from_dict
    others = {part: read(part) for part in names if part != "codes"}

    def rows(first: int, out: Tensor, codes: Tensor) -> None:
        cut = {part: x[first : first + len(out)] if x.dim() and len(x) == shape[0] else x for part, x in others.items()}
        data = {**fields["_data"], "qdata": codes, **cut}
        if isinstance(data.get("block_size"), list) and data["block_size"]:
            data["block_size"] = [min(data["block_size"][0], len(out)), *data["block_size"][1:]]
        out.copy_(from_dict({"_type": fields["_type"], "_data": data}).dequantize())

    return rows


def _int4_rows(read: Read, group: int) -> Rows:
    """torchao multiplies by these on CUDA only: value = code * scale + zero_point, codes -8 to 7, the first one low."""
    scale, zero = (read(part).float().t().unsqueeze(-1) for part in ("scale", "zero_point"))

    def rows(first: int, out: Tensor, codes: Tensor) -> None:
        of = slice(first, first + len(out))
        values = ((unpack(codes.view(torch.uint8)) ^ 8).float() - 8).view(len(out), -1, group)
        out.copy_((values * scale[of] + zero[of]).flatten(1))

    return rows
