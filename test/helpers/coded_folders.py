"""Folders with weights in the codes of other quantizations, as their writers lay them out."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from helpers.checkpoint_folders import CONFIG


def write_coded(folder: Path, tensors, settings=None, metadata=None, **config):
    """Write a folder with one file of tensors, and these settings as quantization_config."""
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", **(metadata or {})})
    quantization = {"quantization_config": settings} if settings else {}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **quantization, **config}))
    return folder


def in_fp8(tensors, block=128):
    """Return tensors with their projections in FP8 with DeepSeek's names, and with the values of these codes."""
    coded, decoded = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if "_proj" in name:
            coded[name], coded[f"{name}_scale_inv"], values = in_blocks(weight.float(), block, block)
            decoded[name] = values.bfloat16()
    return coded, decoded


def in_blocks(weight, height, width):
    """Return the codes, scales and values of a weight in FP8 whose blocks of this size share a scale."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // height), -(-columns // width))
    codes, values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            where = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scale[i, j] = weight[where].abs().max() / 448
            codes[where] = (weight[where] / scale[i, j]).to(torch.float8_e4m3fn)
            values[where] = codes[where].float() * scale[i, j]
    return codes, scale, values


GROUP = 32
_AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(codes, dim):
    """Return eight codes of 4 bits in each int32, along a dimension, the first one in the lowest bits."""
    codes = codes.int().unflatten(dim, (-1, 8))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32).view(-1, *[1] * (1 - dim))
    return (codes << shifts).sum(dim + 1).int()


def in_gptq(tensors):
    """Return tensors with their projections in GPTQ's layout "gptq_v2", and with the values of these codes."""
    return _in_integers(tensors, _gptq_parts)


def in_awq(tensors):
    """Return tensors with their projections in AWQ's layout "gemm", and with the values of these codes."""
    return _in_integers(tensors, _awq_parts)


def _in_integers(tensors, parts_of):
    coded, decoded = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if "_proj" not in name:
            continue
        columns = weight.float().t().unflatten(0, (-1, GROUP))  # (groups, 32, N)
        scale = ((columns.amax(1) - columns.amin(1)) / 15).half()
        zero = (-columns.amin(1) / scale).round().clamp(0, 15)
        codes = (columns / scale.unsqueeze(1) + zero.unsqueeze(1)).round().clamp(0, 15)
        values = (codes - zero.unsqueeze(1)) * scale.unsqueeze(1).float()
        decoded[name] = values.flatten(0, 1).t().bfloat16().contiguous()
        del coded[name]
        parts = {"scales": scale, **parts_of(codes.flatten(0, 1), zero)}
        coded |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    return coded, decoded


def _gptq_parts(codes, zero):
    return {"qweight": packed(codes, 0), "qzeros": packed(zero, 1), "g_idx": torch.arange(len(codes)).int() // GROUP}


def _awq_parts(codes, zero):
    reordered = [each.unflatten(1, (-1, 8))[..., _AWQ_ROWS].flatten(1) for each in (codes, zero)]
    return {"qweight": packed(reordered[0], 1), "qzeros": packed(reordered[1], 1)}


CODINGS = {
    "fp8": (in_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "gptq": (in_gptq, {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4}),
    "awq": (in_awq, {"quant_method": "awq", "version": "gemm", "bits": 4}),
}
"""What encodes tensors, and the settings that describe the codes, by quant_method."""
