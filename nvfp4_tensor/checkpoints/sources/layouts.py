"""How other quantizations store the weight (N, K) of a linear, and how each is decoded.

=============  =====================================================================================================
GPTQ           ``qweight`` int32 (K / 8, N), ``qzeros`` int32 (K / group, N / 8), ``scales`` (K / group, N) and
               ``g_idx`` int32 (K,), the group of each column. The first of 8 codes is in the lowest bits. The format
               "gptq" stores zero points minus 1, "gptq_v2" as they are. With 2 and 8 bits, an int32 has 16 and 4.
AWQ            ``qweight`` int32 (K, N / 8), ``qzeros`` int32 (K / group, N / 8), ``scales`` (K / group, N). An int32
               has the rows 0, 2, 4, 6, 1, 3, 5, 7, from the lowest bits.
bitsandbytes   In 4 bits, ``weight`` uint8 (N * K / 2, 1), the first code in the high nibble; ``weight.quant_map``, the
               values of the codes; ``weight.absmax``, the scale of each block, in codes if there is
               ``weight.nested_absmax``; and JSON in ``weight.quant_state.bitsandbytes__nf4``.
               In 8 bits, ``weight`` int8 (N, K), and ``SCB`` (N,), the magnitude of the code 127.
FP8            ``weight`` e4m3; beside it ``weight_scale_inv``, a block's, (N / 128, K / 128): DeepSeek, transformers'
               ``fp8``; config.json may have another ``weight_block_size``. Or ``weight_scale``, the tensor's, () or
               (1,); a channel's, (N,) or (N, 1); a block's, also as (N / 128, 1, K / 128, 1): ModelOpt,
               compressed-tensors, fbgemm; MXFP8: (N, K / 32) in e8m0. ``scale``, a block's: DeepSeek's own files.
               ``scale_weight``, the tensor's: ComfyUI. All of these multiply the codes.
=============  =====================================================================================================
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.formats.mxfp4.values import MX_BLOCK
from nvfp4_tensor.checkpoints.io.files import naming
from nvfp4_tensor.checkpoints.io.safetensors import parse_json
from nvfp4_tensor.checkpoints.sources.coded import RAISED, Coded, CodedFolder, Read, Rows, modules_with
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.tensor.fp8 import E4M3, FP8Spec

Found: TypeAlias = Iterator[tuple[str, Coded]]
Settings: TypeAlias = Mapping[str, Any]

_WORD = 32
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of an int32 in which AWQ has each of 8 rows."""
_STATE = ".quant_state.bitsandbytes__"
_SCALES = ("{name}_scale_inv", "{name}_scale", "{module}.scale", "{module}.scale_weight")
_UNUSED = ("input_scale", "activation_scale", "input_scale_ub", "scale_input")
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)


