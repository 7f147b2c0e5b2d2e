"""Weights in FP8 (e4m3), by the names and shapes of the scales beside them. All of these multiply the codes.

====================  ===============================================================================================
``weight_scale_inv``  a block's, (N / 128, K / 128): DeepSeek, transformers' ``fp8``. config.json may have another
                      ``weight_block_size``.
``weight_scale``      the tensor's, () or (1,); a channel's, (N,) or (N, 1); a block's, also as (N / 128, 1, K / 128,
                      1): ModelOpt, compressed-tensors, fbgemm. MXFP8: (N, K / 32) in e8m0
``scale``             a block's: DeepSeek's own files
``scale_weight``      the tensor's: ComfyUI
====================  ===============================================================================================
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from nvfp4_tensor.checkpoints.formats.mxfp4.values import MX_BLOCK
from nvfp4_tensor.checkpoints.sources.coded import Coded, CodedFolder, Read, Rows, expect
from nvfp4_tensor.checkpoints.sources.layouts import Found, Settings
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.tensor.fp8 import E4M3, FP8Spec

_SCALES = ("{name}_scale_inv", "{name}_scale", "{module}.scale", "{module}.scale_weight")
_UNUSED = ("input_scale", "activation_scale", "input_scale_ub", "scale_input")
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)


def fp8(folder: CodedFolder, settings: Settings) -> Found:
    """Find weights in FP8."""
    info, taken = folder.shards.info, {key for each in folder.coded_weights.values() for key in each.parts.values()}
    for name in [name for name, each in info.items() if each.dtype == E4M3 and name not in taken]:
        module = name.rpartition(".")[0]
        keys = [key.format(name=name, module=module) for key in _SCALES]
        scale = next((key for key in keys if key in info), None)
        if scale is None:
            raise ValueError(f"{info[name].file}: tensor {name}: expected its scale, {' or '.join(keys)}, found none")
        unused = tuple(f"{module}.{last}" for last in _UNUSED if f"{module}.{last}" in info)
        yield name, fp8_weight(folder, name, scale, settings.get("weight_block_size"), unused)


def fp8_weight(
    folder: CodedFolder, name: str, scale: str, configured: Sequence[int] | None = None, unused: tuple[str, ...] = ()
) -> Coded:
    """Describe a weight in FP8 by the shape of its scales, and by the size of blocks in the configuration."""
    shape = expect(folder, name, E4M3, (0, 0))
    block = _block(shape, folder.shards.info[scale].shape, configured)
    found = folder.shards.info[scale]
    if block is None or found.dtype not in (*HIGH_PRECISION_DTYPES, *_E8M0):
        wanted = f"scales of {name} {list(shape)} by tensor, channel or block {list(configured or ())}"
        raise ValueError(f"{found.file}: tensor {scale}: expected {wanted}, found {found}")
    kinds = {(0, 0): "FP8 per tensor", (1, 0): "FP8 per channel", (1, MX_BLOCK): "MXFP8"}
    return Coded(
        kind=kinds.get(block, f"FP8 in blocks of {block[0]}x{block[1]}"),
        shape=(shape[0], shape[1]),
        parts={"codes": name, "scale": scale},
        decoder=functools.partial(_rows, shape=shape, block=block),
        unused=unused,
    )


def _block(shape: Sequence[int], scales: Sequence[int], configured: Sequence[int] | None) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale, 0 for all; None if no blocks have scales of this shape."""
    rows, columns = shape
    if math.prod(scales) == 1:
        return 0, 0
    if tuple(scales) in ((rows,), (rows, 1)):
        return 1, 0
    if len(scales) == 4 and scales[1] == scales[3] == 1:
        scales = scales[::2]
    if len(scales) != 2 or 0 in scales:
        return None
    height, width = configured or (128, 128)
    if tuple(scales) == FP8Spec((height, width)).scale_shape(shape):
        return height, width
    is_exact = not configured and rows % scales[0] == 0 and columns % scales[1] == 0
    return (rows // scales[0], columns // scales[1]) if is_exact else None


def _rows(read: Read, shape: Sequence[int], block: tuple[int, int]) -> Rows:
    scale = read("scale")
    scale = (scale.view(torch.float8_e8m0fnu) if scale.dtype in _E8M0 else scale).float()
    scale = scale.reshape(FP8Spec(block).scale_shape(shape))
    return lambda first, out, codes: torch.ops.nvfp4.decode_fp8(codes, scale, *block, first, out)