def gptq(folder: CodedFolder, settings: Settings) -> Found:
    """Find GPTQ's weights."""
    written = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if written not in ("gptq", "gptq_v2"):
        raise ValueError(f"{folder.path}: expected GPTQ's format gptq or gptq_v2, found {written}")
    for module in modules_with(folder, "qweight"):
        parts = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales")}
        words, rows = folder.expect(parts["qweight"], torch.int32, (-1, -1))
        groups, zeros = folder.expect(parts["qzeros"], torch.int32, (-1, -1))
        bits = _WORD * zeros // rows
        if bits not in (2, 4, 8):
            raise ValueError(f"{folder.path}: tensor {parts['qzeros']}: expected 2, 4 or 8 bits of GPTQ, found {bits}")
        columns = words * _WORD // bits
        folder.expect(parts["qzeros"], torch.int32, (groups, rows * bits // _WORD))
        folder.expect(parts["scales"], HIGH_PRECISION_DTYPES, (groups, rows))
        if f"{module}.g_idx" in folder.shards.info:
            parts["g_idx"] = f"{module}.g_idx"
            folder.expect(parts["g_idx"], torch.int32, (columns,))
        # Zero points of 0, minus 1, borrow from the one above, which adding 1 to all gives back.
        offset = sum(1 << shift for shift in range(0, _WORD, bits)) if written == "gptq" else 0
        decoder = functools.partial(_gptq_rows, bits=bits, offset=offset, is_indexed="g_idx" in parts)
        coded = Coded(kind=f"GPTQ int{bits}", shape=(rows, columns), parts=parts, decoder=decoder, groups=groups)
        yield f"{module}.weight", coded


def _gptq_rows(read: Read, bits: int, offset: int, is_indexed: bool) -> Rows:
    qweight, scales, indices = read("qweight"), read("scales"), read("g_idx") if is_indexed else None
    zeros = _unpacked(read("qzeros") + offset, bits, 1)

    def rows(first: int, out: Tensor, _: Tensor) -> None:
        of = slice(first, first + len(out))
        out.copy_(_dequantized(_unpacked(qweight[:, of], bits, 0), zeros[:, of], scales[:, of], indices))

    return rows


def awq(folder: CodedFolder, settings: Settings) -> Found:
    """Find AWQ's weights."""
    written = str(settings.get("version") or settings.get("checkpoint_format") or settings.get("format") or "gemm")
    if written.lower() != "gemm":
        raise ValueError(f"{folder.path}: expected AWQ's version gemm, found {written}")
    for module in modules_with(folder, "qweight"):
        parts = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales")}
        columns, words = folder.expect(parts["qweight"], torch.int32, (-1, -1))
        groups, _ = folder.expect(parts["qzeros"], torch.int32, (-1, words))
        rows = words * len(_AWQ_NIBBLES)
        folder.expect(parts["scales"], HIGH_PRECISION_DTYPES, (groups, rows))
        coded = Coded(kind="AWQ int4", shape=(rows, columns), parts=parts, decoder=_awq_rows, groups=groups)
        yield f"{module}.weight", coded


def _awq_rows(read: Read) -> Rows:
    qweight, zeros, scales = read("qweight"), _awq_codes(read("qzeros")), read("scales")

    def rows(first: int, out: Tensor, _: Tensor) -> None:
        of, words = slice(first, first + len(out)), first // len(_AWQ_NIBBLES)
        codes = _awq_codes(qweight[:, words : words + len(out) // len(_AWQ_NIBBLES)])
        out.copy_(_dequantized(codes, zeros[:, of], scales[:, of]))

    return rows


def _awq_codes(words: Tensor) -> Tensor:
    return _unpacked(words, 4, 1).view(len(words), -1, len(_AWQ_NIBBLES))[..., _AWQ_NIBBLES].flatten(1)


def _unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack the codes of int32 (R, C), from the lowest bits, along a dimension."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    codes = words.unsqueeze(dim + 1) >> (shifts if dim else shifts.unsqueeze(-1))
    return (codes & (1 << bits) - 1).flatten(dim, dim + 1)


def _dequantized(codes: Tensor, zeros: Tensor, scales: Tensor, indices: Tensor | None = None) -> Tensor:
    """Decode codes (K, N) to (N, K), with zero points and scales (groups, N), of the groups that indices (K,) say."""
    if indices is not None:
        return ((codes - zeros[indices]) * scales.float()[indices]).t()
    groups = codes.view(len(zeros), -1, codes.shape[1])
    return ((groups - zeros.unsqueeze(1)) * scales.float().unsqueeze(1)).flatten(0, 1).t()


def bitsandbytes(folder: CodedFolder, settings: Settings) -> Found:
    """Find the weights of bitsandbytes, in 4 bits by the settings beside each, and in 8."""
    for key in [key for key in folder.shards.info if _STATE in key]:
        name, kind = key.split(_STATE, 1)
        with naming(folder.shards.info[key].file, key, RAISED):
            coded = _in_four_bits(folder, name, kind, parse_json(bytes(folder.shards[key].tolist())))
        yield name, coded
    for module in modules_with(folder, "SCB", "weight", torch.int8):
        parts = {"codes": f"{module}.weight", "scale": f"{module}.SCB"}
        rows, columns = folder.expect(parts["codes"], torch.int8, (-1, -1))
        folder.expect(parts["scale"], torch.float32, (rows,))
        if (key := f"{module}.weight_format") in folder.shards.info:
            parts["format"] = key
            if folder.shards[key].any():
                raise ValueError(f"{folder.path}: tensor {key}: expected 0, the rows in order")
        yield (
            f"{module}.weight",
            Coded(kind="bitsandbytes int8", shape=(rows, columns), parts=parts, decoder=_int8_rows),
        )


def _int8_rows(read: Read) -> Rows:
    scale = read("scale").unsqueeze(1)
    return lambda first, out, codes: out.copy_(codes.float().mul_(scale[first : first + len(out)]).mul_(1 / 127))


def _in_four_bits(folder: CodedFolder, name: str, kind: str, state: Settings) -> Coded:
    """Describe a weight with these settings: "shape", "blocksize" and, of the scales, "nested_blocksize" and
    "nested_offset"."""
    (rows, columns), block = state["shape"], state["blocksize"]
    if not all(isinstance(each, int) and each > 0 for each in (rows, columns, block)) or rows * columns % 2:
        raise ValueError(f"{folder.path}: tensor {name}: expected a shape and a blocksize, found {state}")
    parts = {"codes": name, **{part: f"{name}.{part}" for part in ("absmax", "quant_map")}}
    parts["state"] = f"{name}{_STATE}{kind}"
    stored = folder.shards.info[name]  # FSDP needs the bytes as another dtype
    if stored.nbytes * 2 != rows * columns or rows * columns // 2 % (rows * stored.dtype.itemsize):
        raise ValueError(f"{stored.file}: tensor {name}: expected {rows * columns // 2} bytes, found {stored}")
    blocks = math.ceil(rows * columns / block)
    offset, nested = 0.0, 0
    if f"{name}.nested_absmax" in folder.shards.info:
        offset, nested = float(state["nested_offset"]), state["nested_blocksize"]
        parts |= {part: f"{name}.{part}" for part in ("nested_absmax", "nested_quant_map")}
        if not isinstance(nested, int) or nested < 1 or not math.isfinite(offset):
            raise ValueError(f"{folder.path}: tensor {name}: expected a nested_blocksize, found {state}")
        folder.expect(parts["nested_absmax"], torch.float32, (math.ceil(blocks / nested),))
        folder.expect(parts["nested_quant_map"], torch.float32, (256,))
    folder.expect(parts["absmax"], torch.uint8 if nested else torch.float32, (blocks,))
    folder.expect(parts["quant_map"], torch.float32, (16,))
    decoder = functools.partial(_four_bit_rows, columns=columns, block=block, offset=offset, nested=nested)
    unit = rows if columns % block else 1  # of whole blocks
    return Coded(kind=f"bitsandbytes {kind}", shape=(rows, columns), parts=parts, decoder=decoder, unit=unit)


def _four_bit_rows(read: Read, columns: int, block: int, offset: float, nested: int) -> Rows:
    scales, values = read("absmax"), read("quant_map")
    if nested:
        of_scales = read("nested_absmax").repeat_interleave(nested)[: len(scales)]
        scales = read("nested_quant_map")[scales.int()] * of_scales + offset
    pairs = torch.stack((values.repeat_interleave(16), values.repeat(16)), dim=1)  # of a byte

    def rows(first: int, out: Tensor, codes: Tensor) -> None:
        flat = pairs[codes.view(-1).view(torch.uint8).int()].view(-1)
        of_rows = scales[first * columns // block : math.ceil((first + len(out)) * columns / block)]
        out.copy_((flat * of_rows.repeat_interleave(block)[: len(flat)]).view(-1, columns))

    return rows


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
    shape = folder.expect(name, E4M3, (-1, -1))
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
        decoder=functools.partial(_fp8_rows, shape=shape, block=block),
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


def _fp8_rows(read: Read, shape: Sequence[int], block: tuple[int, int]) -> Rows:
    scale = read("scale")
    scale = (scale.view(torch.float8_e8m0fnu) if scale.dtype in _E8M0 else scale).float()
    scale = scale.reshape(FP8Spec(block).scale_shape(shape))
    return lambda first, out, codes: torch.ops.nvfp4.decode_fp8(codes, scale, *block, first, out)
